"""`effuse audit` on runs that memorised and runs that did not, its files, and what it refuses."""

import json
import re
import shutil
import stat
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from memoriser import Memoriser, RandomImages
from PIL import Image
from toy import ALGORITHMS, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.solvers import Adam
from effuse.diffusion.samplers import Ddim
from effuse.models.resnet import Cnn
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear


def memorising(steps: int, **changes):
    """Two clients learn random images by heart, if they have steps enough; half of the 100 canaries are out."""
    values = {
        "data": RandomImages(n=160),
        "model": Memoriser(),
        "task": Denoise(schedule=Linear(steps=100)),
        "clients": 2,
        "rounds": 1,
        "algorithm": FedAvg(local=Adam(lr=3e-3, batch=64, steps=steps)),
        "canaries": 100,
        "sampler": Ddim(steps=10),
    }
    return toy_recipe(**(values | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three runs without noise: one memorised though it claims epsilon 0.1, one memorised and claims nothing, one hardly
    trained and claims epsilon 0.1."""
    folder = tmp_path_factory.mktemp("audits")
    run(memorising(1500), folder / "open")
    shutil.copytree(folder / "open", folder / "broken")
    run(memorising(1), folder / "fresh")
    claim(folder / "broken")
    claim(folder / "fresh")
    return folder


def claim(folder: Path) -> None:
    """A budget in the manifest of a run that added no noise."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["recipe"]["budget"] = "budget(epsilon=0.1)"
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_promise_that_does_not_hold_is_an_error(effuse, trained):
    """The bound from the canaries is above the promise; the files are there all the same."""
    out = trained / "broken" / "audit"
    answer = effuse(f"audit {trained}/broken -n 20")
    assert answer.code == 1 and re.search(
        r"broken leaks more than was promised: .* at least 0\.\d\d at 95%", answer.sentence
    )
    assert "the promise is 0.1; do not release the model" in answer.sentence
    report = json.loads((out / "audit.json").read_text())
    assert answer.sentence == f"AuditError: {report['error']}" and report["one_run"]["epsilon"] > 0.5
    assert report["error"] in (out / "index.html").read_text().replace("&#x27;", "'")
    shown = effuse(f"audit {trained}/broken -n 20 --json")
    assert shown.code == 1 and shown.json == report, "a second audit gives the same numbers"
    assert report["membership"]["above"], "attacks find more at 1 % than epsilon 0.1 allows"


def test_what_was_memorised_is_measured_without_a_promise(effuse, trained):
    report = effuse(f"audit {trained}/open -n 20 --json --members 60").json
    assert report["promise"] is None and report["error"] is None and report["one_run"]["epsilon"] > 0.5
    assert report["one_run"]["delta"] == 1e-5 and report["one_run"]["guesses"] == 50 and report["one_run"]["canaries"] == 100
    found = report["membership"]
    assert found["bound"] is None and found["above"] == [] and found["members"] == found["others"] == 60
    assert found["attacks"].keys() == {"loss", "pia", "secmi", "norm"}
    assert all(found["attacks"][name]["auc"]["low"] > 0.55 for name in ("pia", "secmi", "norm"))


def test_a_fresh_model_gives_nothing_away(effuse, trained):
    answer = effuse(f"audit {trained}/fresh -n 20")
    assert answer.code == 0 and "epsilon 0.1, delta 1e-05, per image" in answer.out
    report = json.loads((trained / "fresh/audit/audit.json").read_text())
    assert report["one_run"]["epsilon"] == 0.0 and report["error"] is None and report["membership"]["above"] == []
    assert report["membership"]["bound"] == pytest.approx(0.0110618, abs=1e-6), "e^0.1 / 100 + 1e-5"
    for attack in report["membership"]["attacks"].values():
        assert attack["auc"]["low"] < 0.5 < attack["auc"]["high"] and attack["tpr"]["low"] < attack["fpr"]["high"]


def test_members_are_what_was_trained_on(effuse, trained):
    """Of 160 images those that the canaries' coins left out were not."""
    recipe = memorising(1)
    out = 100 - int(recipe.canaries_in(recipe.data.load("train"))[1].sum())
    report = effuse(f"audit {trained}/fresh -n 20 --json").json
    assert report["memorisation"]["training_images"] == report["membership"]["members"] == 160 - out


def test_the_numbers_of_memorisation(effuse, trained):
    """20 generated images and, as the 50 neighbours are few, 50 real ones; a histogram counts each once."""
    found = effuse(f"audit {trained}/fresh -n 20 --json").json["memorisation"]
    assert (found["generated"]["n"], found["held_out"]["n"], found["neighbours"]) == (20, 50, 50)
    for kind in ("generated", "held_out"):
        assert sum(found[kind]["histogram"]) == found[kind]["n"] and len(found["edges"]) == 41
        assert found[kind]["below"] == found[kind]["share"] == 0 and 1 < found[kind]["lowest"] <= found[kind]["median"] <= 2


def test_pictures_stay_private(effuse, trained):
    """20 pairs in rows of five: each two images of 64 pixels with margins of 2, and 16 before the next; four rows. Only the
    owner may read them."""
    assert effuse(f"audit {trained}/fresh -n 20 --quiet") == (0, "", "")
    audit = trained / "fresh" / "audit"
    picture = audit / "private" / "nearest.png"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (audit, picture.parent, picture)]
    assert modes == [0o700, 0o700, 0o600]
    with Image.open(picture) as shown:
        assert shown.size == (5 * (2 * 66 + 16), 4 * 66 + 2)
        tiles = np.asarray(shown)[2::66, 2 + 66 :: 2 * 66 + 16, 0]
    real = memorising(1).data.load("train").images[:, 0, 0, 0].tolist()
    assert set(tiles.flatten().tolist()) <= set(real), "every second image is a training image"
    assert "<img" not in (audit / "index.html").read_text()


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found, self.attributes = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_has_no_scripts_and_shows_names_as_text(effuse, trained, tmp_path):
    name = "<script>alert(1)</script>&run"
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    run(memorising(1), tmp_path / name)
    assert effuse(f"audit '{name}' -n 20 --quiet").code == 0
    text = (tmp_path / name / "audit" / "index.html").read_text()
    tags = Tags(text)
    assert not {"script", "img", "link", "iframe", "object", "a"} & tags.found and {"svg", "table"} <= tags.found
    assert not [a for a in tags.attributes if a.startswith("on") or a in ("href", "src")]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;run" in text and "http" not in text.replace("http-equiv", "")


def test_images_that_the_server_keeps_are_audited(effuse, toy_file):
    """FedDDPM keeps a tenth of 14, 13 and 13 images; forty training images are fewer than 50 neighbours."""
    toy = toy_file(algorithm=ALGORITHMS["fedddpm"], rounds=1, sampler=Ddim(steps=2))
    assert effuse(f"run {toy} --out run --quiet").code == 0
    for options, n in (("", 3), ("-n 2", 2)):
        report = effuse(f"audit run {options} --json").json
        assert report["about"]["images"] == "kept by the server" and report["memorisation"]["generated"]["n"] == n
        assert report["memorisation"]["neighbours"] == 40 and report["one_run"] is None


def test_a_classifier_is_attacked_by_its_loss(effuse, tmp_path):
    """It has no images; canaries are guessed by the loss too."""
    recipe = memorising(300, model=Cnn(), task=Classify(), sampler=None)
    run(recipe, tmp_path / "scores")
    report = effuse("audit scores --json").json
    assert report["memorisation"] is None and report["membership"]["attacks"].keys() == {"loss"}
    assert report["one_run"]["attack"] == "loss" and not Path("scores/audit/private/nearest.png").exists()
    page = Path("scores/audit/index.html").read_text()
    assert "Not measured: there are no generated images." in page and "<svg" not in page
    assert "keeps no generator; use --model global" in effuse("audit scores --model generator").sentence


def test_what_cannot_be_audited(effuse, toy_file, trained):
    assert "--model local: there is none; did you mean global" in effuse(f"audit {trained}/open --model local").sentence
    assert "guesses: 101 of 100 canaries" in effuse(f"audit {trained}/open -n 20 --guesses 101").sentence
    assert "not a run folder" in effuse("audit .").sentence
    toy = toy_file(algorithm=ALGORITHMS["localonly"], rounds=1)
    assert effuse(f"run {toy} --out alone --quiet").code == 0
    assert (
        "local_only leaves each client its own model; audit_model() audits one at its site" in effuse("audit alone").sentence
    )
    manifest = json.loads(Path("alone/manifest.json").read_text())
    manifest["recipe"] |= {"algorithm": toy_recipe().saved()["algorithm"]}
    sites = "elsewhere(side=4, channels=1, classes=['dark', 'light'])"
    for data, words in ((sites, "its images are at the sites"), ("toy_images(n=42)", "was trained on different data")):
        manifest["recipe"]["data"] = data
        Path("alone/manifest.json").write_text(json.dumps(manifest))
        assert words in effuse("audit alone").sentence
