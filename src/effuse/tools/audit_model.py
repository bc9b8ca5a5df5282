"""Audit one model, such as a site's own before it is uploaded: memorisation, membership, a bound from canaries."""

import dataclasses
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effuse.core.data import Dataset, Shard
from effuse.core.errors import DataError
from effuse.core.files import write_atomically, writing
from effuse.core.metric import Images
from effuse.core.model import Model
from effuse.core.privacy import Budget
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.core.task import Task
from effuse.core.workbench import Workbench
from effuse.machines.eager import Eager
from effuse.privacy.membership import attacks_on, dp_bound, judged, matched, scores
from effuse.privacy.memorisation import ALPHA, FLAGGED, NEIGHBOURS, Nearness, adaptive_distance
from effuse.privacy.one_run import audited, guesses_by_rule
from effuse.runs.grid import grid_array
from effuse.tools.audit_page import page

MEMBERS = 1000
BINS = 40  # of the histograms
PAIRS, PAIRS_A_ROW = 30, 5
DELTA = 1e-5  # of the bound from one training, where no budget gives another
GUESSED_BY = ("pia", "loss")  # the attack that guesses canaries: the first that the task has, chosen before any result
ADJACENCY = "a unit is replaced by nothing; how many units a site has is public"


@dataclasses.dataclass(frozen=True)
class Canaries:
    """Images set aside, and for each whether it was trained on."""

    images: Shard
    coins: Tensor


