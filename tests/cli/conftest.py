"""Fixtures that run commands in this process: starting Python and torch for each call would take seconds."""

import contextlib
import copy
import functools
import importlib
import io
import json
import shlex
import sys
from typing import NamedTuple

import pytest
import typer
from toy import toy_recipe

from effuse.cli import main, menu

# a command is imported when it is first called; a test that has replaced something then would leave it so
for command, _ in menu().values():
    importlib.import_module(f"effuse.cli.{command}")

# the demo, shortened for tests
SHRUNK = (
    "--set 'algorithm=fedavg(local=adam(lr=1e-3, batch=16, steps=1))' --set rounds=2 --set evaluate.metrics=[] "
    "--set evaluate.grid=10 --set evaluate.every=1 --set sampler.steps=2 --set threads=1"
)


class Answer(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The one sentence of a refusal; anything else fails the test."""
        assert self.code not in (0, None), f"it succeeded: {self.out}"
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, f"not one sentence: {self.err}"
        assert lines[0].startswith("effuse: ") and "please report it" not in lines[0] and "Traceback" not in self.out
        return lines[0].removeprefix("effuse: ")


def call(line: str) -> Answer:
    """Run one command line."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["effuse", *shlex.split(line)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as exit:
            main()
    finally:
        sys.argv = before
    return Answer(exit.value.code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once():
    """Typer builds every imported command at each call, in 30 ms; here all are imported."""
    build = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", lambda own: copy.copy(build(own)))
        yield


@pytest.fixture(scope="session")
def effuse():
    return call


@pytest.fixture(scope="session")
def shrunk():
    """Options that shorten the demo to a second."""
    return SHRUNK


@pytest.fixture
def toy_file(tmp_path):
    """A manifest of a toy recipe, for commands that take a recipe."""

    def write(name: str = "toy.json", **changes) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"name": "toy", "recipe": toy_recipe(**changes).saved()}))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run every test in its own working folder, where commands make their folders."""
    monkeypatch.chdir(tmp_path)
