"""The command line: one file per command."""

import sys

import click
import typer

from effuse.core.errors import EffuseError

app = typer.Typer(
    name="effuse",
    help="Federated learning of, and with, diffusion models. Any command takes --debug to show a traceback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run a command; what goes wrong ends in one sentence and a non-zero exit code."""
    from effuse.cli import check, evaluate, list, resume, run, sample  # noqa: F401  (each registers its command)

    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        code = app(arguments, standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(_stop("interrupted", 130))
    except click.ClickException as error:
        sys.exit(_stop(error.format_message(), error.exit_code))
    except KeyboardInterrupt:
        sys.exit(_stop("interrupted; `effuse resume RUN` goes on from the last checkpoint", 130))
    except EffuseError as error:
        if debug:
            raise
        sys.exit(_stop(f"{type(error).__name__}: {error}", 1))
    except Exception as error:
        if debug:
            raise
        sys.exit(_stop(f"unexpected {type(error).__name__}: {error} (--debug shows where; please report it)", 1))
    sys.exit(code if isinstance(code, int) else 0)


def _stop(words: str, code: int) -> int:
    print(f"effuse: {words}", file=sys.stderr)
    return code