def audit_model(
    model: Model,
    task: Task,
    shard: Shard,
    held_out: Dataset,
    out: Path,
    *,
    images: Images | None = None,
    canaries: Canaries | None = None,
    budget: Budget | None = None,
    unit: str = "image",
    members: int = MEMBERS,
    guesses: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    about: Mapping[str, str] | None = None,
    ledger: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Audit one model against the images that it was trained on; writes to `out`, which only its owner may read.

    A site can call this on its own model before it uploads it. Nothing leaves the folder:

        shard = Shard.whole(source.load("train"))
        images = Workbench(Eager(torch.device("cpu")), task, 1).generate(model, 1000, Ddim())
        audit_model(model, task, shard, source.load("test"), Path("my-audit"), images=images)["error"]

    `held_out` are real images that nobody trained on. Without `images` nothing is said about memorisation.
    """
    source = Stream((seed, "audit"))
    bench = Workbench(Eager(torch.device(device)), task, 1)
    bench.begin(source, 0)
    model, shard, held_out = model.to(device), placed(shard, device), held_out.to(bench.machine.device)
    report: dict[str, Any] = {
        "about": dict(about or {}),
        "task": text(task, full=False),
        "weights_sha256": model.params.digest(),
        "seed": seed,
        "promise": promised(budget, unit, ledger),
        "memorisation": None,
        "membership": membership(bench, model, task, shard, held_out, members, source, budget),
        "one_run": None,
        "error": None,
    }
    picture = None
    if images is not None and len(images):
        report["memorisation"], picture = memorisation(images, shard, held_out, source, device)
    if canaries is not None:
        here = Canaries(placed(canaries.images, device), canaries.coins)
        report["one_run"] = one_run(bench, model, task, here, guesses, source, budget)
        report["error"] = above_promise(report)
    _write(out, report, picture)
    return report


def placed(shard: Shard, device: str) -> Shard:
    return dataclasses.replace(shard, dataset=shard.dataset.to(torch.device(device)))


def promised(budget: Budget | None, unit: str, ledger: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the budget promises; None without one."""
    if budget is None:
        return None
    kept = {"epsilon": budget.epsilon, "delta": budget.delta, "unit": unit, "adjacency": ADJACENCY}
    return kept | {"accountant": budget.accountant, "ledger": None if ledger is None else dict(ledger)}


def memorisation(
    images: Images, shard: Shard, held_out: Dataset, source: Stream, device: str
) -> tuple[dict[str, Any], Images]:
    """The scores of images and of as many held-out real ones, and the nearest pairs."""
    made, train = images.bytes(), as_bytes(shard.gathered())
    order = torch.randperm(len(held_out), generator=source.child("held out").torch())[: max(len(made), NEIGHBOURS)]
    real = as_bytes(held_out.rows(order.sort().values))
    found, reference = (adaptive_distance(x, train, device=device) for x in (made, real))
    lowest = found.lowest(PAIRS)
    pairs = torch.stack([made[lowest].float(), train[found.nearest[lowest].to(train.device)].cpu().float()], dim=1)
    report = {
        "alpha": ALPHA,
        "neighbours": min(NEIGHBOURS, len(train)),
        "training_images": len(train),
        "threshold": FLAGGED,
        "edges": torch.linspace(0, 1 / ALPHA, BINS + 1, dtype=torch.float64).tolist(),
        "generated": summed(found),
        "held_out": summed(reference),
    }
    return report, Images(pairs.flatten(0, 1) / 127.5 - 1.0)


def summed(found: Nearness) -> dict[str, Any]:
    """Scores in numbers; none of them belongs to a single image but the lowest."""
    scores = found.scores
    counts = torch.histc(scores.clamp(max=1 / ALPHA), BINS, 0, 1 / ALPHA).int().tolist()  # beyond it by rounding
    below = int((scores < FLAGGED).sum())
    low, middle = float(scores.min()), float(scores.median())
    return {"n": len(scores), "below": below, "share": found.share, "lowest": low, "median": middle, "histogram": counts}


def as_bytes(data: Dataset) -> Tensor:
    """Stored images on the scale of bytes."""
    return data.images if data.peak == 255 else data.images.float() * (255 / data.peak)


def membership(
    bench: Workbench,
    model: Model,
    task: Task,
    shard: Shard,
    held_out: Dataset,
    most: int,
    source: Stream,
    budget: Budget | None,
) -> dict[str, Any]:
    """Every attack on a part of the members and on others of the same labels."""
    rng = source.child("members").torch()
    labels = shard.dataset.labels.cpu()[shard.rows]
    known = torch.isin(labels, held_out.labels.cpu()).nonzero().flatten()
    if not len(known):
        raise DataError("no held-out image has a label that training images have; hold out some of each class")
    members = Shard(shard.dataset, shard.rows[known[torch.randperm(len(known), generator=rng)[:most]].sort().values])
    rows = matched(members.dataset.labels.cpu()[members.rows], held_out.labels.cpu(), rng)
    own, other = (scores(bench, model, task, data, source) for data in (members, Shard(held_out, rows)))
    found = {name: judged(own[name], other[name]) for name in own}
    return {
        "members": len(members),
        "others": len(rows),
        "bound": None if budget is None else dp_bound(budget.epsilon, budget.delta),
        # not an error: held-out images may differ from training images by more than not being trained on
        "above": [] if budget is None else [name for name, a in found.items() if a.above(budget.epsilon, budget.delta)],
        "attacks": {name: {k: v._asdict() for k, v in vars(attack).items()} for name, attack in found.items()},
    }


def one_run(
    bench: Workbench,
    model: Model,
    task: Task,
    canaries: Canaries,
    guesses: int | None,
    source: Stream,
    budget: Budget | None,
) -> dict[str, Any]:
    """The lower bound on epsilon from the canaries' scores."""
    name = next(name for name in GUESSED_BY if name in attacks_on(task))
    values = scores(bench, model, task, canaries.images, source, only=(name,))[name]
    delta = DELTA if budget is None else budget.delta
    found = audited(values, canaries.coins, guesses or guesses_by_rule(len(values)), delta)
    return {"attack": name, **dataclasses.asdict(found)}


def above_promise(report: Mapping[str, Any]) -> str | None:
    """The sentence of an audit that refutes its promise."""
    promise, shown = report["promise"], report["one_run"]
    if promise is None or shown["epsilon"] <= promise["epsilon"]:
        return None
    return (
        f"{report['about'].get('run', 'this model')} leaks more than was promised: its canaries show an epsilon of at least "
        f"{shown['epsilon']:.2f} at {shown['confidence']:.0%} confidence, the promise is {promise['epsilon']:g}; "
        "do not release the model, and report this"
    )


def _write(out: Path, report: dict[str, Any], pairs: Images | None) -> None:
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


def _png(pairs: Images) -> bytes:
    """Each image beside its nearest training image, as a picture."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(grid_array(pairs, columns=2 * PAIRS_A_ROW)).save(buffer, "PNG")
    return buffer.getvalue()
