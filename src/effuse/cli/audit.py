"""`effuse audit`: what a trained model gives away of its training images, beside what was promised."""

import json
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table

from effuse.cli import app
from effuse.cli.options import Device, Json, Quiet, RunPath
from effuse.cli.progress import console
from effuse.core.errors import AuditError, RecipeError, nearest
from effuse.core.files import write_atomically
from effuse.tools.audit import Which, audit_run
from effuse.tools.audit_beside import beside, read_audit
from effuse.tools.audit_model import MEMBERS
from effuse.tools.audit_page import within


@app.command()
def audit(
    run: RunPath,
    model: Annotated[
        str,
        typer.Option(
            help="The model to attack: global, which the run delivers, or generator, which draws images: of FedDiff each "
            "client's own, if the run has algorithm.keep=True."
        ),
    ] = "global",
    n: Annotated[
        int | None,
        typer.Option(
            "-n", min=1, help="Number of audited images; by default all that the server keeps, or 1,000 drawn ones."
        ),
    ] = None,
    members: Annotated[int, typer.Option(min=1, help="The most training images of a model that attacks look at.")] = MEMBERS,
    guesses: Annotated[
        int | None,
        typer.Option(min=1, help="Number of canaries to guess, chosen before any result; by default half of them."),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Audit the moving average of the weights.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="Another run, already audited: both audits are shown in one picture, in RUN/audit/against.html."),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure memorisation, membership attacks and a lower bound on epsilon; writes RUN/audit with a page and a picture.

    A lower bound above the promised epsilon ends in an error.
    """
    if model not in get_args(Which):
        raise RecipeError(f"--model {model}: there is none; {nearest(model, get_args(Which))}")
    other = None if against is None else read_audit(against)
    report = audit_run(run, which=cast(Which, model), n=n, members=members, guesses=guesses, ema=ema, device=device)
    if other is not None:
        write_atomically(run / "audit" / "against.html", beside(report, other).encode())
    if as_json:
        print(json.dumps(report))
    elif not quiet:
        show(report)
        print(f"the page is {run / 'audit' / 'index.html'}; the pictures in {run / 'audit' / 'private'} are yours alone")
        if other is not None:
            print(f"both audits are in {run / 'audit' / 'against.html'}")
    if report["error"]:
        raise AuditError(report["error"])


def show(report: dict[str, Any]) -> None:
    """Print the audit."""
    table = Table(title=f"audit of {report['about']['run']}", show_header=False, title_justify="left")
    promise, memorised, attacked = report["promise"], report["memorisation"], report["membership"]
    said = (
        "nothing"
        if promise is None
        else f"epsilon {promise['epsilon']:g}, delta {promise['delta']:g}, per {promise['unit']}"
    )
    table.add_row("promised", said)
    if promise is not None and (ledger := promise["ledger"]) is not None and ledger["clients"]:
        table.add_row("spent by a client", f"epsilon {ledger['epsilon']:.4g} at most")
        table.add_row("not covered", ledger["not_covered"])
    table.add_row("images", report["about"]["images"])
    if report["clients"] is not None:
        table.add_row("generators", report["about"]["generators"])
    for kind, words in (("generated", "memorised"), ("held_out", "the same of held-out images")) if memorised else ():
        s = memorised[kind]
        table.add_row(words, f"{s['below']:,} of {s['n']:,} ({s['share']:.2%}), lowest score {s['lowest']:.3f}")
    table.add_row("attacked", f"{attacked['members']:,} training images, {attacked['others']:,} others of the same labels")
    for name, attack in attacked["attacks"].items():
        table.add_row(f"{name}: area", within(attack["auc"]))
        table.add_row(f"{name}: found at 1 % false positives", within(attack["tpr"], ".1%"))
    if attacked["bound"] is not None:
        table.add_row("the promise allows at 1 %", f"{attacked['bound']:.2%}")
    if (shown := report["one_run"]) is not None:
        guessed = f"{shown['right']:,} of {shown['guesses']:,} guesses right"
        table.add_row("epsilon, at least", f"{shown['epsilon']:.3f} ({guessed}, {shown['canaries']:,} canaries)")
    console().print(table)
