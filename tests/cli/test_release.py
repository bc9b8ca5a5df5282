"""`effuse release`: what others' libraries open, what is measured, and what never enters the folder."""

import hashlib
import json
import shutil

import pytest
import torch

from effuse.core.metric import Images
from effuse.core.recipe import Recipe
from effuse.tools.release import picked

STATED = (
    "--name '<b>Digits</b> | x' --license CC-BY-4.0 --contact 'A <script>alert(1)</script> hospital' --purpose teaching "
    "--source 'digits of three sites' --limits diagnosis"
)


@pytest.fixture(scope="module")
def trained(effuse, shrunk, tmp_path_factory):
    """A run of the shortened demo."""
    folder = tmp_path_factory.mktemp("release") / "run"
    assert effuse(f"run demo {shrunk} --out {folder} --quiet").code == 0
    return folder


@pytest.fixture(scope="module")
def released(effuse, trained):
    """Its release, with metrics of the whole and of each class."""
    folder = trained.parent / "released"
    metrics = "[fid(n=40, encoder=pixels()), by_class(fid(n=40, encoder=pixels()))]"
    answer = effuse(f"release {trained} --to {folder} -n 40 --metrics '{metrics}' {STATED} --json")
    assert answer.code == 0, answer.err
    return folder, answer.json


def test_checksums_are_right(released):
    folder, _ = released
    listed = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(listed) == files - {"SHA256SUMS"}
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in listed.items())


