"""Audit a finished run: what it promised, what it memorised, and what attacks find."""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from effuse.core.capabilities import Draws, Personal
from effuse.core.data import Shard
from effuse.core.errors import RunError
from effuse.core.metric import Images
from effuse.core.recipe import read_manifest
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.runs.save import Loaded, load
from effuse.tasks.denoise import Denoise
from effuse.tools.audit_model import MEMBERS, Canaries, audit_model
from effuse.tools.export import auxiliary_of
from effuse.transport.device import pick_device

Which = Literal["global", "generator"]
DRAWN = 1000  # images, where none are kept and no number is given


def audit_run(
    run: Path,
    *,
    which: Which = "global",
    n: int | None = None,
    members: int = MEMBERS,
    guesses: int | None = None,
    ema: bool = False,
    device: str = "auto",
) -> dict[str, Any]:
    """Audit a finished run into RUN/audit; returns the report, whose `error` says if a bound is above the promise.

    Audited images are those that the server keeps, or `n` drawn by the recipe's sampler.
    """
    opened = load(run, ema=ema, device=pick_device(device).type)
    recipe, manifest = opened.recipe, read_manifest(run)
    if isinstance(recipe.algorithm, Personal):
        raise RunError(
            f"{run}: {recipe.algorithm.name} leaves each client its own model; audit_model() audits one at its site"
        )
    if which == "generator" and not isinstance(recipe.task, Denoise):
        raise RunError(f"{run}: it delivers a classifier and keeps no generator; use --model global")
    train, held_out = recipe.data.load("train"), recipe.data.load("test")
    if not len(train):
        raise RunError(f"{run}: its images are at the sites and not here; a site audits its own model by audit_model()")
    if train.digest != manifest.get("data_sha256", {}).get("train"):
        raise RunError(f"{run} was trained on different data than {recipe.data} now is; restore the data")
    train, held_out = train.to(opened.device), held_out.to(opened.device)
    torch.set_num_threads(recipe.threads)
    images, source = audited_images(opened, n)
    canaries = None
    if recipe.canaries:
        rows, coins = recipe.canaries_in(train)
        canaries = Canaries(Shard(train, rows), coins)
    return audit_model(
        opened.model,
        recipe.task,
        Shard(train, torch.cat([shard.rows for shard in recipe.shards(train)]).sort().values),
        held_out,
        run / "audit",
        images=images,
        canaries=canaries,
        budget=recipe.budget,
        unit="image" if recipe.budget is None else recipe.budget.unit,
        members=members,
        guesses=guesses,
        seed=recipe.seed,
        device=opened.device.type,
        about={"run": str(run), "model": which + "-ema" * ema, "images": source, "data": text(recipe.data, full=False)},
        ledger=_ledger(run),
    )


def audited_images(opened: Loaded, n: int | None) -> tuple[Images | None, str]:
    """The images that are audited, and where they come from."""
    kept = auxiliary_of(opened.run) if isinstance(opened.recipe.algorithm, Draws) else None
    if kept is not None:
        # they are sorted by client: a part of them is drawn from all
        order = torch.from_numpy(Stream((opened.recipe.seed, "audited")).numpy().permutation(len(kept)))
        return kept.images(labelled=False).rows(order[:n].sort().values), "kept by the server"
    if opened.recipe.sampler is None or not isinstance(opened.recipe.task, Denoise):
        return None, "none: the run keeps no images, and its recipe draws none"
    return opened.sample(n or DRAWN), f"drawn by {text(opened.recipe.sampler, full=False)}"


def _ledger(run: Path) -> Any:
    """What the run's result says was spent on privacy."""
    path = run / "result.json"
    return json.loads(path.read_text()).get("privacy") if path.exists() else None
