"""A recipe: every free choice of a run, and nothing that follows from another choice."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from effuse.core.algorithm import Algorithm
from effuse.core.build import build_text, fallen_back, make, replace, with_values
from effuse.core.data import Dataset, Partition, Shard, Source
from effuse.core.errors import RecipeError, RunError, misspelt, nearest
from effuse.core.metric import Metric
from effuse.core.model import Arch
from effuse.core.rng import stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import Decay
from effuse.core.spec import Spec, field_hints, spec, text
from effuse.core.task import Task
from effuse.core.workbench import SERVER


@spec
class Evaluate(Spec):
    """When a model is looked at, and how."""

    every: NonNegativeInt = 0  # rounds between evaluations; 0: after the last round only
    grid: NonNegativeInt = 100  # images in the sample grid
    metrics: tuple[Metric, ...] = ()
    # models that clients own: each by itself and then all pooled, or the pool alone, for which a client draws no more than its share
    personal: Literal["each", "pooled"] = "each"


@spec
class Recipe(Spec):
    """One run, from data to metrics."""

    data: Source
    clients: PositiveInt
    partition: Partition
    model: Arch
    task: Task
    algorithm: Algorithm
    rounds: PositiveInt
    evaluate: Evaluate = Evaluate()
    sampler: Sampler | None = None
    ema: Decay | None = None  # moving average of the delivered model over rounds; i of n weighs ~ ema^(n - i)
    wire: Literal["fp32", "bf16"] = "fp32"
    seed: NonNegativeInt = 0
    threads: Annotated[int, Field(ge=1, le=1024)] = 2  # of a CPU; never the core count: thread count changes float sums
    speed: Literal["auto", "eager", "graph", "compile"] = (
        "auto"  # eager is the reference: a client at a time, on all threads
    )
    # repeats to the bit: a deployed site mixes no secret of its own into its randomness, a GPU's algorithms are not chosen by trial
    reproducible: bool = False

    def changed(self, settings: list[str]) -> "Recipe":
        """This recipe with `KEY=VALUE` settings applied, in order; neighbours of one parent at once."""
        recipe: Any = self
        for parent, siblings in itertools.groupby(map(_setting, settings), lambda setting: setting[0]):
            recipe = replace(recipe, list(parent), {key: value for _, key, value in siblings})
        return recipe

    def forgotten(self, settings: list[str]) -> list[str]:
        """What settings put back to its default without naming it: who sets a spec sets all of its keys."""
        changed, told = self.changed(settings), []
        paths = dict.fromkeys((*parent, key) for parent, key, _ in map(_setting, settings))
        for path in paths:
            before, after = (
                functools.reduce(lambda value, key: getattr(value, key, None), path, r) for r in (self, changed)
            )
            within = any(path[:n] in paths for n in range(1, len(path)))  # told with what it is a part of
            if isinstance(before, Spec) and isinstance(after, Spec) and not within and (lost := fallen_back(before, after)):
                told.append(f"{'.'.join(path)} was set as a whole, so these are at their defaults: {', '.join(lost)}")
        return told

    def resolved(self, train: Dataset) -> "Recipe":
        """This recipe with what depends on the data filled in."""
        return with_values(self, "recipe", model=self.model.resolved(train.shape))

    def shards(self, train: Dataset) -> list[Shard]:
        """The data dealt out to the clients."""
        seed = stream(self.seed, -1, "partition", 0, SERVER, "").seed % 2**32  # the legacy generator takes 32 bits
        rows = self.partition.split(train, self.clients, seed)
        return [Shard(train, torch.as_tensor(r, dtype=torch.int64)) for r in rows]

    def saved(self) -> dict[str, Any]:
        """The recipe as JSON, every value in the grammar, every key spelt out."""
        return {f.name: text(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def restore(cls, saved: dict[str, Any]) -> "Recipe":
        """The recipe that `saved` gave."""
        hints = field_hints(cls)
        for key, value in saved.items():
            if key not in hints:
                raise RecipeError(f"manifest: no key '{key}'; {nearest(key, hints)}")
            if not isinstance(value, str):
                raise RecipeError(f"manifest: '{key}' must be text in the grammar, not {type(value).__name__}")
        return make(cls, {k: build_text(v, hints[k], k) for k, v in saved.items()}, "manifest")


def read_manifest(path: Path) -> dict[str, Any]:
    """A run's manifest, from its folder or its file."""
    file = path / "manifest.json" if path.is_dir() else path
    try:
        manifest = json.loads(file.read_text())
    except OSError as error:
        if path.is_dir() and not file.exists():
            raise RunError(f"{path} is not a run folder: it has no manifest.json") from None
        if not path.exists():
            remedy = misspelt(path) or "give a run folder or the manifest.json in it"
            raise RunError(f"{path}: there is no such run folder or manifest; {remedy}") from None
        raise RunError(f"{file}: {error.strerror}; give a run folder or the manifest.json in it") from None
    except ValueError as error:
        raise RunError(f"{file} is not a manifest: {error}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("recipe"), dict):
        raise RecipeError(f"{file} is not a manifest: it has no recipe")
    return manifest


def _setting(setting: str) -> tuple[tuple[str, ...], str, str]:
    """Path, key and value of a `KEY=VALUE`."""
    key, equals, value = setting.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {setting}: expected KEY=VALUE, such as rounds=2 or partition='label_skew(beta=0.1)'")
    *parent, last = key.strip().split(".")
    return tuple(parent), last, value
