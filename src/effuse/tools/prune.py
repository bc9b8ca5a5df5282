"""Prune a finished run's model into a new run folder, and report it before and after."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from effuse.core.build import with_values
from effuse.core.capabilities import Personal
from effuse.core.errors import RunError
from effuse.core.files import cache_folder
from effuse.core.metric import Measurement
from effuse.core.model import Arch, Model
from effuse.core.rng import Stream
from effuse.core.workbench import Workbench
from effuse.fast import machine_for
from effuse.metrics.cost import figures, layer_macs, macs
from effuse.pruning.groups import groups_of
from effuse.pruning.prune import Criterion, prune
from effuse.runs.evaluation import Evaluator
from effuse.runs.folder import RunFolder
from effuse.runs.records import plain
from effuse.runs.save import load, require_finished, save_model, weights_digest
from effuse.transport.device import pick_device
from effuse.transport.refusals import refuse_evaluation, refuse_model

PRUNED = "pruned after training; `effuse.load` opens model/, plain diffusers does not"


def prune_run(
    run: Path,
    ratio: float,
    out: Path,
    *,
    criterion: Criterion = "norm",
    settings: list[str],
    seed: int = 0,
    ema: bool = False,
    device: str = "auto",
) -> dict[str, Any]:
    """Prune a run's model into a new folder; returns parameters, arithmetic, size and metrics before and after."""
    require_finished(run)
    opened = load(run, ema=ema, device=pick_device(device).type)
    recipe = opened.recipe.changed(settings)
    if isinstance(recipe.algorithm, Personal):
        raise RunError(f"{run}: {recipe.algorithm.name} has one model per client and no global model to prune")
    folder = RunFolder(out)
    folder.require_new()
    train, test = recipe.data.load("train").to(opened.device), recipe.data.load("test")
    refuse_model(recipe, train)
    refuse_evaluation(recipe, train, test)
    pruned = prune(opened.model, ratio, criterion, Stream((seed, "prune")))
    torch.set_num_threads(recipe.threads)
    evaluator = Evaluator(
        recipe, train, test, Workbench(machine_for(recipe, opened.device), recipe.task, recipe.rounds), cache_folder()
    )
    with folder.locked():
        save_model(pruned, recipe, out / "model")
        pictures = out / "samples"
        was = evaluator.evaluate_model(opened.model.to(opened.device), pictures / "before.png")
        now = evaluator.evaluate_model(pruned.to(opened.device), pictures / "after.png")
        before = _report(opened.model, was, run / ("model-ema" if ema else "model"))
        after = _report(pruned, now, out / "model")
        report = {"run": str(run), "out": str(out), "ratio": ratio, "criterion": criterion, "before": before, "after": after}
        report |= {"channels": channels(opened.model.arch, ratio)}
        folder.write_json("prune.json", report)
        result = RunFolder(run).read_result()
        # the traffic's cost stays: training sent the unpruned network
        counted = {**(result.figures or {}), **figures(pruned, recipe.algorithm, {})}
        smaller = replace(
            result,
            weights_sha256=weights_digest(pruned, []),
            metrics=now,
            parameters=pruned.params.numel,
            figures=counted,
            pruned=PRUNED,
        )
        folder.write_json("result.json", plain(smaller))
        # write the manifest last: `resume` would train an unfinished folder as a new run
        folder.create(
            with_values(recipe, "recipe", model=pruned.arch),
            f"{run.resolve().name}, pruned",
            "simulator",
            opened.device.type,
            None,
            {"train": train.digest, "test": test.digest},
            classes=train.classes,
        )
    return report


def channels(arch: Arch, ratio: float) -> dict[str, int]:
    """The channels that can be removed, and how many of them are left."""
    groups = groups_of(arch)
    return {"before": sum(g.channels for g in groups), "after": sum(g.blocks * g.keeps(ratio) for g in groups)}


def _report(model: Model, metrics: dict[str, Measurement], saved: Path) -> dict[str, Any]:
    size = sum(f.stat().st_size for f in saved.rglob("*.safetensors"))
    return {
        "parameters": model.params.numel,
        "macs": macs(model.arch),
        "layer_macs": layer_macs(model.arch),
        "bytes": size,
        "metrics": plain(metrics),
    }
