"""The command as a user has it, called in this process: starting Python and torch reset_for for each call would cost seconds."""

import contextlib
import io
import json
import shlex
import sys
from typing import NamedTuple

import pytest
from toy import toy_recipe

from effuse.cli import main

# the demo, small enough for a test
SHRUNK = (
    "--set 'algorithm=fedavg(local=adam(lr=1e-3, batch=16, steps=1))' --set rounds=2 --set evaluate.metrics=[] "
    "--set evaluate.grid=10 --set evaluate.every=1 --set sampler.steps=2 --set threads=1"
)


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The one sentence that a refusal is; anything else fails the test."""
        assert self.code not in (0, None), f"it went through: {self.out}"
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


@pytest.fixture(scope="session")
def effuse():
    return call


@pytest.fixture(scope="session")
def shrunk():
    """Options that make the demo a matter of a second."""
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
    """Folders that a command makes by itself land in the test's own."""
    monkeypatch.chdir(tmp_path)
