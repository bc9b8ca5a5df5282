"""How many files a reader passes from a call of `effuse.run` to `backward()`."""

import inspect
from pathlib import Path

import torch

import effuse
from effuse.cli import main

ROOT = Path(effuse.__file__).parent
PATH = [
    "runs/rounds.py",
    "algorithms/fedavg.py",
    "core/federation.py",
    "transport/simulator.py",
    "transport/worker.py",
    "core/workbench.py",
    "machines/eager.py",
]
SMALL = {"rounds": "1", "speed": "eager", "sampler": "None", "evaluate": "evaluate(grid=0)", "threads": "1"}


def files_at_backward(monkeypatch, call) -> list[str]:
    """The files of effuse on the stack at the first `backward()`, in the order in which they were entered."""
    found: list[str] = []
    backward = torch.Tensor.backward

    def watched(self, *args, **kwargs):
        if not found:
            paths = [Path(frame.filename) for frame in reversed(inspect.stack()[1:])]
            found.extend(dict.fromkeys(p.relative_to(ROOT).as_posix() for p in paths if p.is_relative_to(ROOT)))
        return backward(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    call()
    return found


def test_from_python_to_backward_are_eight_files(tmp_path, monkeypatch):
    options = {**SMALL, "rounds": 1, "threads": 1}
    found = files_at_backward(monkeypatch, lambda: effuse.run("demo", out=tmp_path / "run", **options))
    assert found == ["tools/notebook.py", *PATH]


def test_from_the_command_line_to_backward_are_nine_files(tmp_path, monkeypatch):
    words = ["effuse", "run", "demo", "--out", str(tmp_path / "run"), "--quiet"]
    words += [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    monkeypatch.setattr("sys.argv", words)

    def call():
        try:
            main()
        except SystemExit as end:
            assert end.code == 0

    assert files_at_backward(monkeypatch, call) == ["cli/__init__.py", "cli/run.py", *PATH]
