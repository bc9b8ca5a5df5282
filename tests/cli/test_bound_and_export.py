"""`effuse bound` and `effuse export`."""

import json

import numpy as np
import pytest
from toy import ALGORITHMS

from effuse.diffusion.samplers import Ddim
from effuse.metrics.bound import Bound


def test_the_bound_as_numbers(effuse):
    """The published constants at T = 400, n = 15, N = 100, and terms that add up."""
    report = effuse("bound fedddpm -T 400 -n 15 -N 100 --json").json
    assert report["C"] == pytest.approx(0.492204, abs=5e-7)
    assert report["fewest_rounds"]["lemma 2"] == pytest.approx(1.866025, abs=5e-7)
    assert report["bound"] == pytest.approx(sum(report["terms"].values())) and len(report["terms"]) == 6
    assert (
        report["steps"]["zeta"] == pytest.approx(1 / (2 * 15 * 20))
        and report["steps"]["zeta"] < report["admissible"]["zeta"]
    )


def test_every_option_reaches_the_bound(effuse):
    """All values differ, so that no option can replace another; the defaults are MNIST's 15 local and 47 server steps."""
    sizes = {"K": 2, "E": 3, "T": 500, "n": 4, "N": 9}
    given = {"L": 1.5, "sigma_l": 0.1, "sigma_g": 0.2, "sigma_s": 0.3, "gap": 0.4, **sizes, "zeta": 0.01, "eta": 0.02}
    line = " ".join(f"{'-' if len(k) == 1 else '--'}{k.replace('_', '-')} {v}" for k, v in given.items())
    report = effuse(f"bound fedddpm {line} --json").json
    assert report["given"] == given and report["bound"] == pytest.approx(Bound(**given).total())
    defaults = dict.fromkeys(("L", "sigma_l", "sigma_g", "sigma_s", "gap"), 1.0) | dict.fromkeys(("zeta", "eta"))
    assert effuse("bound fedddpm --json").json["given"] == defaults | {"K": 15, "E": 47, "T": 400, "n": 15, "N": 100}


def test_the_plot_has_every_number_of_rounds_its_own_bound(effuse, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot

    def noted(axes, x, y, **style):
        drawn[style["label"]] = dict(zip(x, y))
        return plot(axes, x, y, **style)

    monkeypatch.setattr(Axes, "plot", noted)
    assert effuse("bound fedddpm -K 5 -E 5 -T 600 --plot bound.png").code == 0
    for T in (64, 600, 1024):
        bound = Bound(K=5, E=5, T=T, n=15, N=100)
        assert {name: curve[T] for name, curve in drawn.items()} == pytest.approx(bound.terms() | {"bound": bound.total()})


def test_the_bound_for_a_reader_with_a_plot(effuse, tmp_path):
    answer = effuse("bound fedddpm -K 5 -E 5 -T 600 -n 30 --sigma-g 2 --plot figures/bound.png")
    assert answer.code == 0
    for words in ("client drift", "server noise", "admissible up to", "C = 0.4", "plot in figures/bound.png"):
        assert words in answer.out
    assert (tmp_path / "figures/bound.png").read_bytes().startswith(b"\x89PNG")


def test_the_bound_refuses_in_one_sentence(effuse):
    assert "zeta: a step of 0.5 is above the admissible" in effuse("bound fedddpm --zeta 0.5").sentence
    assert "n: 200 clients a round of N=100" in effuse("bound fedddpm -n 200").sentence
    assert "No such command 'fedavg'" in effuse("bound fedavg").sentence
    assert "L: 0.0 must be a number above nought" in effuse("bound fedddpm -L 0").sentence
    for given, refusal in (
        ("--zeta 0", "zeta: 0.0 must be a number above nought"),
        ("--eta nan", "eta: nan must be a number above nought"),
        ("-L inf", "L: inf must be a number above nought"),
        ("--sigma-l nan", "sigma_l: nan must be a number, nought or more"),
        ("--gap inf", "gap: inf must be a number, nought or more"),
        ("-L 1e-320", "leave no number; choose constants nearer to 1"),
        ("--plot b.xyz", "--plot b.xyz: its name must end in a picture format, such as .png; valid: "),
    ):
        assert refusal in effuse(f"bound fedddpm {given}").sentence
    assert "effuse[plots]" in effuse("bound fedddpm --help").out
    assert "raise T" in effuse("bound fedddpm -T 2").sentence


def test_feddifrcs_theorems_for_a_reader_and_as_json(effuse):
    """The oracle: a step below 1.1 / 3, and 8.421053 rounds from a loss of 2; with constants of one both are empty."""
    line = "bound feddifrc --L1 2 --L2 0.05 -B 1 --sigma2 0.5 --classes 10 --eta 0.05 -E 10 --xi 1 --start 2 --least 0"
    told = effuse(line)
    assert told.code == 0
    for words in ("at most 1.7625", "below 0.366667", "after more than 8.421053 rounds", "does not hold: Eq. 33"):
        assert words in told.out, words
    given = {"L1": 2.0, "L2": 0.05, "B": 1.0, "sigma2": 0.5, "classes": 10, "eta": 0.05, "E": 10, "xi": 1.0}
    assert effuse(f"{line} --json").json["given"] == given | {"start": 2.0, "least": 0.0}
    empty = effuse("bound feddifrc").out
    assert "Theorem 2 is empty: it asks for a step below -8" in empty and "Theorem 3 is empty" in empty
    assert "the given 0.5 is too large" in effuse(f"{line.replace('--eta 0.05', '--eta 0.5')}").out
    assert "B: 0.0 must be a number above nought" in effuse("bound feddifrc -B 0").sentence


def test_the_auxiliary_set_is_exported_with_its_origins(effuse, toy_file, tmp_path):
    """A tenth of 14, 13 and 13 images is one per client; exported as arrays, as files and as a picture."""
    toy = toy_file(algorithm=ALGORITHMS["fedddpm"], rounds=1, sampler=Ddim(steps=2))
    assert effuse(f"run {toy} --out run --quiet").code == 0
    written = effuse("export run --json").json
    assert written == {"written": "run/exports/auxiliary-npz.npz", "n": 3, "format": "npz"}
    with np.load(tmp_path / written["written"]) as arrays:
        assert arrays["images"].shape == (3, 4, 4, 1) and arrays["images"].dtype == np.uint8
        assert arrays["origin"].tolist() == [0, 1, 2] and "labels" not in arrays
        provenance = json.loads(str(arrays["provenance"]))
    assert provenance["synthetic"] and provenance["auxiliary"] == 3 and provenance["sampler"].startswith("ddim")
    assert effuse("export run --format imagefolder --out aux").code == 0
    assert (tmp_path / "aux/labels.csv").read_text().split() == [
        "file,label,client",
        "images/000000.png,images,0",
        "images/000001.png,images,1",
        "images/000002.png,images,2",
    ]
    assert "not an empty folder" in effuse("export run --format imagefolder --out aux").sentence
    assert effuse("export run --format grid").out == "3 images in run/exports/auxiliary-grid.png\n"


def test_a_run_without_such_images_says_so(effuse, toy_file):
    effuse(f"run {toy_file(rounds=1)} --out run --quiet")
    assert "its server holds no images; fedavg draws none" in effuse("export run").sentence
    assert "--format gif: expected one of" in effuse("export run --format gif").sentence
    assert "not a run folder" in effuse("export .").sentence
