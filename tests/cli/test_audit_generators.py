"""`effuse audit --model generator`: each client of FedDiff against its own images, and two audits in one page."""

import dataclasses
import json
import re

import pytest
import torch
from memoriser import LabelledMemoriser, RandomImages
from toy import ALGORITHMS, SYNTHESIS, toy_recipe

from effuse.algorithms.feddiff import FedDiff
from effuse.core.privacy import Budget, DpSgd
from effuse.core.solvers import Adam
from effuse.diffusion.samplers import Ddim
from effuse.models.resnet import Cnn
from effuse.privacy.histogram import Gaussian
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.tools import audit
from effuse.tools.export import auxiliary_of

PRIVATE = DpSgd(clip=1.0)


def feddiff(steps: int, **changes) -> FedDiff:
    values = {
        "warmup": Adam(lr=3e-3, batch=64, steps=steps),
        "central": Adam(lr=1e-2, batch=64, epochs=1, state="kept"),
        "generators": (LabelledMemoriser(),),
        "task": Denoise(schedule=Linear(steps=100)),
        "sampler": Ddim(steps=5, batch=20),
        "keep": True,
    }
    return FedDiff(**(values | changes))


def apart(steps: int, private: bool = False, **changes):
    """Two clients of 80 random images each learn them by heart, if they have steps enough; 100 images are canaries."""
    own = {"warmup": Adam(lr=3e-3, batch=64, steps=steps, privacy=PRIVATE), "histogram": Gaussian(epsilon=1.0, delta=1e-6)}
    values = {
        "data": RandomImages(n=160),
        "model": Cnn(),
        "task": Classify(),
        "clients": 2,
        "rounds": 1,
        "canaries": 100,
        "algorithm": feddiff(steps, **(own if private else {})),
        "budget": Budget(epsilon=8.0, accountant="rdp") if private else None,
    }
    return toy_recipe(**(values | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs that keep their generators: one memorised without a promise, one was private."""
    folder = tmp_path_factory.mktemp("generators")
    run(apart(1500), folder / "open")
    run(apart(20, private=True), folder / "private")
    return folder


def test_each_generator_is_attacked_with_its_own_clients_images(effuse, trained, monkeypatch):
    """Members of both clients are found; with the generators exchanged the attacks find nothing."""
    recipe = apart(1500)
    sizes = [len(shard) for shard in recipe.shards(recipe.data.load("train"))]
    report = effuse(f"audit {trained}/open --model generator --json").json
    assert report["clients"].keys() == {"0", "1"} and report["about"]["model"] == "generator"
    assert [own["membership"]["members"] for own in report["clients"].values()] == sizes
    assert report["memorisation"]["training_images"] == report["membership"]["members"] == sum(sizes)
    for own in (report, *report["clients"].values()):
        assert all(own["membership"]["attacks"][name]["auc"]["low"] > 0.6 for name in ("pia", "secmi", "norm"))
    shown = report["one_run"]
    assert (shown["canaries"], shown["guesses"], shown["attack"]) == (100, 50, "pia") and shown["epsilon"] > 0.5

    kept = audit.generators_of
    monkeypatch.setattr(audit, "generators_of", lambda *of: dict(zip((0, 1), reversed(kept(*of).values()))))
    wrong = effuse(f"audit {trained}/open --model generator --json").json
    assert wrong["one_run"]["epsilon"] == 0.0
    assert all(a["auc"]["low"] < 0.5 < a["auc"]["high"] for a in wrong["membership"]["attacks"].values())


def test_pooled_intervals_are_narrower(effuse, trained):
    """Twice as many images: their area's interval is about 1.4 times narrower."""
    report = effuse(f"audit {trained}/private --model generator --json").json

    def width(own) -> float:
        auc = own["membership"]["attacks"]["loss"]["auc"]
        return auc["high"] - auc["low"]

    narrower = [width(own) / width(report) for own in report["clients"].values()]
    assert narrower == pytest.approx([2**0.5] * 2, rel=0.15)


def test_images_are_compared_with_those_of_the_client_they_came_from(effuse, trained):
    """All drawn images, or a part of them, divided by their origin; each histogram counts each once."""
    kept = auxiliary_of(trained / "open")
    report = effuse(f"audit {trained}/open --model generator --json").json
    numbers = [own["memorisation"]["generated"]["n"] for own in report["clients"].values()]
    assert numbers == torch.bincount(kept.origin).tolist() and report["memorisation"]["generated"]["n"] == len(kept)
    assert report["about"]["images"].startswith("kept by the server")
    pooled = report["memorisation"]["generated"]
    own = [client["memorisation"]["generated"] for client in report["clients"].values()]
    assert pooled["histogram"] == [a + b for a, b in zip(*(part["histogram"] for part in own))]
    assert pooled["lowest"] == min(part["lowest"] for part in own)
    some = effuse(f"audit {trained}/open --model generator -n 10 --json").json
    assert sum(own["memorisation"]["generated"]["n"] for own in some["clients"].values()) == 10


def test_a_private_runs_page_says_what_was_promised_and_spent(effuse, trained):
    """Each client releases a histogram and one training; epsilon 8 asks for sigma."""
    answer = effuse(f"audit {trained}/private --model generator")
    assert answer.code == 0 and "epsilon 8, delta 1e-05, per image" in answer.out
    assert re.search(r"spent by a client .* epsilon (8|7\.99\d*) at most", answer.out)
    assert re.search(r"not covered .* the number of images", answer.out)
    report = json.loads((trained / "private/audit/audit.json").read_text())
    ledger = report["promise"]["ledger"]
    assert report["error"] is None and report["promise"]["simulated"] and 7.9 < ledger["epsilon"] <= 8.0
    assert [(c["releases"], c["what"]) for c in ledger["clients"].values()] == [(2, ["fit", "histogram"])] * 2
    page = (trained / "private/audit/index.html").read_text()
    for words in (
        "at most e^8 = 2,981, except with a probability of about 1e-05",
        "<td>unit, which is protected</td><td>an image</td>",
        "one image is replaced by nothing; how many images a client has is public",
        "<td>accountant</td><td>Renyi divergences (rdp)</td>",
        "<td>2</td><td>fit, histogram</td>",
        "Not covered: the number of images of each client, which is public.",
        "so it protects nobody",
        "<h2>Each client</h2>",
    ):
        assert words in page.replace("&#x27;", "'"), words
    assert "None" not in page and "{" not in page.split("</style>")[1]


def test_two_audits_in_one_picture(effuse, trained):
    assert "it has no audit; make one with `effuse audit" in effuse(f"audit {trained}/private --against .").sentence
    for name in ("open", "private"):
        assert effuse(f"audit {trained}/{name} --model generator --quiet").code == 0
    answer = effuse(f"audit {trained}/private --model generator --against {trained}/open")
    assert answer.code == 0 and "private/audit/against.html" in answer.out
    page = (trained / "private/audit/against.html").read_text()
    assert f"{trained}/private (generator, epsilon 8)" in page and f"{trained}/open (generator, no budget)" in page
    bars = [page.count(f'<rect class="{kind}"') for kind in ("generated", "other", "held_out")]
    assert min(bars) > 0 and page.count('<circle class="generated"') == page.count('<circle class="other"') == 4
    assert not re.search(r"<(script|img|link|iframe|object|a)\b", page) and page.count("<svg") == 2
    damaged = trained / "open/audit/audit.json"
    before = damaged.read_text()
    damaged.write_text(before[:100])
    assert "is damaged" in effuse(f"audit {trained}/private --against {trained}/open").sentence
    damaged.write_text(before)


def test_a_run_without_generators_says_how_to_keep_them(effuse, toy_file, tmp_path):
    run(apart(1, canaries=0, algorithm=feddiff(1, keep=False)), tmp_path / "plain")
    words = "run it with --set algorithm.keep=True, or use --model global"
    assert words in effuse("audit plain --model generator").sentence
    assert effuse("audit plain --quiet").code == 0, "its classifier and images are audited"
    run(apart(1, canaries=0, algorithm=feddiff(1, real=True)), tmp_path / "real")
    assert "no client trained a generator" in effuse("audit real --model generator").sentence
    run(apart(1, canaries=0, ema=0.5), tmp_path / "averaged")
    assert "leave --ema out" in effuse("audit averaged --model generator --ema").sentence
    toy = toy_file(algorithm=ALGORITHMS["fedcvae"], model=Cnn(), task=Classify(), sampler=None, rounds=1)
    assert effuse(f"run {toy} --out decoders --quiet").code == 0
    refused = effuse("audit decoders --model generator").sentence
    assert "send decoders without encoders" in refused and "only their images can be audited" in refused
    report = effuse("audit decoders --json").json
    assert report["memorisation"]["generated"]["n"] == len(auxiliary_of(tmp_path / "decoders")) and report["clients"] is None


def test_without_canaries_there_is_no_bound(effuse, tmp_path):
    algorithm = dataclasses.replace(feddiff(1), warmup=dataclasses.replace(SYNTHESIS["warmup"], steps=1))
    run(apart(1, canaries=0, algorithm=algorithm), tmp_path / "plain")
    report = effuse("audit plain --model generator --json").json
    assert report["one_run"] is None and report["clients"].keys() == {"0", "1"} and report["promise"] is None
