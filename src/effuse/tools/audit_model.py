"""Audit one model, such as a site's own before it is uploaded: memorisation, membership, a bound from canaries."""

import dataclasses
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effuse.core.data import Dataset, Shard
from effuse.core.files import write_atomically, writing
from effuse.core.grid import MARGIN, grid_array
from effuse.core.metric import Images
from effuse.core.model import Model
from effuse.core.privacy import Budget
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.core.task import Task
from effuse.core.workbench import Workbench
from effuse.machines.eager import Eager
from effuse.privacy.membership import dp_bound, judged
from effuse.privacy.memorisation import ALPHA, FLAGGED
from effuse.privacy.one_run import audited, guesses_by_rule
from effuse.tools.audit_numbers import Attacked, Canaries, Guessed, Measured, Memorised, Target, measured, pooled
from effuse.tools.audit_page import page

__all__ = ["Canaries", "Target", "audit_model", "audit_models"]

MEMBERS = 1000
BINS = 40  # of the histograms
PAIRS_A_ROW, GAP = 5, 16  # of the picture of pairs, and the pixels between these
DELTA = 1e-5  # of the bound from one training, where no budget gives another


def audit_model(
    model: Model,
    task: Task,
    shard: Shard,
    held_out: Dataset,
    out: Path,
    *,
    images: Images | None = None,
    canaries: Canaries | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Audit one model against the images that it was trained on; writes to `out`, which only its owner may read.

    A site can call this on its own model before it uploads it. Nothing leaves the folder:

        shard = Shard.whole(source.load("train"))
        images = Workbench(Eager(torch.device("cpu")), task, 1).generate(model, 1000, Ddim())
        audit_model(model, task, shard, source.load("test"), Path("my-audit"), images=images)["error"]

    `held_out` are real images that nobody trained on. Without `images` nothing is said about memorisation. The options are
    those of `audit_models`.
    """
    return audit_models([Target(model, shard, held_out, images, canaries)], task, out, **options)


def audit_models(
    targets: Sequence[Target],
    task: Task,
    out: Path,
    *,
    budget: Budget | None = None,
    unit: str = "image",
    members: int = MEMBERS,
    guesses: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    about: Mapping[str, str] | None = None,
    ledger: Mapping[str, Any] | None = None,
    simulated: bool = False,
) -> dict[str, Any]:
    """Audit a model, or several clients' models together; their report is of all numbers pooled, with each client's beside.

    `members` is the most training images that attacks look at, for each model. `ledger` is what a run says that it spent,
    `simulated` whether its noise follows from its seed.
    """
    source = Stream((seed, "audit"))
    bench = Workbench(Eager(torch.device(device)), task, 1)
    streams = [source.child(target.name) if target.name else source for target in targets]
    found = [measured(bench, target, task, members, own) for target, own in zip(targets, streams)]
    whole = pooled(found, source)
    digests = [target.model.params.digest() for target in targets]
    report: dict[str, Any] = {
        "about": dict(about or {}),
        "task": text(task, full=False),
        "weights_sha256": digests[0] if len(targets) == 1 else None,
        "seed": seed,
        "promise": promised(budget, unit, ledger, simulated),
        **summary(whole, budget),
        "one_run": None if whole.guessed is None else one_run(whole.guessed, guesses, budget),
        "clients": None,
        "error": None,
    }
    if any(target.name for target in targets):
        each = zip(targets, digests, found)
        report["clients"] = {t.name: {"weights_sha256": digest, **summary(own, budget)} for t, digest, own in each}
    report["error"] = above_promise(report)
    _write(out, report, None if whole.memorised is None else whole.memorised.pairs)
    return report


def promised(budget: Budget | None, unit: str, ledger: Mapping[str, Any] | None, simulated: bool) -> dict[str, Any] | None:
    """What the budget promises; None without one."""
    if budget is None:
        return None
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "unit": unit,
        "adjacency": f"one {unit} is replaced by nothing; how many {unit}s a client has is public",
        "accountant": budget.accountant,
        "simulated": simulated,
        "ledger": None if ledger is None else dict(ledger),
    }


def summary(found: Measured, budget: Budget | None) -> dict[str, Any]:
    """Memorisation and membership in numbers."""
    memory = None if found.memorised is None else memorisation(found.memorised)
    return {"memorisation": memory, "membership": membership(found.attacked, budget)}


def memorisation(found: Memorised) -> dict[str, Any]:
    """The scores of drawn images and of held-out real ones."""
    return {
        "alpha": ALPHA,
        "neighbours": found.neighbours,
        "training_images": found.training_images,
        "threshold": FLAGGED,
        "edges": torch.linspace(0, 1 / ALPHA, BINS + 1, dtype=torch.float64).tolist(),
        "generated": summed(found.made),
        "held_out": summed(found.real),
    }


def summed(scores: Tensor) -> dict[str, Any]:
    """Scores in numbers; none of them belongs to a single image but the lowest."""
    counts = torch.histc(scores.clamp(max=1 / ALPHA), BINS, 0, 1 / ALPHA).int().tolist()  # beyond it by rounding
    below = int((scores < FLAGGED).sum())
    low, middle = float(scores.min()), float(scores.median())
    share = below / len(scores)
    return {"n": len(scores), "below": below, "share": share, "lowest": low, "median": middle, "histogram": counts}


def membership(found: Attacked, budget: Budget | None) -> dict[str, Any]:
    """What every attack finds, and what the budget allows."""
    judgements = {name: judged(found.members[name], found.others[name]) for name in found.members}
    above = [] if budget is None else [n for n, a in judgements.items() if a.above(budget.epsilon, budget.delta)]
    return {
        "members": len(found.member_labels),
        "others": len(found.other_labels),
        "bound": None if budget is None else dp_bound(budget.epsilon, budget.delta),
        # not an error: held-out images may differ from training images by more than not being trained on
        "above": above,
        "attacks": {name: {k: v._asdict() for k, v in vars(attack).items()} for name, attack in judgements.items()},
    }


def one_run(canaries: Guessed, guesses: int | None, budget: Budget | None) -> dict[str, Any]:
    """The lower bound on epsilon from the canaries' scores."""
    delta = DELTA if budget is None else budget.delta
    n = len(canaries.values)
    found = audited(canaries.values, canaries.coins, guesses or guesses_by_rule(n), delta)
    return {"attack": canaries.attack, **dataclasses.asdict(found)}


def above_promise(report: Mapping[str, Any]) -> str | None:
    """The sentence of an audit that refutes its promise."""
    promise, shown = report["promise"], report["one_run"]
    if promise is None or shown is None or shown["epsilon"] <= promise["epsilon"]:
        return None
    return (
        f"{report['about'].get('run', 'this model')} leaks more than was promised: its canaries show an epsilon of at least "
        f"{shown['epsilon']:.2f} at {shown['confidence']:.0%} confidence, the promise is {promise['epsilon']:g}; "
        "do not release the model, and report this"
    )


def _write(out: Path, report: dict[str, Any], pairs: Tensor | None) -> None:
    """The report, its page, and the nearest pairs, in a folder that only its owner may read."""
    for folder in (out, out / "private"):
        with writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # mkdir leaves the mode of an existing folder
    write_atomically(out / "audit.json", (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    write_atomically(out / "index.html", page(report).encode())
    picture = out / "private" / "nearest.png"
    with writing(picture):
        picture.unlink(missing_ok=True)
        if pairs is not None:
            with open(os.open(picture, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_png(pairs))


def _png(pairs: Tensor) -> bytes:
    """Each image beside its nearest training image, as a picture."""
    from PIL import Image

    buffer = io.BytesIO()
    grid = grid_array(Images(pairs.flatten(0, 1) / 127.5 - 1.0), columns=2 * PAIRS_A_ROW)
    columns = np.split(grid[:, :-MARGIN], PAIRS_A_ROW, axis=1)
    apart = [np.pad(column, ((0, 0), (0, GAP), (0, 0)), constant_values=255) for column in columns]
    Image.fromarray(np.concatenate(apart, axis=1)).save(buffer, "PNG")
    return buffer.getvalue()
