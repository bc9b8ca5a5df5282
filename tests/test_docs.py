"""The commands and examples in the documents work."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from effuse.cli import main
from effuse.recipes import find_recipe, find_table

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.S)


def started(command: list[str], folder: Path) -> str:
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def readme_lines() -> list[str]:
    """Every `effuse` line of the README and of the first steps, in order and each once."""
    pages = ("README.md", "docs/index.md")
    found = [line for page in pages for block in blocks(page, "sh") for line in block.splitlines()]
    lines = {line.partition("#")[0].strip(): line for line in found if line.startswith("effuse ")}
    assert len(lines) >= 12
    return list(lines.values())


def called(arguments: list[str]) -> str:
    """The output of a command, run in this process."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        pytest.raises(SystemExit) as end,
    ):
        patch.setattr(sys, "argv", arguments)
        main()
    assert end.value.code in (0, None), f"{arguments} failed"
    return out.getvalue()


# settings that shorten training to one batch a round, and evaluation
LITTLE = [
    "algorithm.local.epochs=None",
    "algorithm.local.steps=1",
    "threads=1",
    "sampler.steps=2",
    "evaluate.metrics=[conditional_accuracy(n=20), diversity(n=20)]",
]


def test_the_readmes_commands_work_when_shortened(tmp_path, monkeypatch):
    """The README's commands with less training and fewer samples."""
    monkeypatch.chdir(tmp_path)
    output = {}
    for line in readme_lines():
        words = shlex.split(line, comments=True)
        little = [part for setting in LITTLE for part in ("--set", setting)]
        output[line] = called(words + little * (words[1:3] == ["run", "demo"]))
    assert_same_results(output, tmp_path)


@pytest.mark.slow("trains in full, in a shell; `make test` runs the same commands on less")
def test_the_readmes_commands_run(tmp_path):
    """The README's commands unchanged, in an empty folder."""
    assert_same_results({line: started(["bash", "-c", line], tmp_path) for line in readme_lines()}, tmp_path)


def assert_same_results(output: dict[str, str], tmp_path: Path) -> None:
    """Check that simulator and loopback end in the same weights, and that 200 images are drawn."""
    digests = {
        re.search(r"weights_sha256\W+([0-9a-f]{20})", out)[1]
        for line, out in output.items()
        if "out runs/other" not in line and " run " in line
    }
    assert len(digests) == 1, digests
    assert len(list((tmp_path / "runs/first/exports").rglob("*.png"))) == 200


# what a notebook shows of the first hour's values
SHOWN = """
assert list(run.rounds["federated"]) == [1, 2] and run.rounds["loss"].gt(0).all()
assert list(run.clients["client"]) == [0, 1, 2, 3, 4] and run.clients["images"].gt(0).all()
assert "Finished: fedavg with 5 clients, 2 rounds" in run._repr_html_() and "data:image/png" in run._repr_html_()
assert curve._repr_svg_().startswith("<svg") and "sent" in curve._repr_svg_()
assert images.labels.tolist() == [3, 8] * 10 and images._repr_png_().startswith(b"\\x89PNG")
"""


@pytest.mark.slow("trains and serves in a shell; other tests do the same in one process")
def test_the_first_hour_works(tmp_path):
    """Every block of the page in order, in one folder, with less training."""
    page, done = (ROOT / "docs/first-hour.md").read_text(), []
    little = " ".join(f"--set '{setting}'" for setting in LITTLE[:-1])
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", page, re.S):
        if language == "python":
            started([sys.executable, "-c", block + SHOWN * ("run = " in block)], tmp_path)
            continue
        lines = [line for line in block.splitlines() if not line.startswith(". .venv")]
        shorter = [re.sub(r"effuse (run|serve) (demo)", rf"effuse \1 \2 {little}", line) for line in lines]
        done.append(started(["bash", "-c", "set -e; " + "\n".join(shorter)], tmp_path))
    assert len(done) == 9 and len(list((tmp_path / "released/images").rglob("*.png"))) == 100
    pages = ("runs/first/report.html", "first.html", "partition.html", "compared.html", "released/report.html")
    for made in (*pages, "runs/notebook/public.html", "loss.svg", "drawn.png"):
        assert (tmp_path / made).stat().st_size > 1000, made
    for run in ("runs/cut", "runs/served", "worth/run"):
        assert (tmp_path / run / "result.json").exists(), run


def test_the_readmes_make_targets_exist():
    made = re.findall(r"^make (\w+)", "\n".join(blocks("README.md", "sh") + blocks("docs/index.md", "sh")), re.M)
    assert made == ["demo", "demo", "test"]
    for target in (*made, "setup"):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_the_first_steps_python_runs(tmp_path):
    for block in blocks("docs/index.md", "python"):
        started([sys.executable, "-c", block], tmp_path)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
    ],
)
def test_links_have_targets(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
        assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}"


PAPERS = ("feddiffuse", "fedddpm", "fedphd", "feddiff", "feddifrc", "cifar10")


@pytest.mark.parametrize("document", [*(f"docs/{paper}.md" for paper in PAPERS), "docs/notes/feddifrc.md"])
def test_a_papers_commands_name_existing_recipes(document):
    """Running them would take hours, so recipes, settings, tables, scales and cells are looked up instead."""
    lines = [line for block in blocks(document, "sh") for line in block.splitlines()]
    named = [shlex.split(line, comments=True) for line in lines if re.match("effuse (run|check|reproduce) ", line)]
    assert len(named) >= 8
    for _, command, name, *options in named:
        chosen = {flag: [b for a, b in zip(options, options[1:]) if a == flag] for flag in ("--set", "--only", "--scale")}
        if command == "reproduce":
            table = find_table(name)[1]
            table.scale(*chosen["--scale"] or [None])
            assert table.chosen(*chosen["--only"] or [None])
        else:
            find_recipe(name)[1].changed(chosen["--set"])


def test_contributings_algorithm_in_two_files_works(tmp_path):
    """CONTRIBUTING's example, in the files that it names, runs, can be checked and is found by name."""
    algorithm, recipe = blocks("CONTRIBUTING.md", "python")
    for package, source in (("algorithms", algorithm), ("recipes", recipe)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "diloco.py").write_text(source)
    script = f"""
import effuse.algorithms, effuse.recipes, sys
effuse.algorithms.__path__.append({str(tmp_path / "algorithms")!r})
effuse.recipes.__path__.append({str(tmp_path / "recipes")!r})
import effuse
from effuse.tools.check import check
from effuse.recipes import find_recipe
quick = dict(rounds=1, sampler="None", evaluate="evaluate(grid=0)", threads=1)
run = effuse.run("diloco", out={str(tmp_path / "run")!r}, **quick)
assert run.result.rounds == 1
name, recipe = find_recipe("demo")
changed = recipe.changed(["algorithm=diloco(local=adam(lr=0.1, steps=1), aggregate=median())", "rounds=1"])
assert check(changed)["traffic"]["exact"]
"""
    started([sys.executable, "-c", script], tmp_path)
