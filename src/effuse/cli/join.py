"""`effuse join`: take part in a federation, at the site that holds the data."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import INTERRUPTED, app
from effuse.cli.display import stamped
from effuse.cli.options import Device
from effuse.transport import flower


@app.command()
def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server's address.")],
    client_id: Annotated[int, typer.Option(min=0, help="This site's number in the federation.")],
    data: Annotated[
        str, typer.Option(help="The site's data, such as 'folder(\"scans\")', or `recipe` for a share of the recipe's data.")
    ],
    keys: Annotated[Path | None, typer.Option(help="The folder of keys that the server's operator sent.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="The folder for the site's state and secret; by default site-K in the working folder."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would leave the site, and exit.")] = False,
    allow: Annotated[
        str | None, typer.Option(metavar="RECIPE@HASH", help="Accept only the manifest with this hash.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Accept only the recipe of this manifest.json.")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="The most that all runs may cost each image of the data; by default the recipe's budget."),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The delta of --epsilon; by default 1e-5.")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where that is recorded; by default a file named after the data, so name one if you add images.",
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Take part as one client until the run ends; the data stays here. Reconnects automatically; Ctrl-C leaves."""
    flower.require()
    from effuse.tools.preview import what_leaves
    from effuse.transport.flower.commands import join as take_part
    from effuse.transport.flower.consent import Consent
    from effuse.transport.flower.guarded import Limit

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # service managers send SIGTERM: handle it as Ctrl-C
    consent = Consent.given(recipe, allow)
    place, preview = folder or Path(f"site-{client_id}"), what_leaves if dry_run else None

    def report(line: str) -> None:
        # a log needs the time; what a dry run prints is a page
        print(line if sys.stdout.isatty() or dry_run else stamped(line), flush=True)

    try:
        limit = Limit(epsilon, delta, ledger)
        take_part(server, client_id, data, keys, place, consent, device, report, preview, limit)
    except KeyboardInterrupt:
        # exit at once: torch aborts if Python ends while a job runs in its thread
        print("effuse: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
