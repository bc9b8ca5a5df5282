"""Should a site take part? A model of its data alone beside the federated one, on its own images that neither has seen."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effuse.algorithms.fedavg import FedAvg
from effuse.core.capabilities import Personal
from effuse.core.data import Source
from effuse.core.errors import RecipeError, RunError
from effuse.core.files import cache_folder, write_atomically, writing
from effuse.core.metric import Measurement
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.solvers import Solver
from effuse.core.spec import text
from effuse.core.workbench import Workbench
from effuse.data.partition import Iid
from effuse.data.sources import Renumbered
from effuse.runs.driver import run as run_recipe
from effuse.runs.evaluation import Evaluator
from effuse.runs.observer import Observer
from effuse.runs.records import plain
from effuse.runs.save import Loaded, load
from effuse.transport.device import pick_device
from effuse.transport.refusals import refuse_evaluation, refuse_model

LOWER = ("fid", "kid")  # metrics of which less is better
UNRANKED = ("diversity", "mix", "tones")  # nearer to real images is better, whatever the direction


@dataclasses.dataclass(frozen=True)
class Compared:
    """A number of both models, and which one it favours."""

    metric: str
    federated: float
    alone: float

    @property
    def better(self) -> str:
        if self.federated == self.alone or self.metric.startswith(UNRANKED):
            return "-"
        return "federated" if (self.federated < self.alone) == self.metric.startswith(LOWER) else "alone"


def worth(
    run: Path,
    data: Source | None,
    out: Path,
    settings: Sequence[str] = (),
    *,
    device: str = "auto",
    observer: Observer | None = None,
) -> list[Compared]:
    """Train on a site's data alone as the run's clients did, and measure both models on the site's test images.

    Without `data` it is the recipe's. `out` holds a model of one site's images: only its owner may read it.
    """
    opened = load(run, device=pick_device(device).type)
    recipe = measured(opened, data, settings)
    train, test = recipe.data.load("train"), recipe.data.load("test")
    refuse_model(recipe, train)
    refuse_evaluation(recipe, train, test)
    with writing(out):
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        out.chmod(0o700)
    run_recipe(trained(recipe), out / "run", name="alone", device=device, observer=observer)
    models = {"federated": opened, "alone": load(out / "run", device=opened.device.type)}
    evaluator = Evaluator(
        recipe, train.to(opened.device), test, Workbench(opened.machine, recipe.task, recipe.rounds), cache_folder()
    )
    found = {
        name: evaluator.evaluate_model(one.model.to(opened.device), out / f"{name}.png") for name, one in models.items()
    }
    told = [Compared(key, m.value, found["alone"][key].value) for key, m in found["federated"].items()]
    _write(out, run, recipe, found)
    return told


def measured(opened: Loaded, data: Source | None, settings: Sequence[str]) -> Recipe:
    """The run's recipe on the site's data, for its metrics."""
    recipe = opened.recipe.changed(list(settings))
    if isinstance(recipe.algorithm, Personal):
        raise RunError(
            f"{opened.run}: {recipe.algorithm.name} leaves each client a model of its own; compare by its metrics"
        )
    if data is not None:
        classes = read_manifest(opened.run).get("classes")
        named = tuple(str(name) for name in classes) if isinstance(classes, list) else ()
        recipe = dataclasses.replace(recipe, data=Renumbered(of=data, classes=named) if named else data)
    if not recipe.evaluate.metrics:
        raise RecipeError("the recipe has no metrics to compare by; name some with --metrics '[...]'")
    return recipe


def trained(recipe: Recipe) -> Recipe:
    """One site alone, with the clients' solver in as many rounds. Its model stays, so it is trained without noise."""
    solver = getattr(recipe.algorithm, "local", None)
    if not isinstance(solver, Solver):
        raise RecipeError(
            f"{recipe.algorithm.name} has no solver `local` of its model, so a site alone has nothing to train by; "
            "compare runs of your own with effuse compare"
        )
    return dataclasses.replace(
        recipe,
        clients=1,
        partition=Iid(),
        algorithm=FedAvg(local=dataclasses.replace(solver, privacy=None)),
        evaluate=dataclasses.replace(recipe.evaluate, every=0, grid=0, metrics=()),
        budget=None,
        canaries=0,
        ema=None,
    )


def _write(out: Path, run: Path, recipe: Recipe, found: Mapping[str, Mapping[str, Measurement]]) -> None:
    report: dict[str, Any] = {"run": str(run), "data": text(recipe.data, full=False), **plain(found)}
    write_atomically(out / "worth.json", (json.dumps(report, indent=2) + "\n").encode())
