"""The Python functions that correspond to the commands."""

import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from toy import ToyLabelled, toy_recipe

import effuse
from effuse.diffusion.samplers import Ancestral
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.tools import notebook
from effuse.tools.check import check


def test_help_shows_the_public_functions():
    page = pydoc.plain(pydoc.render_doc(effuse))
    named = set(re.findall(r"effuse\.(\w+)\(", effuse.__doc__))
    assert named == {"Display", "Run", "check", "load", "recipe", "resume", "run"} == set(effuse.__all__)
    for name in named:
        assert getattr(effuse, name).__doc__.splitlines()[0] in page


def test_importing_effuse_does_not_wait_for_torch():
    seen = "import sys, effuse; dir(effuse); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", seen], text=True, timeout=60) == "False\n"


def test_a_recipe_is_found_changed_and_rehearsed():
    assert effuse.recipe("demo", rounds=2, wire="bf16").changed(["rounds=40", "wire=fp32"]) == effuse.recipe("demo()")
    assert effuse.check(toy_recipe(), rounds=3) == check(toy_recipe(rounds=3), "run")
    assert effuse.check("demo", rounds=1)["recipe"] == "demo"


def test_a_run_is_displayed_on_request_and_resumed(tmp_path, capsys):
    run = effuse.run(toy_recipe(), out=tmp_path / "run", rounds=2)
    assert capsys.readouterr().out == ""
    shown = effuse.run(toy_recipe(), out=tmp_path / "shown", rounds=2, observer=effuse.Display())
    assert re.search(
        r"Z fedavg, 3 clients, 2 rounds, into .*\n\S+Z round 1/2, loss .*\n\S+Z round 2/2, loss ", capsys.readouterr().out
    )
    (tmp_path / "run" / "result.json").unlink()
    again = effuse.resume(tmp_path / "run")
    assert run.weights_sha256 == shown.weights_sha256 == again.weights_sha256 and again.path == run.path


def test_a_display_ends_when_a_run_fails(tmp_path):
    closed = []

    class Shown(effuse.Display):
        def __exit__(self, *exception):
            closed.append(exception[0])

    with pytest.raises(effuse.core.errors.RunError):
        effuse.resume(tmp_path, observer=Shown())
    assert closed == [effuse.core.errors.RunError]


@pytest.mark.parametrize("name", ["../../etc/cron.d/x", "/etc/x", "..", "a\nb", "\x1b[2K", "x" * 500, ""])
def test_a_foreign_name_cannot_leave_the_folder_of_runs(name):
    folder = notebook.new_folder(name)
    assert folder.parent == Path("runs") and str(folder).isprintable() and len(folder.name) < 120


def test_a_name_of_a_recipe_stays_as_it_is():
    assert notebook.new_folder("feddiff.private_digits").name.startswith("feddiff.private_digits-2")


def test_strings_of_the_grammar_and_names_of_classes_are_taken(tmp_path):
    """Samplers and metrics as the command line writes them; classes by their names or numbers."""
    run = effuse.run(
        toy_recipe(model=ToyLabelled(), task=Denoise(schedule=Linear(steps=25)), sampler=Ancestral(batch=4)),
        rounds=1,
        out=tmp_path / "run",
        evaluate="evaluate(grid=2, metrics=[tones(n=2)])",
    )
    assert "tones" in run.metrics
    loaded = effuse.load(tmp_path / "run")
    assert loaded.sample(3, labels=["light", "dark", 1], sampler="ddim(steps=2)").labels.tolist() == [1, 0, 1]
    with pytest.raises(effuse.core.errors.RecipeError, match="has no class 'lihgt'; did you mean light"):
        loaded.sample(1, labels=["lihgt"])
    with pytest.raises(effuse.core.errors.RecipeError, match="no sampler 'ddmi'"):
        loaded.sample(1, sampler="ddmi()")
