"""`effuse reproduce`: run cells one after another, resume, and show our numbers beside the printed ones."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from toy import ADAM, SYNTHESIS, TEST, toy_recipe

from effuse.algorithms.fedddpm import FedDDPM, FedDDPMPlus
from effuse.algorithms.feddiffuse import Full, UDec
from effuse.core.errors import RecipeError
from effuse.core.files import held
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.solvers import Adam
from effuse.core.table import Cell, Scale, Table
from effuse.machines.eager import Eager
from effuse.models.pretrained import FromPretrained
from effuse.recipes import catalogue, tables
from effuse.runs import driver, rounds
from effuse.runs.folder import RunFolder
from effuse.tools.reproduce import Reproduction

SMALL = "classifier(width=3, steps=1, epochs=1)"
METRICS = [f"evaluate.metrics=[kid(n=4, encoder={SMALL})]", "evaluate.grid=0", "sampler=ddim(steps=2)"]


@pytest.fixture
def toy_table(toy_file, monkeypatch):
    """Two methods by two numbers of clients; two cells have no printed number. It has a smoke scale."""
    sources = {name: toy_file(f"{name}.json", algorithm=cls(local=ADAM)) for name, cls in (("full", Full), ("udec", UDec))}

    def table() -> Table:
        cells = tuple(
            Cell(
                labels={"method": method, "clients": clients},
                recipe=source,
                settings=(f"clients={clients}", *METRICS),
                metric="kid",
                printed=39.0 if clients == 2 else None,
                spread=4.0 if clients == 2 else None,
            )
            for method, source in sources.items()
            for clients in (2, 3)
        )
        stand_ins = {"kid": "kid_classifier", "kid_pooled": "kid_classifier_pooled"}
        scales = {"paper": Scale(settings=("rounds=3",), metrics=stand_ins)}
        scales["smoke"] = Scale(settings=("rounds=1",), metrics=stand_ins, comparable=False)
        return Table(title="Toys", cells=cells, also=("kid_pooled",), scales=scales)

    monkeypatch.setitem(tables(), "toy.table", table)
    return table()


def states(report: dict) -> dict[str, str]:
    return {row["name"]: row["state"] for row in report["cells"]}


def test_two_cells_at_a_small_scale(effuse, toy_table):
    """--only selects cells by their labels; a repeated key selects several values. Other cells are shown as missing."""
    report = effuse("reproduce toy.table --scale smoke --only clients=2 --json").json
    assert states(report) == {"full-2": "done", "full-3": "missing", "udec-2": "done", "udec-3": "missing"}
    assert (report["scale"], report["comparable"]) == ("smoke", False)
    one, other, personal, _ = report["cells"]
    assert one["metric"] == "kid_classifier" and isinstance(one["ours"], float) and one["ours_spread"] is None
    assert (one["printed"], one["printed_spread"], other["printed"], other["ours"]) == (39.0, 4.0, None, None)
    assert personal["ours_spread"] is not None and personal["also"].keys() == {"kid_classifier_pooled"}
    result = json.loads(Path(personal["run"], "result.json").read_text())
    assert result["metrics"]["kid_classifier"]["value"] == personal["ours"] and result["rounds"] == 1
    for quantity in ("parameters", "bytes"):
        assert personal[f"{quantity}_sent"] == result["traffic"][quantity]["total"] > 0
    assert json.loads(Path("runs/toy.table-smoke/table.json").read_text()) == report, "the table is saved after every cell"


def test_a_cell_may_begin_with_the_model_of_another(effuse, monkeypatch):
    """{out} is the folder of the runs. The second cell finds the first one's model there, and not before it has run."""

    def begun(folder: str = "") -> Recipe:
        return toy_recipe(rounds=1, **{"model": FromPretrained(folder=folder)} if folder else {})

    def table() -> Table:
        recipes = {"first": "toy.begun", "second": 'toy.begun("{out}/first/model")'}
        cells = tuple(Cell(labels={"cell": name}, recipe=recipe, metric="none") for name, recipe in recipes.items())
        return Table(title="Toys", cells=cells)

    monkeypatch.setitem(catalogue(), "toy.begun", begun)
    monkeypatch.setitem(tables(), "toy.chain", table)
    early = effuse("reproduce toy.chain --only cell=second --out here")
    assert early.code != 0 and "no model folder at 'here/first/model'" in early.err
    assert states(effuse("reproduce toy.chain --out here --json").json) == {"first": "done", "second": "done"}
    first, second = (Path("here", name, "model/model.safetensors").read_bytes() for name in ("first", "second"))
    assert first != second
    assert "folder='here/first/model', sha256='" in read_manifest(Path("here/second"))["recipe"]["model"]


