"""`effuse ui`: a page of all runs, with their progress and reports."""

from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.core.errors import RunError


@app.command()
def ui(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder of runs.")] = Path("runs"),
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. Every account of this machine can read the pages; beyond loopback, others too."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8765,
) -> None:
    """Serve a page of all runs in DIR until Ctrl-C. It is read-only, and reached from this machine only unless told."""
    from effuse.tools.ui import Pages

    if not folder.is_dir():
        raise RunError(f"{folder}: not a folder; give the one that holds your runs, or start a run first")
    try:
        pages = Pages(folder, host, port)
    except OSError as error:
        raise RunError(f"{host}:{port}: {error.strerror or error}; choose another --port or --host") from None
    with pages:
        print(f"http://{host}:{pages.server_address[1]}/ shows {folder}; Ctrl-C ends it", flush=True)
        pages.serve_forever()
