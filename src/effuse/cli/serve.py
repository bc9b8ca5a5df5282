"""`effuse serve`: run a federation whose clients are at their sites."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import NAMED, Clients, Data, Device, Json, Quiet, Rounds, Seed, Settings, Track, chosen
from effuse.cli.progress import tell, watched
from effuse.core.errors import RecipeError, RunError
from effuse.core.recipe import Recipe, read_manifest
from effuse.report.writer import Reporting
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.tools.notebook import new_folder
from effuse.transport import flower

DEADLINE = 3600.0
GRACE = 30.0


@app.command()
def serve(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="The address at which sites reach the server.")],
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help=NAMED)] = None,
    clients: Clients = None,
    keys: Annotated[Path | None, typer.Option(help="The server's keys, from `effuse keys init`.")] = None,
    quorum: Annotated[
        int | None,
        typer.Option(
            help="How many of all clients must answer; by default all. Clients with a removed key count as missing."
        ),
    ] = None,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that a job may take.")] = DEADLINE,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait for a site that is gone, where a quorum has answered."),
    ] = GRACE,
    images: Annotated[
        int | None,
        typer.Option(
            min=1, help="The most images that a site may claim to have; by default 100,000, or twice the server's own."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue this run; with RECIPE, start it if it does not exist."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept connections from other machines without keys.")
    ] = False,
    set: Settings = None,
    data: Data = None,
    device: Device = "auto",
    rounds: Rounds = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default a new one under runs/.")] = None,
    track: Track = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Wait for the clients, train by RECIPE with them, and write a run folder. The data stays at the sites."""
    flower.require()
    from effuse.transport.flower.commands import Served, served
    from effuse.transport.flower.terms import Terms

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # service managers send SIGTERM: handle it as Ctrl-C
    if recipe is None and resume is None:
        raise RecipeError("give a RECIPE to start a run, or --resume RUN to continue one")
    if resume is not None and out is not None:
        raise RunError(f"--resume {resume} and --out {out}: give one of them")
    if recipe is None and (set or clients is not None or rounds is not None or seed is not None or data):
        raise RunError(f"--resume {resume}: the run keeps its recipe; leave out the options that change it")
    begun = resume is not None and (recipe is None or (resume / "manifest.json").exists())
    warnings: list[str] = []
    if recipe is None:
        folder = Path(str(resume))
        manifest = read_manifest(folder)
        name, wanted = str(manifest.get("name")), Recipe.restore(manifest["recipe"])
    else:
        name, wanted, warnings = chosen(recipe, set, rounds, seed, clients, data)
        folder = resume or out or new_folder(name)
        if begun:
            RunFolder(folder).require_same(wanted)
    terms = Terms(quorum, deadline, grace=grace, images=images)
    engine = served(Served(listen, keys, terms, insecure), name, wanted.clients)
    again = f"effuse serve --listen {listen}" + (f" --keys {keys}" if keys is not None else " --insecure" * insecure)
    again += f" --quorum {quorum}" * (quorum is not None) + f" --deadline {deadline:.12g}" * (deadline != DEADLINE)
    again += f" --grace {grace:.12g}" * (grace != GRACE)
    again += f" --images {images}" * (images is not None)
    with watched(folder, as_json, quiet, f"{again} --resume", warnings, track) as observer:
        if begun:
            result = driver.resume(folder, observer=Reporting(observer), served=engine)
        else:
            result = driver.run(wanted, folder, name=name, device=device, observer=Reporting(observer), served=engine)
    tell(result, folder, None, as_json, quiet)
