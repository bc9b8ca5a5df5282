"""`effuse prune`: prune a trained model, and compare it before and after."""

import json
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table

from effuse.cli import app
from effuse.cli.options import Device, Json, Quiet, RunPath, Settings
from effuse.cli.progress import amount, console
from effuse.core.errors import RecipeError, nearest
from effuse.pruning.prune import Criterion
from effuse.tools.prune import prune_run


@app.command()
def prune(
    run: RunPath,
    ratio: Annotated[float, typer.Option(help="The share of channels to remove, from 0 to less than 1.")] = 0.2,
    criterion: Annotated[
        str, typer.Option(help="Which channels to remove: norm (those of smallest norm) or random.")
    ] = "norm",
    out: Annotated[Path | None, typer.Option(help="A new run folder; by default RUN-pruned-RATIO.")] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics instead of the recipe's, such as '\\[fid(n=1000), kid(n=1000)]'.")
    ] = None,
    set: Settings = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the random criterion.")] = 0,
    ema: Annotated[bool, typer.Option("--ema", help="Prune the moving average of the weights.")] = False,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove channels from a run's model without retraining; compares parameters, arithmetic, size and metrics."""
    if not 0 <= ratio < 1:
        raise RecipeError(f"--ratio {ratio}: expected a share from 0 to less than 1, such as 0.2")
    if criterion not in get_args(Criterion):
        raise RecipeError(f"--criterion {criterion}: there is none; {nearest(criterion, get_args(Criterion))}")
    named = run.resolve() if run.name in ("", "..") else run  # `.` has no name of its own
    where = out or named.parent / f"{run.resolve().name}-pruned-{ratio:g}"
    settings = [*([f"evaluate.metrics={metrics}"] if metrics else []), *(set or [])]
    report = prune_run(
        run, ratio, where, criterion=cast(Criterion, criterion), settings=settings, seed=seed, ema=ema, device=device
    )
    if as_json:
        print(json.dumps(report))
    elif not quiet:
        show(report)


def show(report: dict[str, Any]) -> None:
    """Print both models side by side."""
    before, after = report["before"], report["after"]
    table = Table(title=f"{report['run']}, pruned by a ratio of {report['ratio']:g}", title_justify="left")
    for column in ("", "before", "after", "less"):
        table.add_column(column, justify="left" if not column else "right")
    words = {"parameters": "parameters", "macs": "multiply-adds an image", "layer_macs": "the same, layer by layer"}
    for key, name in words.items():
        table.add_row(name, f"{before[key]:,}", f"{after[key]:,}", f"{1 - after[key] / before[key]:.1%}")
    table.add_row("size", amount(before["bytes"]), amount(after["bytes"]), f"{1 - after['bytes'] / before['bytes']:.1%}")
    for name, m in before["metrics"].items():
        table.add_row(name, f"{m['value']:.4g}", f"{after['metrics'][name]['value']:.4g}", "")
    console().print(table)
    whole, left = report["channels"]["before"], report["channels"]["after"]
    share = left / whole
    console().print(
        f"{left:,} of {whole:,} channels are left ({share:.0%}): every group of a norm loses a whole number of them. "
        f"A layer loses inputs and outputs, so about {share:.0%} x {share:.0%} = {share * share:.0%} of its weights stay.",
        soft_wrap=True,
    )
    console().print(
        f"the pruned model is in {report['out']}/model; effuse.load opens it, plain diffusers does not", soft_wrap=True
    )
