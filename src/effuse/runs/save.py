"""Save the model of a run, and open it again."""

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from effuse.core.build import build_text
from effuse.core.capabilities import Personal
from effuse.core.errors import RecipeError, RunError, nearest
from effuse.core.files import writing
from effuse.core.machine import Meter
from effuse.core.metric import Images
from effuse.core.model import Model, Net, fill
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.workbench import Workbench
from effuse.diffusion.heun import Heun
from effuse.diffusion.samplers import Ancestral
from effuse.fast import machine_for
from effuse.machines.eager import Eager, batch_seeds
from effuse.models.saved import load_model
from effuse.runs.folder import RunFolder
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import Edm
from effuse.transport.state import Snapshots, bound_to


def save_model(model: Model, recipe: Recipe, folder: Path) -> None:
    """Write a model as diffusers can open it, replacing what an interrupted run left there."""
    net = model.arch.build()
    fill(Net(net, arch=model.arch), model.to("cpu"))
    # a denoiser trained without a sampler is saved with the scheduler of the usual one
    usual = {Denoise: Ancestral(), Edm: Heun()}
    sampler = recipe.sampler or usual.get(type(recipe.task))
    scheduler = None if sampler is None else sampler.scheduler(recipe.task)
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        model.arch.save(net, folder, scheduler)


def weights_digest(model: Model, personal: list[str]) -> str:
    """SHA-256 of the server's parameters; with personal models, of these and the clients' digests."""
    own = model.params.digest()
    return own if not personal else hashlib.sha256(" ".join([own, *personal]).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model that can draw images."""

    model: Model
    recipe: Recipe
    run: Path
    device: torch.device = torch.device("cpu")
    meter: Meter = dataclasses.field(default_factory=Meter)
    classes: tuple[str, ...] = ()  # names of the labels
    rounds: int | None = None  # that the model was trained for, if the run is not finished

    @property
    def unfinished(self) -> str | None:
        """A sentence on a model of an unfinished run."""
        if self.rounds is None:
            return None
        return f"{self.run} is not finished: this is its model after round {self.rounds} of {self.recipe.rounds}"

    def sample(
        self,
        n: int,
        *,
        seed: int = 0,
        labels: Sequence[int | str] | None = None,
        sampler: Sampler | str | None = None,
        batch: int | None = None,
    ) -> Images:
        """Draw `n` images, of these classes by number or name; the same seed gives the same images."""
        sampler = self._sampler(sampler, batch)
        torch.set_num_threads(self.recipe.threads)
        self.machine.meter = self.meter
        bench = Workbench(self.machine, self.recipe.task, self.recipe.rounds)
        wanted = None if labels is None else self._labels([self.label(label) for label in labels], n)
        return bench.generate(self.model.to(self.device), n, sampler, wanted, stream=sampling_stream(seed))

    @functools.cached_property
    def machine(self) -> Eager:
        """The machine that draws: on a GPU bf16 with recorded graphs, as in a run, unless the recipe has `speed=eager`."""
        return machine_for(self.recipe, self.device)

    def label(self, given: int | str) -> int:
        """The number of a class that is given by its name or its number."""
        if str(given) in self.classes and not isinstance(given, int):
            return self.classes.index(str(given))
        try:
            return int(given)
        except ValueError:
            remedy = nearest(str(given), self.classes) if self.classes else "give its number"
            raise RecipeError(f"labels: {self.run} has no class {str(given)!r}; {remedy}") from None

    def _labels(self, labels: list[int], n: int) -> torch.Tensor:
        if not self.model.arch.conditional:
            raise RecipeError(f"labels: the model of {self.run} takes none; leave them out")
        top = self.model.arch.shape.classes - 1
        wrong = next((label for label in labels if not 0 <= label <= top), None)
        if wrong is not None:
            raise RecipeError(f"labels: there is no class {wrong}; the model of {self.run} has 0 to {top}")
        if len(labels) != n:
            raise RecipeError(f"labels: {len(labels)} for {n} images; give each image one")
        return torch.tensor(labels)

    def seeds(
        self, n: int, *, seed: int = 0, sampler: Sampler | str | None = None, batch: int | None = None
    ) -> list[dict[str, int]]:
        """The torch seed of every batch; with these plain diffusers draws the same images."""
        drawn = batch_seeds(sampling_stream(seed), n, self._sampler(sampler, batch).batch)
        return [{"torch_seed": s, "first": first, "size": size} for s, first, size in drawn]

    def _sampler(self, sampler: Sampler | str | None, batch: int | None) -> Sampler:
        given = build_text(sampler, Sampler, "sampler") if isinstance(sampler, str) else sampler
        chosen: Sampler | None = given or self.recipe.sampler
        if chosen is None:
            raise RecipeError(f"{self.run}: its recipe has no sampler, so the model cannot draw images; give one")
        return chosen if batch is None else dataclasses.replace(chosen, batch=batch)


def sampling_stream(seed: int) -> Stream:
    return Stream((seed, "sample"))


def load(run: Path | str, *, ema: bool = False, client: int | None = None, device: str = "cpu") -> Loaded:
    """Open a run's model: the global one, its moving average, or one client's own."""
    run = Path(run)
    manifest = read_manifest(run)
    recipe = Recipe.restore(manifest["recipe"])
    if ema and isinstance(recipe.algorithm, Personal):
        raise RunError(f"{run}: the clients' own models have no moving average; leave --ema out")
    model, rounds = _delivered(run, ema) if RunFolder(run).result.exists() else _so_far(run, recipe, ema)
    if model is None:
        raise RunError(f"{run} has no moving average; run it with --set ema=0.99")
    if client is not None:
        model = _personal(run, recipe, client, model)
    return Loaded(model, recipe, run, torch.device(device), classes=tuple(manifest.get("classes") or ()), rounds=rounds)


def _delivered(run: Path, ema: bool) -> tuple[Model | None, int | None]:
    """The model of a finished run."""
    folder = run / ("model-ema" if ema else "model")
    return (None if ema and not folder.is_dir() else load_model(folder)[0]), None


def _so_far(run: Path, recipe: Recipe, ema: bool) -> tuple[Model | None, int | None]:
    """The model of an unfinished run's last checkpoint, and the number of rounds that it was trained for."""
    saved = RunFolder(run).load_checkpoint()
    if saved is None:
        raise RunError(f"{run} has no checkpoint yet, and so no model; wait for its first round, or `effuse resume {run}`")
    model = saved.ema if ema else recipe.algorithm.deliver(saved.server)
    return (None if model is None else model.to("cpu")), saved.federated


def _personal(run: Path, recipe: Recipe, client: int, model: Model) -> Model:
    if not isinstance(recipe.algorithm, Personal):
        raise RunError(f"{run}: {recipe.algorithm.name} has one global model and none per client; leave --client out")
    checkpoint = RunFolder(run).load_checkpoint()
    name = None if checkpoint is None else checkpoint.snapshots.get(client)
    if name is None:
        exists = 0 <= client < recipe.clients
        why = f"client {client} never took part" if exists else f"its clients are 0 to {recipe.clients - 1}"
        raise RunError(f"{run} has no model of client {client}; {why}")
    bench: Any = Workbench(Eager(torch.device("cpu")), recipe.task, recipe.rounds, client)
    bench.state = Snapshots(run / "clients" / str(client), run=bound_to(run)).read(name)
    return recipe.algorithm.own(bench, model)


def require_finished(run: Path) -> None:
    """Refuse a run that has not come to its end."""
    read_manifest(run)
    if not RunFolder(run).result.exists():
        raise RunError(f"{run} is not finished; finish it with `effuse resume {run}`")
