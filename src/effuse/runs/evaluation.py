"""Evaluate models: draw samples, save a grid of them, and measure metrics with their protocols."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from effuse.core.algorithm import Server
from effuse.core.capabilities import Draws, Personal
from effuse.core.data import Dataset
from effuse.core.errors import RecipeError, RunError
from effuse.core.federation import EVALUATION_T, Federation
from effuse.core.files import cache_folder, write_atomically
from effuse.core.grid import save_grid, too_young
from effuse.core.machine import Machine, Meter
from effuse.core.metric import Images, Measurement, Metric, Subject
from effuse.core.model import Model, Net
from effuse.core.recipe import Recipe
from effuse.core.rng import SETTINGS, Stream, stream
from effuse.core.spec import text
from effuse.core.workbench import SERVER, Workbench
from effuse.fast import machine_for
from effuse.runs.folder import RunFolder
from effuse.runs.records import plain
from effuse.runs.save import load
from effuse.transport.device import pick_device
from effuse.transport.refusals import gives_features, refuse_evaluation, refuse_model
from effuse.transport.simulator import Simulator, on_disk


class Evaluator:
    """Evaluates the models of one run; its random streams are its own, so how often it runs changes no result."""

    def __init__(self, recipe: Recipe, train: Dataset, test: Dataset, bench: Workbench, cache: Path | None) -> None:
        self.recipe = recipe
        self.train, self.test = train, test
        self.bench = bench
        self.cache = cache
        self.memo: dict[str, Any] = {}
        self.note: str | None = None  # on the images of the last picture

    def samples(self, model: Model) -> Images | None:
        """The samples that the metrics measure, drawn from the same noise in every round."""
        n = self.recipe.evaluate.samples
        if self.recipe.sampler is None or not n:
            return None
        return self.bench.generate(model, n, self.recipe.sampler, stream=evaluation_stream(self.recipe.seed))

    def measure(
        self,
        images: Images | None,
        model: Model | None,
        metrics: tuple[Metric, ...] | None = None,
        scores: torch.Tensor | None = None,
    ) -> dict[str, Measurement]:
        """Every metric of the recipe, or the given ones."""
        net = None if model is None else self.bench.load(model).eval()
        subject = Subject(
            train=self.train,
            test=self.test,
            data=text(self.recipe.data, full=False),
            device=self.bench.machine.device,
            samples=_taker(images),
            predict=self._reader(scores) if scores is not None else None if net is None else self._asked(net),
            features=None if net is None or not gives_features(net.arch) else self._asked(net, give="features"),
            machine=self.bench.machine,
            cache=self.cache,
            memo=self.memo,
        )
        found: dict[str, Measurement] = {}
        with SETTINGS:  # a thread that records a sampler sets global options under which metrics fail
            for metric in self.recipe.evaluate.metrics if metrics is None else metrics:
                found.update(metric.measure(subject))
        return found

    def _asked(self, net: Net, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def read(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return net(x.to(self.bench.machine.device), **options).cpu()

        return read

    def _reader(self, scores: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The scores that a client gave to the test images, read in their order, as often as a metric looks."""
        first = 0

        def predict(x: torch.Tensor) -> torch.Tensor:
            nonlocal first
            rows = slice(first, first + len(x))
            if not torch.equal(x.cpu(), self.test.floats(self.test.images[rows]).cpu()):
                raise ValueError("a metric of class scores looks at the test images in their order")
            first = rows.stop % len(scores)
            return scores[rows].cpu()

        return predict

    def evaluate(
        self, fed: Federation, server: Server, ema: Model | None, picture: Path
    ) -> tuple[dict[str, Measurement], list[str]]:
        """Metrics of the delivered model or of the clients' own, with their averages; and the digests of clients' models."""
        algorithm = fed.algorithm
        model, smooth = algorithm.deliver(server), picture.with_stem(f"{picture.stem}-ema")
        averaged: dict[str, Measurement] = {}
        if isinstance(algorithm, Personal):
            metrics, digests = self.evaluate_clients(fed, server, model, picture)
            if algorithm.averages:
                averaged, _ = self.evaluate_clients(fed, server, model, smooth, True)
        else:
            metrics, digests = self.evaluate_model(model, picture), []
            if ema is not None:
                averaged = self.evaluate_model(ema, smooth)
        return metrics | {f"{name}_ema": m for name, m in averaged.items()}, digests

    def evaluate_kept(self, server: Server) -> dict[str, Measurement]:
        """Metrics of the synthetic images that the server keeps, where it keeps any."""
        algorithm = self.recipe.algorithm
        images = algorithm.images(server) if isinstance(algorithm, Draws) else None
        return {} if images is None else {f"{name}_auxiliary": m for name, m in self.evaluate_images(images).items()}

    def evaluate_model(self, model: Model, picture: Path) -> dict[str, Measurement]:
        """The metrics of one model; saves a grid of its samples."""
        images = self.samples(model)
        if images is not None and self.recipe.evaluate.grid:
            self._picture(images, picture)
        metrics = self.recipe.evaluate.metrics
        return self.measure(images, model, tuple(m for m in metrics if self.recipe.sampler is not None or not m.samples))

    def _picture(self, images: Images, path: Path) -> None:
        some = images.first(self.recipe.evaluate.grid)
        save_grid(some, path, self.train.classes)
        self.note = too_young(some)

    def evaluate_images(self, images: Images) -> dict[str, Measurement]:
        """The recipe's metrics of existing images, in random order; metrics that want more images take all there are."""
        order = torch.from_numpy(Stream(("images",)).numpy().permutation(len(images)))
        return self.measure(images.rows(order), None, self._limited_to(images))

    def _limited_to(self, images: Images) -> tuple[Metric, ...]:
        """The recipe's metrics of samples, limited to the number of images."""
        return tuple(m.of_samples(min(m.samples, len(images))) for m in self.recipe.evaluate.metrics if m.samples)

    def evaluate_clients(
        self, fed: Federation, server: Server, model: Model, pictures: Path, average: bool = False
    ) -> tuple[dict[str, Measurement], list[str]]:
        """Metrics of every personal model (mean and spread) and of their pooled samples, and the models' digests."""
        algorithm = fed.algorithm
        assert isinstance(algorithm, Personal)
        owners = algorithm.owners(server, fed)
        share, n = shares_of(self.recipe, len(owners))
        grid, alone = self.recipe.evaluate.grid, self.recipe.evaluate.personal == "each"
        metrics = self.recipe.evaluate.metrics
        sampled, predicting = tuple(m for m in metrics if m.samples), tuple(m for m in metrics if m.predicts)
        digests: list[str] = []
        each: list[dict[str, Measurement]] = []
        classified: list[dict[str, Measurement]] = []
        shares: list[Images] = []
        with fed.evaluating():
            sampler = self.recipe.sampler
            for client, drawn in fed.ask(algorithm.draw, owners, model=model, n=n, sampler=sampler, average=average):
                digests.append(drawn.digest)
                if drawn.images is not None:
                    each += [self.measure(drawn.images, None, sampled)] if alone else []
                    # labels cycle through the classes: the first rows of every client would cover a few classes only
                    shares.append(drawn.images.rows((torch.arange(share) + len(shares) * share) % n))
                    if grid:
                        self._picture(drawn.images, pictures.with_stem(f"{pictures.stem}-client-{client}"))
            if predicting:
                about: dict[str, Any] = {"images": self.test.images, "peak": self.test.peak, "average": average}
                for _, answer in fed.ask(algorithm.classify, owners, model=model, **about):
                    classified.append(self.measure(None, None, predicting, answer.scores))
        found = over_clients(each) | over_clients(classified)
        if not shares:
            return found, digests
        pool = in_turn(shares)  # fewer than wanted if a client did not answer
        for name, m in self.measure(pool, None, self._limited_to(pool)).items():
            found[f"{name}_pooled"] = replace(m, protocol=m.protocol | {"clients": len(shares)})
        return found, digests