def test_datasets_opens_both_forms(released, tmp_path):
    """Four images of each digit, with equal pixels in folder and table."""
    import datasets

    folder, _ = released
    options = {"split": "train", "cache_dir": str(tmp_path)}
    images = datasets.load_dataset("imagefolder", data_dir=str(folder / "images"), **options)
    rows = datasets.load_dataset("parquet", data_files=str(folder / "data.parquet"), **options)
    assert images.features["label"].names == rows.features["label"].names == [str(i) for i in range(10)]
    found = [sorted((row["label"], row["image"].tobytes()) for row in part) for part in (images, rows)]
    assert found[0] == found[1] and [label for label, _ in found[0]] == [i // 4 for i in range(40)]


def test_croissant_opens_the_table(released):
    import mlcroissant

    folder, _ = released
    opened = mlcroissant.Dataset(jsonld=str(folder / "croissant.json"))
    assert not opened.metadata.issues.errors and not opened.metadata.issues.warnings
    rows = list(opened.records("images"))
    assert len(rows) == 40 and rows[0]["images/image"].size == (8, 8)
    assert opened.metadata.data_use_cases == ["teaching"] or opened.metadata.data_use_cases == "teaching"


def test_diffusers_opens_the_model(released):
    from diffusers import UNet2DModel

    folder, _ = released
    assert UNet2DModel.from_pretrained(folder / "model" / "unet").config.sample_size == 8


def test_what_was_measured_and_what_was_not(released):
    """FID of the whole and of each class were asked for; precision, use and attacks were not."""
    folder, answer = released
    report = json.loads((folder / "report.json").read_text())
    lines = {line["what"]: line for q in report["scorecard"] for line in q["lines"]}
    assert [q["name"][0] for q in report["scorecard"]] == ["C"] * 7
    assert float(lines["fid_pixels"]["value"]) == pytest.approx(report["metrics"]["fid_pixels"]["value"], rel=1e-3)
    values = [m["value"] for name, m in report["metrics"].items() if "_of_" in name]
    assert len(values) == 10
    told = lines["fid_pixels, lowest and highest"]["value"]
    assert told.startswith(f"{min(values):.4g} (") and f" to {max(values):.4g} (" in told
    assert answer["not_measured"] == report["not_measured"]
    for what in ("Coverage: variety", "Consistency: use at each site", "Privacy: memorisation", "Privacy: membership"):
        assert what in report["not_measured"]
    assert "Congruence: closeness to real images" not in report["not_measured"]
    html = (folder / "report.html").read_text()
    assert "<td>fid_pixels</td>" in html and html.count('src="data:image/png;base64,') == 1
    assert "close to noise" in lines["neighbouring pixels"]["value"], "the run has hardly trained"


def test_the_picture_has_images_of_every_class():
    """Of 3 + 1,000 + 50 images in the order of their classes, a picture of 100 has 3, 33 and 33."""
    labels = torch.tensor([0] * 3 + [1] * 1000 + [2] * 50)
    shown = picked(Images(torch.arange(1053.0)[:, None, None, None], labels))
    assert shown.labels.bincount().tolist() == [3, 33, 33]
    assert shown.pixels[[0, 3, 36], 0, 0, 0].tolist() == [0.0, 3.0, 1003.0], "the first of each class"
    assert len(picked(Images(torch.zeros(200, 1, 2, 2)))) == 100


def test_foreign_words_are_text_and_no_path_is_told(released, trained):
    folder, _ = released
    for path in folder.rglob("*"):
        if path.suffix in (".md", ".html", ".json", ".csv"):
            words = path.read_text()
            assert str(trained.parent) not in words, path
            assert "<script" not in words or path.suffix == ".json", path
    assert "&lt;script&gt;" in (folder / "report.html").read_text()
    card = (folder / "model_card.md").read_text()
    assert "# &lt;b&gt;Digits&lt;/b&gt; \\| x" in card and 'license: "CC-BY-4.0"' in card


def test_an_audit_is_told_by_its_worst_figures(effuse, trained, tmp_path):
    """The attack with the highest upper end is named; the most memorised image's score is the lowest."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert effuse(f"audit {run} -n 30 --quiet").code == 0
    audit = json.loads((run / "audit/audit.json").read_text())
    assert effuse(f"release {run} --to out -n 20 --metrics []").code == 0
    said = {line["what"]: line for line in json.loads((tmp_path / "out/report.json").read_text())["privacy"]}
    name, worst = max(audit["membership"]["attacks"].items(), key=lambda item: item[1]["auc"]["high"])
    line = said["membership: the best attack, upper end of its AUC"]
    assert line["value"] == f"{worst['auc']['high']:.4g}" and line["how"].startswith(f"{name};")
    memory = said["memorisation: images too near to a training image"]["value"]
    assert f"the lowest score is {audit['memorisation']['generated']['lowest']:.4g}" in memory
    assert not list((tmp_path / "out").rglob("nearest*"))


def test_a_budget_is_told_with_its_limits(effuse, tmp_path):
    """A simulated private run says that its noise protects nobody."""
    private = (
        "--set 'algorithm=fedavg(local=adam(lr=1e-3, batch=64, steps=1, privacy=dp_sgd()))' "
        "--set 'budget=budget(epsilon=8.0)' --set rounds=1 --set evaluate.metrics=[] --set evaluate.grid=0 "
        "--set sampler.steps=2 --set threads=1"
    )
    assert effuse(f"run demo {private} --out run --quiet").code == 0
    assert effuse("release run --to out -n 20").code == 0
    said = {line["what"]: line["value"] for line in json.loads((tmp_path / "out/report.json").read_text())["privacy"]}
    assert 7.5 < float(said["epsilon, the most of any client"]) <= 8
    assert said["unit of privacy"] == "one image, replaced by nothing"
    assert "protects nobody" in said["noise"]


def test_what_is_not_released(effuse, trained, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert "full is not an empty folder" in effuse(f"release {trained} --to full").sentence
    unfinished = tmp_path / "unfinished"
    shutil.copytree(trained, unfinished)
    (unfinished / "result.json").unlink()
    assert "not finished" in effuse(f"release {unfinished} --to out").sentence
    solver = "adam(lr=1e-3, steps=1)"
    for algorithm, why in (
        (f"local_only(local={solver})", "leaves each client a model of its own"),
        (f"class_means(central={solver})", "not drawn by a network, and may be real ones"),
        (
            f"fedddpm(local={solver}, warmup={solver}, central={solver}, real=True)",
            "its server holds real images",
        ),
    ):
        other = tmp_path / algorithm.partition("(")[0]
        shutil.copytree(trained, other)
        manifest = json.loads((other / "manifest.json").read_text())
        manifest["recipe"] = Recipe.restore(manifest["recipe"]).changed([f"algorithm={algorithm}"]).saved()
        (other / "manifest.json").write_text(json.dumps(manifest))
        assert why in effuse(f"release {other} --to out").sentence
    assert not (tmp_path / "out").exists()
