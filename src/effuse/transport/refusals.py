"""Checks of a recipe before anything is computed, so that it fails in the first second and not after an hour."""

import dataclasses
import os
from collections.abc import Iterator

import torch

from effuse.core.aggregate import Reducer
from effuse.core.algorithm import FEDERATE, Algorithm
from effuse.core.capabilities import Draws, Personal
from effuse.core.data import Dataset, Shard
from effuse.core.errors import RecipeError
from effuse.core.federation import Federation, cohort_size
from effuse.core.metric import Outlook
from effuse.core.model import Arch, Model, Net
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.spec import Spec
from effuse.core.task import Batch, Task
from effuse.tasks.classify import Classify
from effuse.transport.rehearsal import Rehearsal


def refuse(recipe: Recipe, train: Dataset, test: Dataset) -> None:
    """Raise what training or evaluating a resolved recipe would raise later."""
    refuse_model(recipe, train)
    recipe.algorithm.ready(recipe.clients)
    if isinstance(recipe.algorithm, Personal) and recipe.ema is not None:
        raise RecipeError(
            f"ema: {recipe.algorithm.name} has a model per client; average those by algorithm.local.ema instead"
        )
    try_step(recipe.model, recipe.task, "model")
    for trained in recipe.algorithm.trains(recipe):
        if trained[:2] != (recipe.model, recipe.task):
            try_step(trained.arch, trained.task, "algorithm")
    refuse_cohort(recipe, train)
    refuse_evaluation(recipe, train, test)


class WithoutPool(Rehearsal):
    """A rehearsal of sites whose data cannot be put in one place."""

    pool = Federation.pool


def refuse_apart(recipe: Recipe, train: Dataset) -> None:
    """Raise now what the algorithm's setup would raise over a network, after all sites have connected."""
    WithoutPool(recipe, [Shard.whole(train)] * recipe.clients).prepare(hollow_model(recipe))


def refuse_quorum(recipe: Recipe, quorum: int) -> None:
    """A quorum with which so many clients may be silent that the replies are too few for the reducer."""
    cohort = cohort_size(getattr(recipe.algorithm, "cohort", None), recipe.clients)
    least = max(1, cohort - (recipe.clients - quorum))
    for by in reducers_in(recipe.algorithm):
        if (reason := by.lacks(least)) is not None:
            raise RecipeError(f"--quorum {quorum}: a round may end with {least} replies, and {reason}; raise the quorum")


def reducers_in(algorithm: Algorithm) -> list[Reducer]:
    """The reducers among an algorithm's keys."""
    values = (getattr(algorithm, f.name) for f in dataclasses.fields(algorithm))
    return [value for value in values if isinstance(value, Reducer)]


def refuse_cohort(recipe: Recipe, train: Dataset) -> None:
    """Refuse a reducer that holds a whole cohort's replies if they exceed the memory; a rehearsal counts their bytes."""
    reducer = next((by for by in reducers_in(recipe.algorithm) if by.holds), None)
    if reducer is None:
        return
    fed = Rehearsal(recipe, [Shard.whole(train)] * recipe.clients)
    next(phase for phase in fed.play(hollow_model(recipe)) if phase == FEDERATE)
    if fed.held > (memory := machine_memory()):
        raise RecipeError(
            f"algorithm.aggregate: {reducer} holds the replies of a whole cohort, {fed.held:,} bytes, and this machine has "
            f"{memory:,} bytes of memory; lower algorithm.cohort, or use mean() or clipped(...)"
        )


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_model(recipe: Recipe, train: Dataset) -> None:
    """Refuse a network for other images than the data's; it may have more classes than the data."""
    for arch in recipe.networks:
        model, data = arch.shape, train.shape
        wrong = [key for key in ("side", "channels") if getattr(model, key) != getattr(data, key)]
        wrong += ["classes"] if model.classes < data.classes else []
        for key in wrong:
            value, found, name = getattr(model, key), getattr(data, key), "model" if arch == recipe.model else arch.name
            raise RecipeError(f"{name}.{key}: {value}, but the data has {found}; leave it out or transform the data")


