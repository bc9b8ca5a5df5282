"""A recipe: every free choice of a run, and nothing that follows from another choice."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from effuse.core.algorithm import FEDERATE, Algorithm, Server
from effuse.core.build import build_text, make, replace, reset_keys, with_values
from effuse.core.capabilities import StopsEarly
from effuse.core.data import Dataset, Partition, Shape, Shard, Source
from effuse.core.errors import PartitionError, RecipeError, RunError, misspelt, nearest
from effuse.core.grammar import clip
from effuse.core.metric import Metric
from effuse.core.model import Arch
from effuse.core.privacy import Budget
from effuse.core.rng import stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import Decay
from effuse.core.spec import Spec, field_hints, spec, text
from effuse.core.task import Task
from effuse.core.workbench import SERVER

MOST_ROUNDS = 100_000  # a rehearsal plays each of them, at a site too


@spec
class Evaluate(Spec):
    """When a model is evaluated, and by what."""

    every: NonNegativeInt = 0  # rounds between evaluations; 0: after the last round only
    grid: NonNegativeInt = 100  # images in the sample grid
    metrics: tuple[Metric, ...] = ()
    personal: Literal["each", "pooled"] = "each"  # clients' models: each one and their pooled samples, or the pool only

    @property
    def samples(self) -> int:
        """The number of samples that the grid and every metric need."""
        return max([self.grid, *(metric.samples for metric in self.metrics)])


@spec
class Recipe(Spec):
    """One run, from data to metrics."""

    data: Source
    clients: PositiveInt
    partition: Partition
    model: Arch
    task: Task
    algorithm: Algorithm
    rounds: Annotated[int, Field(gt=0, le=MOST_ROUNDS)]
    evaluate: Evaluate = Evaluate()
    sampler: Sampler | None = None
    ema: Decay | None = None  # moving average of the delivered model over rounds; i of n weighs ~ ema^(n - i)
    wire: Literal["fp32", "bf16"] = "fp32"
    budget: Budget | None = None  # what everything that a client releases in this run may cost it; None: nothing is private
    canaries: NonNegativeInt = 0  # training images that a coin puts into a shard or leaves out, for `effuse audit`
    seed: NonNegativeInt = 0
    threads: Annotated[int, Field(ge=1, le=1024)] = 2  # of a CPU; never the core count: thread count changes float sums
    speed: Literal["auto", "eager", "graph", "compile"] = "auto"  # eager is the reference: one client at a time
    reproducible: bool = False  # repeats to the bit: sites mix no secret into random streams, GPU kernels are not tuned

    def changed(self, settings: list[str]) -> "Recipe":
        """This recipe with `KEY=VALUE` settings applied in order. Adjacent settings of one spec are applied together."""
        recipe: Any = self
        for parent, siblings in itertools.groupby(map(_setting, settings), lambda setting: setting[0]):
            recipe = replace(recipe, list(parent), {key: value for _, key, value in siblings})
        return recipe

    def forgotten(self, settings: list[str]) -> list[str]:
        """Sentences on keys that settings reset to their defaults unnamed: setting a spec sets all of its keys."""
        changed, sentences = self.changed(settings), []
        paths = dict.fromkeys((*parent, key) for parent, key, _ in map(_setting, settings))
        for path in paths:
            before, after = _at(self, path), _at(changed, path)
            within = any(path[:n] in paths for n in range(1, len(path)))  # reported with the spec that it is a part of
            if isinstance(before, Spec) and isinstance(after, Spec) and not within and (lost := reset_keys(before, after)):
                sentences.append(f"{'.'.join(path)} was set as a whole, so these are at their defaults: {', '.join(lost)}")
        return sentences

    def resolved(self, train: Dataset) -> "Recipe":
        """This recipe with what depends on the data filled in."""
        return self.shaped(train.shape)

    def shaped(self, shape: Shape) -> "Recipe":
        """This recipe with all its networks made for data of that shape."""
        return self._with_networks(lambda arch: arch.resolved(shape))

    @property
    def portable(self) -> "Recipe":
        """This recipe with the architectures of networks that lie in folders of this machine, as sites are sent it."""
        return self._with_networks(lambda arch: arch.portable)

    def require_portable(self) -> None:
        """Refuse networks that would be read from a path."""

        def refused(arch: Arch) -> Arch:
            if not arch.travels:
                raise RecipeError(
                    f"{clip(text(arch, full=False))} would read a path of this machine; only its owner may name one"
                )
            return arch

        self._with_networks(refused)

    def _with_networks(self, change: Callable[[Arch], Arch]) -> "Recipe":
        """This recipe with its networks, and those among the algorithm's keys, changed."""
        model, algorithm = _changed(self.model, change), _changed(self.algorithm, change)
        return with_values(self, "recipe", model=model, algorithm=algorithm)

    def over(self, server: Server, federated: int) -> bool:
        """Whether a run has ended with this server state after that many federated rounds."""
        enough = server.phase == FEDERATE and federated >= self.rounds
        return enough or (isinstance(self.algorithm, StopsEarly) and self.algorithm.done(server))

    @property
    def networks(self) -> list[Arch]:
        """The run's model, and the other networks that the algorithm trains."""
        return list(dict.fromkeys([self.model, *(trained.arch for trained in self.algorithm.trains(self))]))

    def shards(self, train: Dataset) -> list[Shard]:
        """The training data divided among the clients, without the canaries that are out."""
        dealt = self._dealt(train)
        if self.canaries:
            rows, coins = self._canaries(dealt)
            dealt = [own[~torch.isin(own, rows[~coins])] for own in dealt]
        train = self.protected(train)
        return [Shard(train, rows) for rows in dealt]

    def canaries_in(self, train: Dataset) -> tuple[Tensor, Tensor]:
        """The rows of the canaries, ascending, and for each whether it is in its client's shard."""
        return self._canaries(self._dealt(train))

    def _dealt(self, train: Dataset) -> list[Tensor]:
        seed = stream(self.seed, -1, "partition", 0, SERVER, "").seed % 2**32  # the legacy generator takes 32 bits
        rows = self.partition.split(train, self.clients, seed)
        return [torch.as_tensor(r, dtype=torch.int64) for r in rows]

    def _canaries(self, dealt: list[Tensor]) -> tuple[Tensor, Tensor]:
        # the first image of every client is none: no shard becomes empty, and the coins stay independent
        choice = torch.cat([rows[1:] for rows in dealt]).sort().values
        if self.canaries > len(choice):
            raise PartitionError(
                f"canaries: {self.canaries}, but each client keeps one image, so {len(choice)} can be set aside; use fewer"
            )
        rng = stream(self.seed, -1, "canaries", 0, SERVER, "").numpy()
        rows = choice[torch.from_numpy(rng.permutation(len(choice))[: self.canaries]).sort().values]
        return rows, torch.from_numpy(rng.random(self.canaries) < 0.5)

    def protected(self, data: Dataset) -> Dataset:
        """The same images, marked as private where the recipe has a budget."""
        return data if self.budget is None else dataclasses.replace(data, private=True)

    def saved(self) -> dict[str, Any]:
        """The recipe as JSON, every value in the grammar, every key spelt out."""
        return {f.name: text(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> "Recipe":
        """The recipe from what `saved` returned."""
        hints = field_hints(cls)
        for key, value in saved.items():
            if key not in hints:
                raise RecipeError(f"manifest: no key '{key}'; {nearest(key, hints)}")
            if not isinstance(value, str):
                raise RecipeError(f"manifest: '{key}' must be text in the grammar, not {type(value).__name__}")
        return make(cls, {k: build_text(v, hints[k], k) for k, v in saved.items()}, "manifest")


def manifest_digest(recipe: Mapping[str, str], classes: Sequence[str]) -> str:
    """The hash of a manifest: of its recipe as saved, and of what the labels mean."""
    blob = json.dumps([recipe, classes], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(blob.encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """A run's manifest, from its folder or its file."""
    file = path / "manifest.json" if path.is_dir() else path
    try:
        manifest = json.loads(file.read_bytes())
    except OSError as error:
        if path.is_dir() and not file.exists():
            raise RunError(f"{path} is not a run folder: it has no manifest.json") from None
        if not path.exists():
            remedy = misspelt(path) or "give a run folder or the manifest.json in it"
            raise RunError(f"{path}: there is no such run folder or manifest; {remedy}") from None
        raise RunError(f"{file}: {error.strerror}; give a run folder or the manifest.json in it") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is not a manifest: {error}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("recipe"), dict):
        raise RecipeError(f"{file} is not a manifest: it has no recipe")
    return manifest


def _changed(value: Any, change: Callable[[Arch], Arch]) -> Any:
    """The same value with every network in it changed, those within others first."""
    if isinstance(value, tuple):
        return tuple(_changed(item, change) for item in value)
    if isinstance(value, Spec):
        keys = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        new_keys = {k: new for k, v in keys.items() if (new := _changed(v, change)) != v}
        value = with_values(value, value.name, **new_keys) if new_keys else value
        return change(value) if isinstance(value, Arch) else value
    return value


def _at(value: Any, path: tuple[str, ...]) -> Any:
    """The value at a dotted path; None where there is no such key."""
    for key in path:
        value = getattr(value, key, None)
    return value


def _setting(setting: str) -> tuple[tuple[str, ...], str, str]:
    """Path, key and value of a `KEY=VALUE`."""
    key, equals, value = setting.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {setting}: expected KEY=VALUE, such as rounds=2 or partition='label_skew(beta=0.1)'")
    *parent, last = key.strip().split(".")
    return tuple(parent), last, value
