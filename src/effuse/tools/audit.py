"""Audit a finished run: what it promised, what it memorised, and what attacks find."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from effuse.algorithms.fedcvae import FedCVAE
from effuse.algorithms.feddiff import FedDiff, FedDiffServer
from effuse.algorithms.shared.synthesis import AuxiliarySet
from effuse.core.capabilities import Draws, Personal
from effuse.core.data import Dataset, Shard
from effuse.core.errors import RunError
from effuse.core.metric import Images
from effuse.core.model import Model
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.core.task import Task
from effuse.runs.folder import RunFolder
from effuse.runs.save import Loaded, load, require_finished
from effuse.tasks.edm import DENOISERS
from effuse.tools.audit_model import MEMBERS, Canaries, Target, audit_models
from effuse.tools.export import auxiliary_of
from effuse.transport.device import pick_device

Which = Literal["global", "generator"]
DRAWN = 1000  # images, where none are kept and no number is given
SIMULATED = ("simulator", "loopback")  # engines whose private noise follows from the run's seed


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

    `which="generator"` audits the generators that FedDiff's clients sent, each against its own client's images. Audited
    images are those that the server keeps, or `n` drawn by the recipe's sampler.
    """
    require_finished(run)
    opened = load(run, ema=ema, device=pick_device(device).type)
    recipe, manifest = opened.recipe, read_manifest(run)
    if isinstance(recipe.algorithm, Personal):
        raise RunError(
            f"{run}: {recipe.algorithm.name} leaves each client its own model; audit_model() audits one at its site"
        )
    apart = which == "generator" and not isinstance(recipe.task, DENOISERS)
    generators = generators_of(opened, ema) if apart else {}
    train, held_out = recipe.data.load("train"), recipe.data.load("test")
    if not len(train):
        raise RunError(f"{run}: its images are at the sites and not here; a site audits its own model by audit_model()")
    if train.digest != manifest.get("data_sha256", {}).get("train"):
        raise RunError(f"{run} was trained on different data than {recipe.data} now is; restore the data")
    train, held_out = train.to(opened.device), held_out.to(opened.device)
    torch.set_num_threads(recipe.threads)
    if apart:
        targets, source = by_client(opened, generators, train, held_out, n)
    else:
        images, source = audited_images(opened, n)
        targets = [delivered(opened, train, held_out, images)]
    about = {"run": str(run), "model": which + "-ema" * ema, "images": source, "data": text(recipe.data, full=False)}
    if apart:
        about["generators"] = f"of {len(targets)} clients, each against its own client's images"
    return audit_models(
        targets,
        task_of(recipe, apart),
        run / "audit",
        budget=recipe.budget,
        unit="image" if recipe.budget is None else recipe.budget.unit,
        members=members,
        guesses=guesses,
        seed=recipe.seed,
        device=opened.device.type,
        about=about,
        ledger=_ledger(run),
        simulated=manifest.get("engine") in SIMULATED,
    )


def delivered(opened: Loaded, train: Dataset, held_out: Dataset, images: Images | None) -> Target:
    """The model that a run delivers, against all that its clients trained on."""
    recipe, canaries = opened.recipe, None
    if recipe.canaries:
        rows, coins = recipe.canaries_in(train)
        canaries = Canaries(Shard(train, rows), coins)
    trained = torch.cat([shard.rows for shard in recipe.shards(train)]).sort().values
    return Target(opened.model, Shard(train, trained), held_out, images, canaries)


def by_client(
    opened: Loaded, generators: dict[int, Model], train: Dataset, held_out: Dataset, n: int | None
) -> tuple[Sequence[Target], str]:
    """Every client's generator with its own images and canaries, and the images that were drawn from it."""
    recipe, kept = opened.recipe, kept_images(opened, n)
    drawn = {} if kept is None else {k: kept.rows(kept.origin == k).images(labelled=False) for k in generators}
    # as they were dealt, before canaries were set aside
    dealt, shards = dataclasses.replace(recipe, canaries=0).shards(train), recipe.shards(train)
    rows, coins = recipe.canaries_in(train)
    targets = []
    for client, model in generators.items():
        own = torch.isin(rows, dealt[client].rows)
        canaries = Canaries(Shard(train, rows[own]), coins[own])
        trained = Shard(train, shards[client].rows)
        targets.append(Target(model, trained, held_out, drawn.get(client), canaries, str(client)))
    return targets, "none: the server keeps none" if kept is None else "kept by the server, by the client they came from"


def generators_of(opened: Loaded, ema: bool = False) -> dict[int, Model]:
    """The clients' generators that a run has kept."""
    run, algorithm = opened.run, opened.recipe.algorithm
    if isinstance(algorithm, FedCVAE):
        raise RunError(
            f"{run}: clients of {algorithm.name} send decoders without encoders, which no attack is known for; "
            "only their images can be audited: use --model global"
        )
    if not isinstance(algorithm, FedDiff):
        raise RunError(f"{run}: it delivers a classifier and keeps no generator; use --model global")
    if algorithm.real:
        raise RunError(f"{run}: its images are real, and no client trained a generator; use --model global")
    if not algorithm.keep:
        raise RunError(
            f"{run}: its server did not keep the clients' generators; run it with --set algorithm.keep=True, "
            "or use --model global"
        )
    if ema:
        raise RunError(f"{run}: a client sends one generator, averaged where its solver has an ema; leave --ema out")
    checkpoint = RunFolder(run).load_checkpoint()
    assert checkpoint is not None and isinstance(checkpoint.server, FedDiffServer)  # of a finished run of FedDiff
    return checkpoint.server.generators


def task_of(recipe: Recipe, apart: bool) -> Task:
    """The task of the audited model."""
    return recipe.algorithm.task if apart and isinstance(recipe.algorithm, FedDiff) else recipe.task


def audited_images(opened: Loaded, n: int | None) -> tuple[Images | None, str]:
    """The images that are audited, and where they come from."""
    kept = kept_images(opened, n)
    if kept is not None:
        return kept.images(labelled=False), "kept by the server"
    if opened.recipe.sampler is None or not isinstance(opened.recipe.task, DENOISERS):
        return None, "none: the run keeps no images, and its recipe draws none"
    return opened.sample(n or DRAWN), f"drawn by {text(opened.recipe.sampler, full=False)}"


def kept_images(opened: Loaded, n: int | None) -> AuxiliarySet | None:
    """The images that the server keeps, or `n` of them."""
    kept = auxiliary_of(opened.run) if isinstance(opened.recipe.algorithm, Draws) else None
    if kept is None:
        return None
    # they are sorted by client: a part of them is drawn from all
    order = torch.from_numpy(Stream((opened.recipe.seed, "audited")).numpy().permutation(len(kept)))
    return kept.rows(order[:n].sort().values)


def _ledger(run: Path) -> Any:
    """What the run's result says was spent on privacy."""
    path = run / "result.json"
    return RunFolder(run).read_result().privacy if path.exists() else None