def refuse_evaluation(recipe: Recipe, train: Dataset, test: Dataset) -> None:
    """Refuse a sampler or metrics that do not fit the task, the model or the data."""
    conditional = recipe.model.conditional
    for sampler in samplers_in(recipe.sampler):
        sampler.ready(recipe.task, conditional)
    drawn = recipe.algorithm.drawn_from(recipe) if isinstance(recipe.algorithm, Draws) else [(recipe.model, recipe.task)]
    for sampler in samplers_in(recipe.algorithm):  # an algorithm may draw images too
        for arch, task in drawn:
            sampler.ready(task, arch.conditional)
    kept = recipe.sampler is None and isinstance(recipe.algorithm, Draws)  # metrics of samples measure the server's images
    outlook = Outlook(
        classifies=isinstance(recipe.task, Classify),
        conditional=all(arch.conditional for arch, _ in drawn) if kept else conditional,
        classes=recipe.model.shape.classes,
        real={"train": len(train), "test": len(test)},
        metrics=recipe.evaluate.metrics,
        featured=gives_features(recipe.model.portable),
    )
    stored: dict[str, object] = {}
    for metric in recipe.evaluate.metrics:
        if metric.samples and recipe.sampler is None and not kept:
            raise RecipeError(f"evaluate.metrics: {metric} looks at samples, but there is no sampler; set sampler=ddim()")
        if not metric.samples and not metric.predicts and isinstance(recipe.algorithm, Personal):
            raise RecipeError(
                f"evaluate.metrics: {metric} looks at a model, but those of {recipe.algorithm.name} stay with its clients; "
                "use a metric of samples, such as fid(), or of class scores, such as accuracy()"
            )
        if metric.real and not all(outlook.real.values()):
            raise RecipeError(
                f"evaluate.metrics: {metric.name} needs real images, and there are none here; leave metrics out: "
                "--set 'evaluate=evaluate(grid=20)'"
            )
        metric.ready(outlook)
        for key in metric.keys:
            if key in stored:
                raise RecipeError(
                    f"evaluate.metrics: {stored[key]} and {metric} would both be stored as '{key}'; keep one of them, "
                    "and measure the other with `effuse evaluate`"
                )
            stored[key] = metric


def gives_features(arch: Arch) -> bool:
    """Whether a network gives features of an image alone; a U-Net also needs a time step."""
    return arch.featured and not arch.parts


def samplers_in(value: object) -> Iterator[Sampler]:
    """Every sampler that a spec is or holds."""
    if isinstance(value, Sampler):
        yield value
    elif isinstance(value, Spec):
        for field in dataclasses.fields(value):
            yield from samplers_in(getattr(value, field.name))


def hollow_model(recipe: Recipe) -> Model:
    """The initial model, on shapes."""
    with torch.device("meta"):
        return recipe.model.initial(Stream(("rehearsal",)))


def try_step(arch: Arch, task: Task, where: str) -> None:
    """Do one forward pass on shapes, and refuse a task that does not fit its network."""
    if task.conditions and not arch.staged:
        raise RecipeError(
            f"task.augment: {where} {arch.name} takes no condition, so transformed images would leak into samples; "
            "set task.augment=0, or use a unet(...)"
        )
    shape = arch.shape
    image = torch.Size((shape.channels, shape.side, shape.side))
    labels = torch.zeros(2, dtype=torch.int64)
    drawn = task.draw(2, image, labels, torch.Generator().manual_seed(0))
    with torch.device("meta"):
        net = arch.build()
    x = torch.empty((2, *image), device="meta")
    batch = Batch(x, labels.to("meta"), task, {k: v.to("meta") for k, v in drawn.items()})
    try:
        task.loss(Net(net), batch)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        why = str(error).splitlines()[0]
        raise RecipeError(f"task {task} does not fit {where} {arch.name} ({why}); change one of them") from None