def test_finished_cells_are_not_run_again_and_the_table_is_for_a_reader(effuse, toy_table, monkeypatch):
    first = effuse("reproduce toy.table --scale smoke --only method=udec,clients=2 --out here")
    assert first.code == 0 and "cell 1 of 1: udec-2" in first.out and "printed 39 ± 4 (not comparable)" in first.out
    began = []
    run = driver.run
    monkeypatch.setattr(driver, "run", lambda recipe, out, **options: began.append(out.name) or run(recipe, out, **options))
    second = effuse("reproduce toy.table --scale smoke --out here --only clients=2,method=full,method=udec")
    assert began == ["full-2"], "udec-2 is finished"
    warning = "scale smoke: ours are not comparable with the printed numbers"
    for words in ("Toys", "missing", "39 ± 4", warning, "± over clients", "here", "MB sent"):
        assert words in second.out
    monkeypatch.delenv("COLUMNS", raising=False)
    written = effuse("reproduce toy.table --scale smoke --out here --show").out
    lines = [line.split() for line in written.splitlines()]
    assert ["method", "clients", "printed", "ours", "kid_classifier_pooled", "MB", "sent", "s"] in lines, (
        "a file folds no column"
    )
    shown = effuse("reproduce toy.table --scale smoke --out here --show --json").json
    assert began == ["full-2"] and list(states(shown).values()) == ["done", "missing", "done", "missing"]
    some = effuse("reproduce toy.table --scale smoke --out here --show --only clients=3 --json").json
    assert states(some) == {"full-3": "missing", "udec-3": "missing"}
    assert "no cell has that" in effuse("reproduce toy.table --show --only method=udek").err


