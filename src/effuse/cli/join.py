"""`effuse join`: take part in a federation, at the site that has the data."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import INTERRUPTED, app
from effuse.cli.options import Device
from effuse.transport import flower


@app.command()
def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server's address.")],
    client_id: Annotated[int, typer.Option(min=0, help="This site's number in the federation.")],
    data: Annotated[
        str, typer.Option(help="The site's own data, such as 'folder(\"scans\")'; `recipe`: a share of the recipe's.")
    ],
    keys: Annotated[Path | None, typer.Option(help="The folder of keys that the server's operator sent.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the site keeps its state and secret; by default site-K here.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would leave the site, and leave.")] = False,
    allow: Annotated[str | None, typer.Option(metavar="RECIPE@HASH", help="Accept the manifest of this hash only.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Accept the recipe of this manifest.json only.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Take part as one client, on data that stays here, until the run is over; reconnects by itself; Ctrl-C leaves."""
    flower.require()
    from effuse.tools.preview import what_leaves
    from effuse.transport.flower.commands import join as take_part
    from effuse.transport.flower.site import Consent

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service is stopped as Ctrl-C would stop it
    consent = Consent.given(recipe, allow)
    place = folder or Path(f"site-{client_id}")

    def say(words: str) -> None:
        print(words, flush=True)

    try:
        take_part(server, client_id, data, keys, place, consent, device, say, what_leaves if dry_run else None)
    except KeyboardInterrupt:
        # at once: a job may be at work in its thread, and torch would abort where Python ends around it
        print("effuse: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
