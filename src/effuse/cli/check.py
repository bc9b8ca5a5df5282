"""`effuse check`: what a recipe would cost and send, before it runs."""

import json
from typing import Any

from rich.table import Table

from effuse.cli import app
from effuse.cli.options import Clients, Data, Json, RecipeName, Rounds, Seed, Settings, chosen
from effuse.cli.progress import amount, console, promise
from effuse.core.errors import MissingError, shown
from effuse.tools.check import check as rehearse

WITHOUT_FILES = (
    "to rehearse without files, add --set evaluate.metrics=[] and, for N classes of M images of SxS pixels and C channels, "
    "--set 'data=labels(sizes=[M]*N, side=S, channels=C)'"
)


@app.command("plan", hidden=True)
@app.command("check")
def check(
    recipe: RecipeName,
    set: Settings = None,
    data: Data = None,
    rounds: Rounds = None,
    seed: Seed = None,
    clients: Clients = None,
    as_json: Json = False,
) -> None:
    """Rehearse RECIPE without computing: print its parameters, partition, traffic and training steps. `plan` is an alias."""
    name, wanted, warnings = chosen(recipe, set, rounds, seed, clients, data)
    try:
        report = rehearse(wanted, name)
    except MissingError as error:
        end = "" if str(error).endswith("?") else ";"
        raise MissingError(f"{error}{end} {WITHOUT_FILES}") from None
    report["warnings"] += warnings
    if as_json:
        print(json.dumps(report))
    else:
        show(report)


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    page = console()
    traffic, parts = report["traffic"], report["parameters"]
    table = Table(title=f"{report['recipe']}: what a run would do", show_header=False, title_justify="left")
    inner = ", ".join(f"{k} {v:,}" for k, v in parts.items() if k != "total")
    table.add_row("parameters", f"{parts['total']:,}" + (f" ({inner})" if inner else ""))
    frozen = f", and {report['macs_frozen']:,} of frozen networks while training" if report["macs_frozen"] else ""
    table.add_row("multiply-adds an image", f"{report['macs']:,}{frozen}")
    for other in report["networks"]:
        size = f"{other['parameters']:,} parameters, {other['macs']:,} multiply-adds an image"
        table.add_row(f"also trained: {other['name']}", size)
    up, down = (amount(traffic["bytes"][d]) for d in ("up", "down"))
    exact = "exact" if traffic["exact"] else traffic["reason"]
    table.add_row("traffic", f"{up} up, {down} down; {traffic['parameters']['total']:,} parameters ({exact})")
    if len(traffic["links"]) > 1:  # weighting by distance needs several links
        costs = ", ".join(f"{cost:,.2f} ({name})" for name, cost in traffic["costs"].items())
        table.add_row("MiB weighed by distance", costs)
    for link, sent in traffic["links"].items() if len(traffic["links"]) > 1 else ():
        table.add_row(link, f"{amount(sent['up'])} up, {amount(sent['down'])} down")
    for what, spent in (report["privacy"] or {}).items():
        budget = f"epsilon {spent['epsilon']:g}, delta {spent['delta']:g} for every client ({spent['mechanism']})"
        table.add_row(f"privacy of the {what}", budget)
    if (plan := report["plan"]) is not None:
        table.add_row("privacy of a client", promise(plan))
        sigmas = [c["sigma"] for c in plan["clients"].values() if c["sigma"]]
        if sigmas:
            table.add_row("noise multiplier sigma", f"{min(sigmas):.4g} to {max(sigmas):.4g}, solved for each client's size")
    after = report["after"]["parameters"]
    if after != parts["total"]:
        table.add_row("after pruning", f"{after:,} parameters, {report['after']['macs']:,} multiply-adds an image")
    if traffic["evaluation"]["bytes"]["total"]:
        table.add_row("evaluation traffic", amount(traffic["evaluation"]["bytes"]["total"]))
    looks = report["evaluation"]
    if looks["calls"]:
        share = "" if looks["of_training"] is None else f", {looks['of_training']:.1%} of the arithmetic of all training"
        table.add_row("evaluations", f"{looks['times']} of {looks['calls']:,} network evaluations{share}")
    table.add_row("training steps", f"{report['steps']['client']:,} at clients, {report['steps']['server']:,} at the server")
    held = report["memory"]["cohort"]
    replies = f", {amount(held)} of it for the replies of a cohort" if held else ""
    table.add_row("memory, about", amount(report["memory"]["total"]) + replies)
    states = report["disk"]["clients"]
    kept = f", {amount(states)} of it for the states of clients" if states else ""
    table.add_row("disk, about", amount(report["disk"]["total"]) + kept)
    split = Table(title="images and traffic of each client", title_justify="left")
    split.add_column("client", justify="right")
    split.add_column("images", justify="right")
    groups = report["partition"].get("groups")
    if groups is not None:
        split.add_column("groups", justify="right")
    split.add_column("per class")
    split.add_column("up", justify="right")
    split.add_column("down", justify="right")
    for k, (size, labels) in enumerate(zip(report["partition"]["sizes"], report["partition"]["labels"])):
        sent = traffic["clients"].get(str(k), {"up": 0, "down": 0})
        grouped = [] if groups is None else [f"{groups[k]:,}"]
        split.add_row(str(k), f"{size:,}", *grouped, " ".join(map(str, labels)), amount(sent["up"]), amount(sent["down"]))
    page.print(split)
    page.print(f"classes: {', '.join(map(shown, report['partition']['classes']))}", soft_wrap=True)
    page.print(table)  # last, because the rows of many clients fill the screen
    for warning in report["warnings"]:
        page.print(f"warning: {warning}")