def test_a_half_run_cell_is_resumed(effuse, toy_table, monkeypatch):
    """Ctrl-C in the second round: the same command resumes from the checkpoint, and ends in the same weights."""
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)
    line = "reproduce toy.table --only method=udec,clients=3 --json"
    quiet = effuse(f"{line} --out quiet").json["cells"][3]
    append = RunFolder.append

    def interrupted(folder, record):
        if record.t == 1:
            raise KeyboardInterrupt
        append(folder, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", interrupted)
        stopped = effuse(f"{line} --out here")
    assert stopped.code == 130 and "repeat the command to resume" in stopped.err
    there = effuse("reproduce toy.table --out here --show --json").json["cells"][3]
    assert (there["state"], there["note"]) == ("unfinished", "after round 1 of 3") and there["ours"] is None
    after = effuse(f"{line} --out here").json["cells"][3]
    assert after["state"] == "done" and after["ours"] == quiet["ours"]
    digests = {json.loads(Path(row["run"], "result.json").read_text())["weights_sha256"] for row in (quiet, after)}
    assert len(digests) == 1


def test_a_cell_that_another_process_runs_comes_last(effuse, toy_table, monkeypatch):
    """The other process runs the first cell and dies when this one starts the last; then this one runs the first too."""
    line, out, run, began = "reproduce toy.table --scale smoke", Path("runs/toy.table-smoke"), driver.run, []
    out.mkdir(parents=True)
    other = held(out / ".full-2.lock")
    assert other.__enter__()

    def started(recipe, path, **options):
        began.append(path.name)
        if path.name == "udec-3":
            other.__exit__(None, None, None)
        return run(recipe, path, **options)

    monkeypatch.setattr(driver, "run", started)
    here = effuse(line)
    assert here.code == 0 and began == ["full-3", "udec-2", "udec-3", "full-2"]
    assert here.out.count("skipped") == 1 and "full-2: skipped, another process is running it" in here.out
    assert here.out.count("cell 1 of 4: full-2") == 2 and "full-2: kid_classifier" in here.out
    kept = json.loads((out / "table.json").read_text())
    assert states(kept) == dict.fromkeys(("full-2", "full-3", "udec-2", "udec-3"), "done")


def test_a_cell_finished_elsewhere_is_taken_as_it_is(effuse, toy_table, monkeypatch):
    """While the first cell runs, another process finishes all others: none is run twice, and the table has all."""
    again = Reproduction("toy.table", toy_table, Path("runs/toy.table-smoke"), "smoke")
    run, began = driver.run, []

    def started(recipe, path, **options):
        began.append(path.name)
        if len(began) == 1:
            assert [again.complete(plan) for plan in again.planned.values()] == [False, True, True, True]
        return run(recipe, path, **options)

    monkeypatch.setattr(driver, "run", started)
    here = effuse("reproduce toy.table --scale smoke --json")
    assert began == ["full-2", "full-3", "udec-2", "udec-3"] and set(states(here.json).values()) == {"done"}
    assert json.loads(Path("runs/toy.table-smoke/table.json").read_text()) == here.json


def test_a_cell_that_diverges_does_not_stop_the_others(effuse, toy_table, monkeypatch):
    cell = toy_table.cells[0]
    wild = Cell(**(vars(cell) | {"settings": (*cell.settings, "algorithm.local=sgd(lr=1e30, steps=5)")}))
    table = Table(**(vars(toy_table) | {"cells": (wild, *toy_table.cells[1:])}))
    monkeypatch.setitem(tables(), "toy.table", lambda: table)
    answer = effuse("reproduce toy.table --scale smoke --only clients=2 --json")
    assert "TrainingError: full-2: round 1" in answer.sentence
    assert states(answer.json)["full-2"] == "failed" and states(answer.json)["udec-2"] == "done"
    shown = effuse("reproduce toy.table --scale smoke --show --json").json
    assert states(shown)["full-2"] == "failed" and "round 1" in shown["cells"][0]["note"], "other processes see it too"
    before = Path(shown["cells"][0]["run"], "diverged.txt").stat().st_mtime_ns
    again = effuse("reproduce toy.table --scale smoke --only clients=2 --json")
    assert "runs again only after its folder is removed" in again.sentence
    assert Path(shown["cells"][0]["run"], "diverged.txt").stat().st_mtime_ns == before


def test_a_cell_that_cannot_run_here_names_the_scales_that_might(effuse, toy_table, monkeypatch):
    scales = toy_table.scales | {"paper": Scale(settings=("rounds=3", "speed=compile"))}
    monkeypatch.setitem(tables(), "toy.table", lambda: dataclasses.replace(toy_table, scales=scales))
    sentence = effuse("reproduce toy.table --device cpu").sentence
    assert "full-2: speed=compile: only a GPU records steps" in sentence and sentence.endswith(
        "the table also has --scale smoke"
    )


def test_a_folder_of_another_recipe_is_refused_before_anything_runs(effuse, toy_table):
    effuse("reproduce toy.table --scale smoke --only method=full,clients=2 --out here --quiet")
    sentence = effuse("reproduce toy.table --out here").sentence
    assert "here/full-2 was run with rounds=1, not 3; choose another --out" in sentence and not Path("here/full-3").exists()
    shown = effuse("reproduce toy.table --out here --show --json").json
    assert states(shown)["full-2"] == "other"
    assert shown["cells"][0]["ours"] is None, "another recipe's number does not count"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("toy.tabel", "no table 'toy.tabel'; did you mean toy.table"),
        ("demo", "no table 'demo'"),
        ("toy.table --only metod=udec", "--only metod=udec: cells have no metod; did you mean method"),
        ("toy.table --only udec", "expected KEY=VALUE"),
        ("toy.table --only method=udek", "--only method=udek: no cell has that; did you mean udec"),
        ("toy.table --scale smok", "--scale smok: there is none; did you mean smoke"),
        ("'feddiffuse.table1(profile=\"cod\")'", "table feddiffuse.table1: profile='cod'; did you mean code"),
        ("feddiffuse.figure3 --only epochs=2,clients=1", "no cell has all of that"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(line, sentence, effuse, toy_table):
    assert sentence in effuse(f"reproduce {line}").sentence


def test_a_table_is_no_recipe_but_is_listed(effuse):
    sentence = effuse("run feddiffuse.table1").sentence
    assert "'feddiffuse.table1' is a table and not one recipe; run its cells with `effuse reproduce" in sentence
    assert effuse("list --json").json["table"].keys() >= {"feddiffuse.table1", "feddiffuse.figure3"}


def test_cells_must_have_different_names():
    cell = Cell(labels={"method": "a"}, recipe="demo", metric="fid")
    slash = Cell(labels={"method": "a/b"}, recipe="demo", metric="fid")
    for cells, sentence in (((cell, cell), "must name one cell"), ((), "there must be some"), ((slash,), "letters")):
        with pytest.raises(RecipeError, match=sentence):
            Table(title="t", cells=cells)


def assert_shown(numbers: tuple[str, str], of: dict[str, float]) -> None:
    """A mean and its deviation, rounded to the deviation's second digit: at most a twentieth of it off."""
    mean, std = map(float, numbers)
    assert abs(mean - of["mean"]) <= of["std"] / 20 and abs(std - of["std"]) <= of["std"] / 20


def test_cells_that_repeat_each_other_have_a_mean(effuse, toy_table, toy_file, monkeypatch):
    """Two seeds of one cell, and a recipe that knows the scale by its name."""
    same = {"recipe": "toy.scaled(scale='{scale}')", "metric": "kid"}
    both = f"evaluate.metrics=[kid(n=4, encoder={SMALL}), kid(n=4, encoder={SMALL}, clipped=True)]"
    settings = {seed: (f"seed={seed}", *METRICS[1:], both) for seed in (0, 1)}
    cells = tuple(Cell(labels={"method": "full", "seed": k}, settings=v, **same) for k, v in settings.items())
    scales = {"tiny": Scale(metrics={"kid": "kid_classifier", "kid_clipped": "kid_classifier_clipped"})}
    table = Table(title="Seeds", cells=cells, repeats="seed", also=("kid_clipped",), scales=scales)
    monkeypatch.setitem(tables(), "toy.seeds", lambda: table)

    def scaled(scale: str) -> Recipe:
        return toy_recipe(algorithm=Full(local=ADAM), rounds={"tiny": 1}[scale])

    monkeypatch.setitem(catalogue(), "toy.scaled", scaled)
    report = effuse("reproduce toy.seeds --json").json
    ours = [row["ours"] for row in report["cells"]]
    (mean,) = report["means"]
    assert mean["labels"] == {"method": "full"} and (mean["done"], mean["of"]) == (2, 2)
    assert mean["mean"] == pytest.approx(sum(ours) / 2) and mean["std"] == pytest.approx(abs(ours[0] - ours[1]) / 2**0.5)
    shown = effuse("reproduce toy.seeds --show")
    assert "mean ± standard deviation" in shown.out and "2 of 2" in shown.out
    ours_shown, beside_shown = re.findall(r"(-?[\d.]+) ± ([\d.]+)", " ".join(shown.out.split()))
    assert_shown(ours_shown, mean)
    beside = [row["also"]["kid_classifier_clipped"] for row in report["cells"]]
    assert mean["also"]["kid_classifier_clipped"]["mean"] == pytest.approx(sum(beside) / 2), "of additional metrics too"
    assert_shown(beside_shown, mean["also"]["kid_classifier_clipped"])
    assert effuse("reproduce toy.table --scale smoke --show --json").json["means"] == []


def test_means_are_compared_with_a_row_seed_by_seed(effuse, toy_file, monkeypatch):
    """a has 10, 20, 30 on three seeds, b 9 and 18 on two of them and c nothing: b is 1 and 2 less than a, 1.5 +- 0.71."""
    found = {"a-0": 10.0, "a-1": 20.0, "a-2": 30.0, "b-0": 9.0, "b-1": 18.0}
    source = toy_file("toy.json")
    cells = tuple(
        Cell(labels={"method": name, "seed": seed}, recipe=source, metric="kid") for name in "abc" for seed in range(3)
    )
    monkeypatch.setitem(
        tables(), "toy.pairs", lambda: Table(title="Pairs", cells=cells, repeats="seed", against=("method", "a"))
    )
    row = Reproduction.row
    monkeypatch.setattr(Reproduction, "row", lambda self, plan: row(self, plan) | {"ours": found.get(plan.cell.name)})
    means = {
        mean["labels"]["method"]: mean["difference"] for mean in effuse("reproduce toy.pairs --show --json").json["means"]
    }
    assert means == {
        "a": {"mean": None, "std": None},
        "b": {"mean": -1.5, "std": 0.5**0.5},
        "c": {"mean": None, "std": None},
    }
    lines = [line.split() for line in effuse("reproduce toy.pairs --show").out.splitlines()]
    assert ["method", "ours", "minus", "a", "runs"] in lines
    assert ["b", "13.5", "±", "6.4", "-1.50", "±", "0.71", "2", "of", "3"] in lines
    found["b-1"] = 209.0  # 109 +- 141 of 9 and 209, and 94 +- 134 of -1 and 189
    wide = [line.split() for line in effuse("reproduce toy.pairs --show").out.splitlines()]
    assert ["b", "109", "±", "141", "94", "±", "134", "2", "of", "3"] in wide
    found |= {"b-0": 10.0, "b-1": 10.2}  # 10.1 +- 0.1414; 0 and -9.8, -4.9 +- 6.93
    narrow = [line.split() for line in effuse("reproduce toy.pairs --show").out.splitlines()]
    assert ["b", "10.10", "±", "0.14", "-4.9", "±", "6.9", "2", "of", "3"] in narrow
    found |= {"b-0": 5.0, "b-1": 5.0}
    equal = [line.split() for line in effuse("reproduce toy.pairs --show").out.splitlines()]
    assert ["b", "5", "±", "0", "-10.0", "±", "7.1", "2", "of", "3"] in equal
    found |= {"b-0": 9.0, "b-1": 18.0}
    (only,) = effuse("reproduce toy.pairs --show --only method=b --json").json["means"]
    assert only["difference"]["mean"] == -1.5, "the baseline row counts even if it is not shown"
    with pytest.raises(RecipeError, match="no cell has method=d, which the others are held against"):
        Table(title="t", cells=cells, against=("method", "d"))


@pytest.fixture
def sampled_twice(toy_file, monkeypatch):
    """One training of each method, evaluated with two samplers, with a moving average if the method allows it."""
    kept = Adam(lr=1e-2, batch=8, epochs=1, state="kept")
    sources = {
        "full": toy_file("full.json", algorithm=Full(local=kept), ema=0.5),
        "udec": toy_file("udec.json", algorithm=UDec(local=ADAM)),
    }
    cells = tuple(
        Cell(
            labels={"method": method, "steps": steps},
            recipe=source,
            metric="kid_classifier",
            settings=(*METRICS, "evaluate.grid=4", f"sampler=ddim(steps={steps})"),
        )
        for method, source in sources.items()
        for steps in (2, 3)
    )
    monkeypatch.setitem(tables(), "toy.samplers", lambda: Table(title="Samplers", cells=cells))


def test_a_cell_that_only_samples_differently_is_not_trained_again(effuse, sampled_twice, monkeypatch):
    """Its models, averages, personal models, metrics and grids equal those of a separate training bit by bit."""
    fits = []
    fit = Eager.fit
    monkeypatch.setattr(Eager, "fit", lambda machine, net, work: fits.append(work.where) or fit(machine, net, work))

    def trainings() -> int:
        return sum(where.startswith("round") for where in fits)  # encoders are fitted too

    shared = effuse("reproduce toy.samplers --out shared --json").json
    assert trainings() == 2 * 2 * 3, "two trainings of two rounds with three clients, for four cells"
    for method in ("full", "udec"):
        effuse(f"reproduce toy.samplers --out alone --only method={method},steps=3")
    assert trainings() == 4 * 2 * 3
    alone = {row["name"]: row for row in effuse("reproduce toy.samplers --out alone --show --json").json["cells"]}
    for row in (row for row in shared["cells"] if row["labels"]["steps"] == 3):
        ours, theirs = (json.loads(Path(r["run"], "result.json").read_text()) for r in (row, alone[row["name"]]))
        timeless = {"seconds": 0, "round_seconds": 0}
        assert ours | timeless == theirs | timeless
        assert (row["state"], row["ours"]) == ("done", alone[row["name"]]["ours"])
        other = shared["cells"][0 if row["labels"]["method"] == "full" else 2]
        assert row["ours"] != other["ours"], "another sampler, another number"
        folders = [Path(r["run"]) for r in (row, alone[row["name"]])]
        for kind in ("ledger.json", "samples/*.png", "model*/**/*"):
            files = [{p.relative_to(f): p.read_bytes() for p in f.glob(kind) if p.is_file()} for f in folders]
            assert files[0] == files[1] and files[0], kind
        assert read_manifest(folders[0])["trained"] == other["run"] and "trained" not in read_manifest(folders[1])
        assert {record.metrics for record in RunFolder(folders[0]).records()} == {None}, "no evaluation between rounds"


def test_cells_with_the_same_preparation_prepare_once(effuse, monkeypatch):
    """FedDDPM+ takes over FedDDPM's warm-up; another share of images has a preparation of its own."""
    algorithms = {
        "fedddpm": FedDDPM(**SYNTHESIS, local=ADAM, central=ADAM),
        "plus": FedDDPMPlus(**SYNTHESIS, local=ADAM, central=ADAM, test=TEST),
        "more": FedDDPM(**SYNTHESIS, local=ADAM, central=ADAM, share=0.5),
    }
    for name in algorithms:
        monkeypatch.setitem(catalogue(), f"toy.{name}", lambda name=name: toy_recipe(algorithm=algorithms[name]))
    cells = tuple(Cell(labels={"method": name}, recipe=f"toy.{name}", metric="none") for name in algorithms)
    monkeypatch.setitem(tables(), "toy.prepared", lambda: Table(title="Toys", cells=cells))
    assert set(states(effuse("reproduce toy.prepared --out here --json").json).values()) == {"done"}
    warm = {name: read_manifest(Path("here", name)).get("warm") for name in algorithms}
    assert warm == {"fedddpm": None, "plus": "here/fedddpm", "more": None}
    effuse("run toy.plus --out alone --quiet")
    models = [Path(folder, "model/model.safetensors").read_bytes() for folder in ("here/plus", "alone")]
    assert models[0] == models[1]
    again = effuse("run toy.more --out wrong --warm here/plus")
    assert again.code != 0 and "algorithm.share=0.1, not 0.5" in again.err


def test_an_interrupted_evaluation_is_repeated(effuse, sampled_twice, monkeypatch):
    """Interrupted while it samples: the same command evaluates again and trains nothing."""
    effuse("reproduce toy.samplers --only method=full,steps=2 --quiet")
    evaluate = rounds.Run._evaluate
    monkeypatch.setattr(rounds.Run, "_evaluate", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    stopped = effuse("reproduce toy.samplers --only method=full,steps=3 --quiet")
    assert "repeat the command to resume" in stopped.err
    monkeypatch.setattr(rounds.Run, "_evaluate", evaluate)
    monkeypatch.setattr(Eager, "fit", lambda *a: pytest.fail("trained"))
    assert effuse("reproduce toy.samplers --only method=full --json").json["cells"][1]["state"] == "done"


def test_a_training_on_other_data_is_not_reused(effuse, sampled_twice):
    effuse("reproduce toy.samplers --only method=full,steps=2 --quiet")
    manifest = Path("runs/toy.samplers-paper/full-2/manifest.json")
    manifest.write_text(manifest.read_text().replace('"train": "', '"train": "0'))
    sentence = effuse("reproduce toy.samplers --only method=full,steps=3").sentence
    assert "full-2 was trained on different data; run it again, or restore the data" in sentence


def test_a_cell_with_evaluations_between_rounds_is_trained(effuse, sampled_twice, monkeypatch):
    """The other cell has no metrics of earlier rounds."""
    cells = tables()["toy.samplers"]().cells[:2]
    evaluated = tuple(dataclasses.replace(cell, settings=(*cell.settings, "evaluate.every=1")) for cell in cells)
    monkeypatch.setitem(tables(), "toy.evaluated", lambda: Table(title="Evaluated", cells=evaluated))
    report = effuse("reproduce toy.evaluated --json").json
    for row in report["cells"]:
        assert all(record.metrics for record in RunFolder(Path(row["run"])).records())


COMMITTED = Path(__file__).parents[2] / "docs" / "results"


def test_every_committed_manifest_is_still_a_recipe():
    """Manifests of earlier releases lack newer keys, which then have their defaults."""
    manifests = [read_manifest(path)["recipe"] for path in sorted(COMMITTED.rglob("manifest.json"))]
    assert len(manifests) >= 241 and sum("aggregate=" not in saved["algorithm"] for saved in manifests) >= 241
    for saved in manifests:
        assert "aggregate" not in str(Recipe.restore(saved))


@pytest.mark.parametrize(
    ("name", "scale", "done"),
    [
        ("fedddpm.causes", "scaled", 4),
        ("fedddpm.comparison", "scaled", 63),
        ("fedddpm.tuning", "scaled", 35),
        ("fedddpm.unequal", "digits", 18),
        ("fedddpm.warmups", "digits", 27),
        ("feddiffuse.ablation", "paper", 17),
        ("feddiffuse.table1", "paper", 1),
        ("fedphd.comparison", "scaled", 33),
        ("fedphd.tuning", "scaled", 7),
    ],
)
def test_committed_runs_are_recognised(name, scale, done):
    committed = Reproduction(name, tables()[name](), COMMITTED / f"{name}-{scale}", scale)
    states = [committed._state(plan)[0] for plan in committed.planned.values()]
    assert states.count("done") >= done and "other" not in states
