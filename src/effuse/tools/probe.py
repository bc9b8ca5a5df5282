"""Probe a run's frozen features: of a denoiser by stage and time step, of a classifier as its head gets them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effuse.algorithms.shared.guide_math import denoised
from effuse.core.data import Dataset, Shard
from effuse.core.errors import RecipeError
from effuse.core.files import write_atomically
from effuse.core.machine import Machine
from effuse.core.model import Net
from effuse.core.recipe import Recipe
from effuse.core.rng import Stream
from effuse.core.task import Batch, Given
from effuse.data.sources import Validation
from effuse.metrics.linear_probe import Kind, probe
from effuse.report.writer import PRIVATE
from effuse.runs.save import Loaded, load
from effuse.tasks.denoise import NULL, Denoise
from effuse.tasks.schedules import signal_and_noise
from effuse.tools.pictures import MOST, WORDS, Picture, Seen, chosen, mapped, points, shown
from effuse.transport.device import pick_device
from effuse.transport.refusals import gives_features


def probe_run(
    run: Path,
    *,
    stages: Sequence[int] | None = None,
    steps: Sequence[int] = (0, 10, 50, 150, 300),
    kind: Kind = "ridge",
    penalty: float = 1e-3,
    share: float = 0.2,
    images: int | None = None,
    ema: bool = False,
    untrained: bool = False,
    seed: int = 0,
    device: str = "auto",
    pictures: Sequence[Picture] = (),
    client: int | None = None,
) -> dict[str, Any]:
    """Accuracies of linear classifiers on a model's features, judged on held-out training images; also in RUN/probe*.json.

    A denoiser is asked under the null label only: under the true one, the label itself would be read out. `pictures` are
    drawn of the images that judge, into RUN/probe-KIND.svg. `client` names one whose own model is probed.
    """
    if ema and untrained:
        raise RecipeError("--ema and --untrained: an untrained network has no moving average; give one of them")
    opened = load(run, ema=ema, client=client, device=pick_device(device).type)
    recipe, machine, stream = opened.recipe, opened.machine, Stream((seed, "probe"))
    source = recipe.data if isinstance(recipe.data, Validation) else Validation(source=recipe.data, share=share)
    train, test = (source.load(split).to(opened.device) for split in ("train", "test"))
    if images is not None:
        train = train.rows(torch.from_numpy(stream.child("images").numpy().permutation(len(train))[:images]).sort().values)
    model = machine.initial(opened.model.arch, stream.child("untrained")) if untrained else opened.model
    net = machine.load(model.to(opened.device)).eval()
    seen = not isinstance(recipe.data, Validation) and not untrained  # it was trained on what judges it
    report: dict[str, Any] = {"run": str(run), "model": "untrained" if untrained else "ema" if ema else "trained"}
    report |= {} if client is None else {"client": client}
    report |= {
        "probe": kind,
        "penalty": penalty,
        "trained_on": len(train),
        "judged_on": len(test),
        "seen": seen,
        "seed": seed,
    }
    if "kmeans" in pictures and gives_features(model.arch):
        raise RecipeError(f"--picture kmeans: {model.arch.name} shows features and no maps; choose tsne or pca")
    rows: list[dict[str, Any]] = []
    seen_by: list[Seen] = []  # what pictures show
    some = chosen(len(test), MOST, stream.child("points"))
    for place, widths, (x, other) in _features(opened, machine, net, (train, test), stages, steps, stream):
        for (name, width), a, b in zip(widths, x.split([w for _, w in widths], 1), other.split([w for _, w in widths], 1)):
            head = probe(a, train.labels, len(train.classes), kind, penalty)
            rows.append({"stage": name, **place, "features": width, "accuracy": head.right(b, test.labels)})
            seen_by.append(Seen(f"stage {name}, t {place['t']}" if place else name, b[some]))
    suffix = ("" if client is None else f"-client{client}") + ("-untrained" if untrained else "-ema" if ema else "")
    report |= {"rows": rows, "pictures": []}
    for picture in pictures:
        whose = "" if client is None else f" of client {client}"
        title = f"{run}, {report['model']}{whose}: {WORDS[picture]}"
        if picture == "tsne" or gives_features(model.arch):
            svg = points(picture, title, seen_by, test.labels[some.to(test.labels.device)], test.classes, seed)
        else:
            few = test.rows(shown(test.labels, len(test.classes), stream.child("maps")))
            found = [seen for t in steps for seen in _maps(opened, machine, net, few, rows, t, stream.child(t, "maps"))]
            svg = mapped(picture, title, found, few, seed)
        drawn = run / f"probe{suffix}-{picture}.svg"
        write_atomically(drawn, svg.encode(), mode=PRIVATE)
        report["pictures"].append(str(drawn))
    machine.release()
    file = run / f"probe{suffix}.json"
    write_atomically(file, (json.dumps(report, indent=2) + "\n").encode())
    return report | {"file": str(file)}


Found = tuple[dict[str, int], list[tuple[str, int]], tuple[Tensor, Tensor]]


def _features(
    opened: Loaded,
    machine: Machine,
    net: Net,
    splits: tuple[Dataset, Dataset],
    stages: Sequence[int] | None,
    steps: Sequence[int],
    stream: Stream,
) -> Iterator[Found]:
    """For each time step: the names and widths of the stages, and the features of both splits, stage beside stage."""
    recipe, arch = opened.recipe, opened.model.arch
    if gives_features(arch):
        found = [_applied(machine, net, recipe, data, last_features, {}, stream) for data in splits]
        yield {}, [("features", found[0].shape[1])], (found[0], found[1])
        return
    if not arch.staged or not isinstance(recipe.task, Denoise):
        raise RecipeError(f"{opened.run}: {arch.name} shows neither stages nor features; probe a unet(...) or a classifier")
    maps = arch.hollow_net()(*arch.example(), give="stages")
    named = sorted(set(range(len(maps)) if stages is None else stages))
    wrong = [k for k in named if not 0 <= k < len(maps)]
    if not named or wrong:
        raise RecipeError(f"--stages: there is no stage {wrong[0] if wrong else '-'}; {arch.name} has 0 to {len(maps) - 1}")
    for t in steps:
        if not 0 <= t < recipe.task.schedule.steps:
            raise RecipeError(f"--steps: there is no step {t}; the run's task has 0 to {recipe.task.schedule.steps - 1}")
        given = {**_noise(recipe, t), **{f"stage{k}": 1.0 for k in named}}
        both = [
            _applied(machine, net, recipe, data, denoised, given, stream.child(t, name))
            for data, name in zip(splits, ("train", "test"))
        ]
        yield {"t": t}, [(str(k), maps[k].shape[1]) for k in named], (both[0], both[1])


def _applied(
    machine: Machine, net: Net, recipe: Recipe, data: Dataset, function: Any, given: Given, stream: Stream
) -> Tensor:
    shard = Shard.whole(data)
    shard = shard.with_columns(labels=torch.full_like(shard.labels, NULL))
    return machine.apply(net, function, recipe.task, shard, given, stream)


def _maps(
    opened: Loaded, machine: Machine, net: Net, few: Dataset, rows: Sequence[dict[str, Any]], t: int, stream: Stream
) -> Iterator[Seen]:
    """The maps of each probed stage of these images at a time step, before pooling."""
    arch: Any = opened.model.arch
    shapes = [m.shape[1:] for m in arch.hollow_net()(*arch.example(), give="stages")]
    wanted = sorted({int(row["stage"]) for row in rows})
    for k in wanted:
        given = {**_noise(opened.recipe, t), f"stage{k}": 1.0}
        flat = _applied(machine, net, opened.recipe, few, stage_maps, given, stream)
        yield Seen(f"stage {k}, t {t}", flat.view(-1, *shapes[k]))


def _noise(recipe: Recipe, t: int) -> dict[str, Any]:
    """What a time step does to an image."""
    assert isinstance(recipe.task, Denoise)
    a, s = signal_and_noise(recipe.task.schedule, torch.device("cpu"))[t].tolist()
    return {"t": torch.tensor(t), "a": a, "s": s}


def stage_maps(net: Net, batch: Batch, given: Given) -> Tensor:
    """The maps of the wanted stages of a denoiser, each image's in one row."""
    x = given["a"] * batch.x + given["s"] * batch.drawn["noise"]
    maps = net(x, torch.zeros_like(batch.labels) + given["t"], batch.columns["labels"], give="stages")
    return torch.cat([m.float().flatten(1) for k, m in enumerate(maps) if f"stage{k}" in given], dim=1)


def last_features(net: Net, batch: Batch, given: Given) -> Tensor:
    """What a classifier's head gets."""
    return net(batch.x, give="features").float()
