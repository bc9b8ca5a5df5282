"""`effuse bound`: the convergence bound of a method, term by term."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from effuse.cli import app
from effuse.cli.options import Json
from effuse.cli.progress import console
from effuse.core.errors import EffuseError, RunError, nearest
from effuse.core.files import writing
from effuse.metrics.bound import Bound
from effuse.metrics.bound_feddifrc import FLAWS, Theorems

bound = typer.Typer(help="Compute the convergence bound of a method for given constants.", no_args_is_help=True)
app.add_typer(bound, name="bound")


@bound.command()
def fedddpm(
    L: Annotated[float, typer.Option("-L", help="Smoothness constant of the losses.")] = 1.0,
    sigma_l: Annotated[float, typer.Option(min=0.0, help="Standard deviation of a client's gradients.")] = 1.0,
    sigma_g: Annotated[
        float, typer.Option(min=0.0, help="Heterogeneity: bound on the distance of clients' gradients from their mean.")
    ] = 1.0,
    sigma_s: Annotated[float, typer.Option(min=0.0, help="Standard deviation of the server's gradients.")] = 1.0,
    gap: Annotated[float, typer.Option(min=0.0, help="Initial suboptimality F(w_0) - F*.")] = 1.0,
    K: Annotated[int, typer.Option("-K", min=1, help="Local steps of a client in a round.")] = 15,
    E: Annotated[int, typer.Option("-E", min=1, help="Correction steps of the server in a round.")] = 47,
    T: Annotated[int, typer.Option("-T", min=1, help="Number of rounds.")] = 400,
    n: Annotated[int, typer.Option("-n", min=1, help="Clients that take part in a round.")] = 15,
    N: Annotated[int, typer.Option("-N", min=1, help="Number of clients.")] = 100,
    zeta: Annotated[
        float | None, typer.Option(min=0.0, help="The clients' step size; by default 1 / (2 L K sqrt T).")
    ] = None,
    eta: Annotated[
        float | None, typer.Option(min=0.0, help="The server's step size; by default 1 / (2 L E sqrt T).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the terms over T into this file; needs effuse\\[plots].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute FedDDPM's Theorem 1 term by term, and the largest step sizes that it allows."""
    given: dict[str, Any] = {
        "L": L,
        "sigma_l": sigma_l,
        "sigma_g": sigma_g,
        "sigma_s": sigma_s,
        "gap": gap,
        "K": K,
        "E": E,
        "T": T,
    }
    found = Bound(**given, n=n, N=N, zeta=zeta, eta=eta)
    report = described(found)
    if plot is not None:
        draw(found, plot)
        report["plot"] = str(plot)
    if as_json:
        print(json.dumps(report))
    else:
        show(report)