def over_clients(each: list[dict[str, Measurement]]) -> dict[str, Measurement]:
    """The mean and the spread of every number over clients."""
    found: dict[str, Measurement] = {}
    for name in each[0] if each else ():
        values = [m[name].value for m in each]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        found[name] = replace(each[0][name], value=statistics.fmean(values), std=spread, clients=values)
    return found


def in_turn(shares: list[Images]) -> Images:
    """Interleave equal shares, so that the first n images come from all clients equally."""
    labels = [s.labels for s in shares if s.labels is not None]
    pixels = torch.stack([s.pixels for s in shares], dim=1).flatten(0, 1)
    return Images(pixels, torch.stack(labels, dim=1).flatten() if labels else None)


def evaluation_calls(recipe: Recipe, owners: int = 0, averaged: bool = False) -> int:
    """The network evaluations of one evaluation: of the delivered model, or of the models of so many owners."""
    if recipe.sampler is None or not (n := recipe.evaluate.samples):
        return 0
    if isinstance(recipe.algorithm, Personal):
        n = owners * shares_of(recipe, owners)[1]
    return n * recipe.sampler.calls(recipe.task) * (2 if averaged else 1)


def shares_of(recipe: Recipe, clients: int) -> tuple[int, int]:
    """How many images each client adds to the pool, and how many it draws."""
    wanted, arch = recipe.evaluate.samples, recipe.model
    share = -(-wanted // max(1, clients))  # before the first answer there are no owners
    if recipe.evaluate.personal == "each":
        return share, wanted
    classes = arch.shape.classes if arch.conditional else 1  # whole cycles of labels balance the pool
    return share, min(wanted, -(-max(share, recipe.evaluate.grid) // classes) * classes)


def evaluation_stream(seed: int) -> Any:
    return stream(seed, EVALUATION_T, "evaluate", 0, SERVER, "samples")


def _taker(images: Images | None) -> Callable[[int], Images]:
    def take(n: int) -> Images:
        if images is None or len(images) < n:
            raise ValueError(f"a metric needs {n} samples, but {0 if images is None else len(images)} were drawn")
        return images.first(n)

    return take


def _clients(run: Path, recipe: Recipe, train: Dataset, machine: Machine) -> tuple[Federation, Server]:
    """The final states of a finished run: its clients in a federation, and its server."""
    ended = RunFolder(run).load_checkpoint()
    if ended is None:
        raise RunError(f"{run} has no checkpoint, so its clients' models are missing; run it again")
    fed = Simulator(recipe, recipe.shards(train), machine, snapshots=on_disk(run))
    fed.restore(ended.snapshots, ended.received)
    return fed, ended.server


def evaluate_run(
    run: Path, settings: list[str], *, ema: bool = False, device: str = "auto", meter: Meter | None = None
) -> dict[str, Measurement]:
    """Measure a run's model with its recipe's metrics, changed by `settings`; the meter counts the work."""
    opened = load(run, ema=ema, device=pick_device(device).type)
    recipe = opened.recipe.changed(settings)
    train, test = recipe.data.load("train").to(opened.device), recipe.data.load("test")
    refuse_model(recipe, train)
    refuse_evaluation(recipe, train, test)
    if not recipe.evaluate.metrics:
        raise RecipeError("the recipe has no metrics; name some, such as --metrics '[fid(n=1000, encoder=classifier())]'")
    torch.set_num_threads(recipe.threads)
    machine, model = machine_for(recipe, opened.device), opened.model.to(opened.device)
    machine.meter = meter or machine.meter
    evaluator = Evaluator(recipe, train, test, Workbench(machine, recipe.task, recipe.rounds), cache_folder())
    picture = run / "samples" / f"evaluation{'-ema' if ema else ''}.png"
    if isinstance(recipe.algorithm, Personal):
        found, _ = evaluator.evaluate_clients(*_clients(run, recipe, train, machine), model, picture)
    else:
        found = evaluator.evaluate_model(model, picture)
    blob = json.dumps({"settings": settings, "ema": ema, "metrics": plain(found)}, indent=2) + "\n"
    write_atomically(run / "evaluation.json", blob.encode())
    return found
