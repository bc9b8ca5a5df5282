"""`effuse probe`: how well a linear classifier tells the classes from a run's frozen features."""

import json
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table

from effuse.cli import app
from effuse.cli.options import Device, Json, Quiet, RunPath
from effuse.cli.progress import console
from effuse.core.errors import RecipeError, nearest
from effuse.metrics.linear_probe import Kind
from effuse.tools.pictures import Picture
from effuse.tools.probe import probe_run


@app.command()
def probe(
    run: RunPath,
    stages: Annotated[
        str | None, typer.Option(metavar="K,...", help="Stages of a U-Net: 0 is its middle; by default all.")
    ] = None,
    steps: Annotated[str, typer.Option(metavar="T,...", help="Time steps of a denoiser.")] = "0,10,50,150,300",
    kind: Annotated[str, typer.Option(help="The linear classifier: ridge or logistic.")] = "ridge",
    penalty: Annotated[float, typer.Option(help="Its penalty on squared weights of standardised features.")] = 1e-3,
    share: Annotated[float, typer.Option(help="The share of the training images that judges.")] = 0.2,
    images: Annotated[int | None, typer.Option(min=2, help="Train on that many of the others; by default all.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Probe the moving average of the weights.")] = False,
    untrained: Annotated[bool, typer.Option("--untrained", help="Control: the same network with random weights.")] = False,
    client: Annotated[int | None, typer.Option(help="Use this client's own model, if the clients have their own.")] = None,
    picture: Annotated[
        str | None, typer.Option(metavar="KIND,...", help="Draw tsne, pca or kmeans of the images that judge, into RUN.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise, of random weights and of pictures.")] = 0,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Probe each stage and time step of a run's U-Net under the null label, or the features of its classifier.

    Held-out training images judge, never the test set. The table is also written to RUN/probe.json. Pictures show real
    images or what a network sees in them: only those who may see the images may see these.
    """
    if kind not in (kinds := get_args(Kind)):
        raise RecipeError(f"--kind {kind}: {nearest(kind, kinds)}")
    if not penalty > 0 or not 0 < share < 1:
        raise RecipeError(f"--penalty {penalty:g} must be above 0, and --share {share:g} between 0 and 1")
    pictures = [] if picture is None else [word.strip() for word in picture.split(",")]
    for word in pictures:
        if word not in (kinds := get_args(Picture)):
            raise RecipeError(f"--picture {word}: {nearest(word, kinds)}")
    found = probe_run(
        run,
        stages=None if stages is None else numbers(stages, "--stages"),
        steps=numbers(steps, "--steps"),
        kind=cast(Kind, kind),
        penalty=penalty,
        share=share,
        images=images,
        ema=ema,
        untrained=untrained,
        seed=seed,
        device=device,
        client=client,
        pictures=cast(list[Picture], pictures),
    )
    if as_json:
        print(json.dumps(found))
    elif not quiet:
        show(found)


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas."""
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal()]
    if wrong:
        raise RecipeError(f"{option} {text}: '{wrong[0]}' is not a whole number; give some such as 0,10,50")
    return [int(word) for word in words]


def show(found: dict[str, Any]) -> None:
    """Print a row for each stage and a column for each time step."""
    rows = found["rows"]
    steps = list(dict.fromkeys(row.get("t") for row in rows))
    table = Table(title=f"{found['run']}, {found['model']}: accuracy of a {found['probe']} probe", title_justify="left")
    table.add_column("stage")
    table.add_column("features", justify="right")
    for t in steps:
        table.add_column("accuracy" if t is None else f"t {t}", justify="right")
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = {row.get("t"): row for row in rows if row["stage"] == stage}
        table.add_row(stage, str(own[steps[0]]["features"]), *(f"{own[t]['accuracy']:.1%}" for t in steps))
    console().print(table)
    seen = "has seen them too" if found["seen"] else "has not seen them"
    console().print(
        f"trained on {found['trained_on']} training images, judged on {found['judged_on']} others; the network {seen}",
        soft_wrap=True,
    )
    console().print(f"written to {', '.join([found['file'], *found['pictures']])}", soft_wrap=True)