@bound.command()
def feddifrc(
    L1: Annotated[float, typer.Option("--L1", help="Smoothness constant of the loss.")] = 1.0,
    L2: Annotated[float, typer.Option("--L2", help="Lipschitz constant of the features in the weights.")] = 1.0,
    B: Annotated[float, typer.Option("-B", help="Bound on the norm of gradients.")] = 1.0,
    sigma2: Annotated[float, typer.Option(help="Variance of gradients.")] = 1.0,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    eta: Annotated[float, typer.Option(help="The step size.")] = 0.01,
    E: Annotated[int, typer.Option("-E", help="Local steps in a round.")] = 1,
    xi: Annotated[float, typer.Option(help="The mean squared gradient that Theorem 3 asks for.")] = 1.0,
    start: Annotated[float, typer.Option(help="The loss at the beginning.")] = 2.3,
    least: Annotated[float, typer.Option(help="The infimum of the loss.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Compute FedDifRC's Theorems 1 to 3 as printed, say where they are empty and which steps of their proof do not hold."""
    given: dict[str, Any] = {"L1": L1, "L2": L2, "B": B, "sigma2": sigma2, "classes": classes, "eta": eta, "E": E}
    found = Theorems(**given, xi=xi, start=start, least=least)
    if as_json:
        print(json.dumps(found.report()))
    else:
        show_theorems(found)


def show_theorems(found: Theorems) -> None:
    """Print the three theorems in words."""
    terms = ", ".join(f"{name} {value:+.6g}" for name, value in found.terms().items())
    lines = [f"Theorem 1: from {found.start:g} the loss is at most {found.after():.6g} after a round ({terms})"]
    for number, below, what in (
        (2, found.falls_below(), "the loss falls in every round"),
        (3, found.converges_below(), f"the mean squared gradient falls below {found.xi:g}"),
    ):
        if below > 0:
            lines.append(f"Theorem {number}: {what} for a step below {below:.6g}")
        else:
            lines.append(f"Theorem {number} is empty: it asks for a step below {below:.6g}; lower L2 or the classes")
    if (rounds := found.rounds()) is not None:
        lines[-1] += f"; with {found.eta:g} after more than {rounds:.7g} rounds"
    elif found.converges_below() > 0:
        lines[-1] += f"; the given {found.eta:g} is too large"
    lines += [f"does not hold: {flaw}" for flaw in FLAWS]
    for line in lines:
        console().print(line, soft_wrap=True, highlight=False)


def described(bound: Bound) -> dict[str, Any]:
    """A bound as a report: its constants, step sizes and terms."""
    terms = bound.terms()
    return {
        "given": dataclasses.asdict(bound),
        "steps": dict(zip(("zeta", "eta"), bound.steps)),
        "admissible": dict(zip(("zeta", "eta"), bound.admissible)),
        "fewest_rounds": bound.fewest_rounds,
        "C": bound.constant(),
        "terms": terms,
        "bound": sum(terms.values()),
    }


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    table = Table(title="FedDDPM, Theorem 1: mean squared gradient, at most", title_justify="left")
    table.add_column("term")
    table.add_column("value", justify="right")
    table.add_column("share", justify="right")
    whole = report["bound"]
    for name, value in report["terms"].items():
        table.add_row(name, f"{value:.6g}", f"{value / whole:.1%}" if whole else "-")
    table.add_row("bound", f"{whole:.6g}", "")
    console().print(table)
    given = ", ".join(f"{k} {v:g}" for k, v in report["given"].items() if v is not None)
    console().print(f"for {given}; --help explains them", soft_wrap=True)
    for name in ("zeta", "eta"):
        console().print(
            f"{name} {report['steps'][name]:.6g}, admissible up to {report['admissible'][name]:.6g}", soft_wrap=True
        )
    least = ", ".join(f"{v:.6g} ({k})" for k, v in report["fewest_rounds"].items())
    console().print(
        f"C = {report['C']:.6f}; Theorem 1's default steps are admissible for T of at least {least}", soft_wrap=True
    )
    if "plot" in report:
        console().print(f"plot in {report['plot']}", soft_wrap=True)


def draw(bound: Bound, path: Path) -> None:
    """Every term over the number of rounds, on logarithmic axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RunError("--plot: matplotlib is not installed; pip install 'effuse[plots]'") from None
    if (kind := path.suffix[1:].lower()) not in (kinds := Figure().canvas.get_supported_filetypes()):
        raise RunError(f"--plot {path}: its name must end in a picture format, such as .png; {nearest(kind, kinds)}")
    rounds = sorted({*(round(2 ** (i / 2)) for i in range(2, 33)), bound.T})
    curves: dict[str, list[tuple[int, float]]] = {}
    for T in rounds:
        try:
            terms = dataclasses.replace(bound, T=T).terms()
        except EffuseError:
            continue  # too few rounds for these steps
        for name, value in {**terms, "bound": sum(terms.values())}.items():
            curves.setdefault(name, []).append((T, value))
    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if any(value > 0 for _, value in points):
            axes.plot(
                *zip(*points), label=name, color="black" if name == "bound" else None, linewidth=2 if name == "bound" else 1
            )
    axes.axvline(bound.T, color="grey", linestyle=":", label=f"T = {bound.T}")
    axes.set(xscale="log", yscale="log", xlabel="rounds T", ylabel="mean squared gradient, at most")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the curves: they fall from corner to corner
    axes.set_title(", ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(bound).items() if v is not None), fontsize="small")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
