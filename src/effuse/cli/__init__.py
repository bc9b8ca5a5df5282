"""The command line: one file per command."""

import importlib
import os
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from effuse.core.errors import EffuseError, nearest, shown

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended
COMPLETING = "_EFFUSE_COMPLETE"  # set by a shell that asks for completions
ALIASES = {"plan": "check"}
# the commands of `effuse --help`, by what their users do
PANELS = {
    "Start": ("new", "list", "check", "run", "resume", "sample", "evaluate", "ui", "doctor"),
    "Research": (
        "partition",
        "report",
        "compare",
        "reproduce",
        "prune",
        "probe",
        "audit",
        "bound",
        "export",
        "pack",
        "unpack",
    ),
    "Operate a federation": ("keys", "serve", "join", "ledger", "worth", "release"),
}
OTHERS = "More"
LONGEST = 600  # characters shown of an unexpected error

app = typer.Typer(
    name="effuse",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        from effuse import __version__
        from effuse.runs.release import source

        print(f"effuse {__version__}, source {source()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_version,
            help="Print the version and the digest of the source code, which every manifest records.",
        ),
    ] = False,
) -> None:
    """Federated learning of, and with, diffusion models. Add --debug to any command to see a full traceback."""


class Interrupted(Exception):
    """Ctrl-C, with a message on how to continue."""


def main() -> None:
    """Run a command; every error ends in one sentence and a non-zero exit code."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"] or ["--help"]
    try:
        code = _commands(_wanted(arguments))(arguments, prog_name=app.info.name, standalone_mode=False)
        if code == INTERRUPTED:  # typer turns a Ctrl-C into this code
            raise KeyboardInterrupt
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except (Interrupted, KeyboardInterrupt) as error:
        sys.exit(_stop("; ".join(filter(None, ("interrupted", str(error)))), INTERRUPTED))
    except click.UsageError as error:
        sys.exit(_stop(_usage(error), error.exit_code))
    except click.ClickException as error:
        sys.exit(_stop(error.format_message(), error.exit_code))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, such as `head`, closed the pipe
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        sys.exit(_stop(_sentence(error), 1))


def _wanted(arguments: list[str]) -> str | None:
    """The command that these arguments call, or that a shell completes."""
    if os.environ.get(COMPLETING):
        arguments = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()[1:]
    return next((word for word in arguments if not word.startswith("-")), None)


def menu() -> dict[str, tuple[str, str]]:
    """Every command with its module and what it does, from the first lines of the modules, none of which is imported."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        with path.open(encoding="utf-8") as file:
            about = file.readline().strip().strip('"')
        if match := re.fullmatch(r"((?:`effuse \w+`(?: and )?)+): (.+)", about):
            words = match[2][0].upper() + match[2][1:]
            found |= dict.fromkeys(re.findall(r"`effuse (\w+)`", match[1]), (path.stem, words))
    return found


def _commands(wanted: str | None) -> click.Command:
    """The wanted command, and all others as names with a line of help: importing them takes seconds.

    The help of arguments is restored, which click 8.5 and this typer lose.
    """
    known = menu()
    if (name := ALIASES.get(wanted or "", wanted)) in known:
        importlib.import_module(f"effuse.cli.{known[name][0]}")  # this registers it
    group: Any = typer.main.get_command(app)
    imported = group.commands
    order = [*dict.fromkeys(name for names in PANELS.values() for name in names), *known]
    group.commands = {
        name: imported[name] if name == wanted and name in imported else _line_of_help(name, known[name][1])
        for name in dict.fromkeys(order)
        if name in known
    } | {alias: imported[alias] for alias in ALIASES if alias in imported}
    for command in _leaves(group):
        if command.callback is None:
            continue
        hints = typing.get_type_hints(command.callback, include_extras=True)
        for argument in (p for p in command.params if isinstance(p, click.Argument)):
            (info,) = (x for x in hints[str(argument.name)].__metadata__ if isinstance(x, typer.models.ArgumentInfo))
            argument.__dict__["help"] = info.help
    return group


def _line_of_help(name: str, words: str) -> click.Command:
    panel = next((panel for panel, names in PANELS.items() if name in names), OTHERS)
    return typer.core.TyperCommand(name, help=words, rich_help_panel=panel)


def _leaves(command: click.Command) -> Iterator[click.Command]:
    """Commands without subcommands, including those in groups."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _leaves(inner)
    else:
        yield command


def _usage(error: click.UsageError) -> str:
    words = error.format_message().partition(". ")[0].rstrip(".")  # without click's own suggestions
    command = error.ctx.command if error.ctx else None
    if isinstance(error, click.NoSuchOption) and command is not None:
        known = [option[2:] for p in command.params for option in p.opts if option.startswith("--")]
        return f"{words}; {nearest(error.option_name.lstrip('-'), known)}"  # without dashes, which make all options similar
    if words.startswith("No such command") and isinstance(command, click.Group):
        wanted, known = words.split("'")[1], [name for name, c in command.commands.items() if not c.hidden]
        return f"{words}; {nearest(wanted, known)}"
    return f"{words}; `{error.ctx.command_path if error.ctx else app.info.name} --help` lists the commands and options"


def _sentence(error: Exception) -> str:
    if isinstance(error, EffuseError):
        return f"{type(error).__name__}: {error}"
    words = " ".join(str(error).split())[:LONGEST]
    if isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words:
        return f"not enough memory ({words}); lower algorithm.local.batch or sampler.batch; `effuse check` estimates memory"
    # importing specs takes a second, which other errors avoid
    from effuse.core.origin import culprit

    where = culprit(error) or "please report it"
    return f"unexpected {type(error).__name__}: {words} ({where}; --debug shows a traceback)"


def _stop(words: str, code: int) -> int:
    print(f"effuse: {shown(' '.join(words.split()))}", file=sys.stderr)
    return code
