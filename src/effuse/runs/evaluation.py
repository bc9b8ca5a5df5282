"""Looking at a model: samples, a grid of them, and metrics with their protocols."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from effuse.core.algorithm import Server
from effuse.core.capabilities import Personal
from effuse.core.data import Dataset
from effuse.core.errors import RecipeError, RunError
from effuse.core.federation import EVALUATION_T, Federation
from effuse.core.files import cache_folder, write_atomically
from effuse.core.machine import Machine
from effuse.core.metric import Images, Measurement, Metric, Subject
from effuse.core.model import Model, Net
from effuse.core.recipe import Recipe
from effuse.core.rng import SETTINGS, Stream, stream
from effuse.core.spec import text
from effuse.core.workbench import SERVER, Workbench
from effuse.fast import machine_for
from effuse.runs.folder import RunFolder
from effuse.runs.grid import save_grid
from effuse.runs.records import plain
from effuse.runs.save import load
from effuse.transport.device import pick_device
from effuse.transport.refusals import refuse_evaluation, refuse_model
from effuse.transport.simulator import Simulator, on_disk


class Evaluator:
    """Evaluates models of one run; its randomness is keyed by purpose, so its cadence changes nothing."""

    def __init__(self, recipe: Recipe, train: Dataset, test: Dataset, bench: Workbench, cache: Path | None) -> None:
        self.recipe = recipe
        self.train, self.test = train, test
        self.bench = bench
        self.cache = cache
        self.memo: dict[str, Any] = {}

    def samples(self, model: Model) -> Images | None:
        """The evaluation's own samples of a model: the same noise whatever the round."""
        n = wanted_samples(self.recipe)
        if self.recipe.sampler is None or not n:
            return None
        return self.bench.generate(model, n, self.recipe.sampler, stream=evaluation_stream(self.recipe.seed))

    def measure(
        self, images: Images | None, model: Model | None, metrics: tuple[Metric, ...] | None = None
    ) -> dict[str, Measurement]:
        """Every metric of the recipe, or others."""
        subject = Subject(
            train=self.train,
            test=self.test,
            data=text(self.recipe.data, full=False),
            device=self.bench.machine.device,
            samples=_taker(images),
            predict=None if model is None else self._predictor(model),
            cache=self.cache,
            memo=self.memo,
        )
        found: dict[str, Measurement] = {}
        with SETTINGS:  # another client's sampler may just be recorded, under settings that refuse what metrics do
            for metric in self.recipe.evaluate.metrics if metrics is None else metrics:
                found.update(metric.measure(subject))
        return found

    def _predictor(self, model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
        net = self.bench.load(model).eval()

        def predict(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return Net(net)(x.to(self.bench.machine.device)).cpu()

        return predict

    def evaluate_model(self, model: Model, picture: Path) -> dict[str, Measurement]:
        """Metrics of one model, its grid saved as a picture."""
        images = self.samples(model)
        if images is not None and self.recipe.evaluate.grid:
            save_grid(images.first(self.recipe.evaluate.grid), picture)
        return self.measure(images, model)

    def evaluate_images(self, images: Images) -> dict[str, Measurement]:
        """The recipe's metrics of samples, of a random choice of images that are there already, as far as they go."""
        order = torch.from_numpy(Stream(("images",)).numpy().permutation(len(images)))
        return self.measure(images.rows(order), None, self._as_far_as(images))

    def _as_far_as(self, images: Images) -> tuple[Metric, ...]:
        """The recipe's metrics of samples, of no more than there are."""
        return tuple(replace(m, n=min(m.samples, len(images))) for m in self.recipe.evaluate.metrics if m.samples)

    def evaluate_clients(
        self, fed: Federation, server: Server, model: Model, pictures: Path, average: bool = False
    ) -> tuple[dict[str, Measurement], list[str]]:
        """Metrics of every personal model (mean and spread), of equal shares pooled, and the models' digests."""
        algorithm = fed.algorithm
        assert isinstance(algorithm, Personal)
        owners = algorithm.owners(server, fed)
        share, n = shares_of(self.recipe, len(owners))
        grid, alone = self.recipe.evaluate.grid, self.recipe.evaluate.personal == "each"
        digests: list[str] = []
        each: list[dict[str, Measurement]] = []
        shares: list[Images] = []
        with fed.evaluating():
            asked = {"model": model, "n": n, "sampler": self.recipe.sampler, "average": average}
            for client, drawn in fed.ask(algorithm.draw, owners, **asked):
                digests.append(drawn.digest)
                if drawn.images is not None:
                    each += [self.measure(drawn.images, None)] if alone else []
                    # each client gives other rows, since labels run in turn: the first rows of all would be of a few classes
                    shares.append(drawn.images.rows((torch.arange(share) + len(shares) * share) % n))
                    if grid:
                        save_grid(drawn.images.first(grid), pictures.with_stem(f"{pictures.stem}-client-{client}"))
        if not shares:
            return {}, digests
        found: dict[str, Measurement] = {}
        for name in each[0] if each else ():
            values = [m[name].value for m in each]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            found[name] = replace(each[0][name], value=statistics.fmean(values), std=spread, clients=values)
        pool = in_turn(shares)  # fewer than wanted where a client was silent
        for name, m in self.measure(pool, None, self._as_far_as(pool)).items():
            found[f"{name}_pooled"] = replace(m, protocol=m.protocol | {"clients": len(shares)})
        return found, digests


def in_turn(shares: list[Images]) -> Images:
    """Equal shares, one image of each client in turn: however many of them a metric takes first, it takes of all alike."""
    labels = [s.labels for s in shares if s.labels is not None]
    pixels = torch.stack([s.pixels for s in shares], dim=1).flatten(0, 1)
    return Images(pixels, torch.stack(labels, dim=1).flatten() if labels else None)


def wanted_samples(recipe: Recipe) -> int:
    """Samples that the grid and the hungriest metric need."""
    return max([recipe.evaluate.grid, *(m.samples for m in recipe.evaluate.metrics)])


def shares_of(recipe: Recipe, clients: int) -> tuple[int, int]:
    """Of each client that owns its model: the images that go into the pool, and those that it draws."""
    wanted, arch = wanted_samples(recipe), recipe.model
    share = -(-wanted // max(1, clients))  # nobody, as long as no answer has come
    if recipe.evaluate.personal == "each":
        return share, wanted
    classes = arch.shape.classes if arch.conditional else 1  # in whole turns, so that the shares together are of all alike
    return share, min(wanted, -(-max(share, recipe.evaluate.grid) // classes) * classes)


def evaluation_stream(seed: int) -> Any:
    return stream(seed, EVALUATION_T, "evaluate", 0, SERVER, "samples")


def _taker(images: Images | None) -> Callable[[int], Images]:
    def take(n: int) -> Images:
        if images is None or len(images) < n:
            raise ValueError(f"a metric asks for {n} samples, {0 if images is None else len(images)} were drawn")
        return images.first(n)

    return take


def _clients(run: Path, recipe: Recipe, train: Dataset, machine: Machine) -> tuple[Federation, Server]:
    """A finished run's clients with the states that they ended with, and the server's."""
    ended = RunFolder(run).load_checkpoint()
    if ended is None:
        raise RunError(f"{run} has no checkpoint, so its clients' models are lost; run it again")
    fed = Simulator(recipe, recipe.shards(train), machine, snapshots=on_disk(run))
    fed.restore(ended.snapshots, ended.received)
    return fed, ended.server


def evaluate_run(run: Path, settings: list[str], *, ema: bool = False, device: str = "auto") -> dict[str, Measurement]:
    """Measure a finished run's saved model, by its recipe's metrics or by others."""
    opened = load(run, ema=ema, device=pick_device(device).type)
    recipe = opened.recipe.changed(settings)
    train, test = recipe.data.load("train").to(opened.device), recipe.data.load("test")
    refuse_model(recipe, train)
    refuse_evaluation(recipe, train, test)
    if not recipe.evaluate.metrics:
        raise RecipeError(
            "the recipe has no metrics: say what to measure, such as --metrics '[fid(n=1000, encoder=classifier())]'"
        )
    torch.set_num_threads(recipe.threads)
    machine, model = machine_for(recipe, opened.device), opened.model.to(opened.device)
    evaluator = Evaluator(recipe, train, test, Workbench(machine, recipe.task, recipe.rounds), cache_folder())
    picture = run / "samples" / f"evaluation{'-ema' if ema else ''}.png"
    if isinstance(recipe.algorithm, Personal):
        found, _ = evaluator.evaluate_clients(*_clients(run, recipe, train, machine), model, picture)
    else:
        found = evaluator.evaluate_model(model, picture)
    blob = json.dumps({"settings": settings, "ema": ema, "metrics": plain(found)}, indent=2) + "\n"
    write_atomically(run / "evaluation.json", blob.encode())
    return found
