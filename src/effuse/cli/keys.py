"""`effuse keys`: the keys that admit clients to a federation."""

from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.transport import flower

keys = typer.Typer(help="Make the certificates and keys of a federation.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to create.")],
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name or address of the server; may be repeated."),
    ] = None,
) -> None:
    """Make a certificate authority, the server's certificate, and a key for every client."""
    flower.require()
    from effuse.transport.flower.keys import init as make

    make(folder, clients, host or ())
    print(f"{folder / 'README.md'} explains who gets which files")
