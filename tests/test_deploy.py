"""The service and container files call commands that exist, with options that they take."""

import re
from pathlib import Path

import pytest
import typer.main

from effuse.cli import app, join, keys, serve  # noqa: F401  (each registers its command)

DEPLOY = Path(__file__).parent.parent / "deploy"


@pytest.mark.parametrize("name", ["effuse-join.service", "effuse-serve.service", "Containerfile"])
def test_every_command_exists(name):
    text = (DEPLOY / name).read_text().replace("\\\n#", " ").replace("\\\n", " ")
    lines = re.findall(r"effuse +(join|serve) ([^\n]*)", text)
    assert lines
    commands = typer.main.get_command(app).commands
    for command, words in lines:
        known = {option for parameter in commands[command].params for option in parameter.opts}
        used = set(re.findall(r"(?<= )--[a-z-]+", f" {words}"))
        assert used and used <= known, f"{name}: effuse {command} has no {sorted(used - known)}"


def test_ledgers_are_where_containers_and_services_keep_their_state():
    """A ledger that is lost with a container, or cannot be written, would forget what was spent."""
    assert "ENV EFFUSE_LEDGERS=/state/" in (DEPLOY / "Containerfile").read_text()
    assert "Environment=EFFUSE_LEDGERS=/var/lib/effuse/" in (DEPLOY / "effuse-join.service").read_text()


def test_services_end_as_ctrl_c_would_and_write_only_where_they_may():
    for name in ("effuse-join.service", "effuse-serve.service"):
        unit = (DEPLOY / name).read_text()
        assert "Restart=on-failure" in unit and "ProtectSystem=strict" in unit and "StateDirectory=effuse" in unit
        written = re.findall(r"--(?:folder|resume) (\S+)", re.search("ExecStart=(.*)", unit)[1])
        assert written and all(path.startswith("/var/lib/effuse/") for path in written)
