"""`effuse evaluate`: measure a trained model again, with the same or other metrics."""

import json
from typing import Annotated

import typer

from effuse.cli import app
from effuse.cli.options import Device, Json, Quiet, RunPath, Settings
from effuse.cli.progress import drawing, show_metrics
from effuse.core.machine import Meter
from effuse.runs.evaluation import evaluate_run
from effuse.runs.records import plain


@app.command()
def evaluate(
    run: RunPath,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics instead of the recipe's, such as '\\[fid(n=1000), kid(n=1000)]'.")
    ] = None,
    set: Settings = None,
    ema: Annotated[bool, typer.Option("--ema", help="Measure the moving average of the weights.")] = False,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a run's saved model; writes the metrics and their protocols to RUN/evaluation.json."""
    settings = [*([f"evaluate.metrics={metrics}"] if metrics else []), *(set or [])]
    meter = Meter()
    with drawing(meter, as_json or quiet):
        found = evaluate_run(run, settings, ema=ema, device=device, meter=meter)
    if as_json:
        print(json.dumps({"run": str(run), "metrics": plain(found)}))
    elif not quiet:
        show_metrics(found)
        print(f"the full protocols are in {run / 'evaluation.json'}")
