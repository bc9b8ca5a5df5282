"""What an audit measures of one model, and how the measures of several clients' models become one."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from effuse.core.data import Dataset, Shard
from effuse.core.errors import DataError
from effuse.core.metric import Images
from effuse.core.model import Model
from effuse.core.rng import Stream
from effuse.core.task import Task
from effuse.core.workbench import Workbench
from effuse.privacy.membership import attacks_on, matched, scores
from effuse.privacy.memorisation import NEIGHBOURS, adaptive_distance

PAIRS = 30
GUESSED_BY = ("pia", "loss")  # the attack that guesses canaries: the first that the task has, chosen before any result
Numbers = dict[str, Tensor]  # of each attack, one for each image


@dataclasses.dataclass(frozen=True)
class Canaries:
    """Images set aside, and for each whether it was trained on."""

    images: Shard
    coins: Tensor


@dataclasses.dataclass(frozen=True)
class Target:
    """A model to audit, the images that it was trained on, and real images that nobody trained on."""

    model: Model
    shard: Shard
    held_out: Dataset
    images: Images | None = None  # drawn from it
    canaries: Canaries | None = None
    name: str = ""  # the client, where there are several

    def to(self, device: torch.device) -> "Target":
        canaries = self.canaries and Canaries(_placed(self.canaries.images, device), self.canaries.coins)
        shard, held_out = _placed(self.shard, device), self.held_out.to(device)
        return dataclasses.replace(self, model=self.model.to(device), shard=shard, held_out=held_out, canaries=canaries)

    @property
    def known(self) -> Shard:
        """The training images whose labels held-out images have too."""
        known = torch.isin(self.shard.labels, self.held_out.labels.cpu()).nonzero().flatten()
        if not len(known):
            who = f"client {self.name}: " if self.name else ""
            raise DataError(f"{who}no held-out image has a label that training images have; hold out some of each class")
        return Shard(self.shard.dataset, self.shard.rows[known])


@dataclasses.dataclass(frozen=True)
class Attacked:
    """The attacks' numbers for some training images and for others of the same labels."""

    members: Numbers
    others: Numbers
    member_labels: Tensor
    other_labels: Tensor


@dataclasses.dataclass(frozen=True)
class Memorised:
    """The scores of drawn and of held-out real images against training images, and the nearest pairs of drawn ones."""

    made: Tensor
    real: Tensor
    pairs: Tensor  # pairs x 2 x C x H x W on the scale of bytes, nearest first: a drawn image, then a training image
    training_images: int
    neighbours: int  # that a distance is compared with; of several clients, the fewest


@dataclasses.dataclass(frozen=True)
class Guessed:
    """An attack's numbers for canaries, and their coins."""

    attack: str
    values: Tensor
    coins: Tensor


@dataclasses.dataclass(frozen=True)
class Measured:
    """All numbers of one model, or of several together."""

    attacked: Attacked
    memorised: Memorised | None
    guessed: Guessed | None


def measured(bench: Workbench, target: Target, task: Task, most: int, source: Stream) -> Measured:
    """Attack one model, compare its images, and score its canaries."""
    bench.begin(source, 0)
    target = target.to(bench.machine.device)
    attacked = _attacked(bench, target, task, most, source)
    memorised = None
    if target.images is not None and len(target.images):
        memorised = _memorised(target.images, target, source, bench.machine.device)
    guessed = None
    if target.canaries is not None and len(target.canaries.coins):
        name = next(name for name in GUESSED_BY if name in attacks_on(task))
        values = scores(bench, target.model, task, target.canaries.images, source, only=(name,))[name]
        guessed = Guessed(name, values, target.canaries.coins)
    bench.end()
    return Measured(attacked, memorised, guessed)


def _attacked(bench: Workbench, target: Target, task: Task, most: int, source: Stream) -> Attacked:
    """Every attack on a part of the members and on others of the same labels."""
    rng = source.child("members").torch()
    known = target.known
    members = Shard(known.dataset, known.rows[torch.randperm(len(known), generator=rng)[:most].sort().values])
    others = Shard(target.held_out, matched(members.labels, target.held_out.labels.cpu(), rng))
    own, other = (scores(bench, target.model, task, data, source) for data in (members, others))
    return Attacked(own, other, members.labels, others.labels)


def _memorised(images: Images, target: Target, source: Stream, device: torch.device) -> Memorised:
    """The scores of images and of about as many held-out real ones, whose labels are the training images'."""
    rng = source.child("held out").torch()
    made, train = images.bytes(), _as_bytes(target.shard.gathered())
    rows = matched(target.known.labels, target.held_out.labels.cpu(), rng)
    some = rows[torch.randperm(len(rows), generator=rng)[: max(len(made), NEIGHBOURS)]]
    real = _as_bytes(target.held_out.rows(some.sort().values))
    found, reference = (adaptive_distance(x, train, device=device) for x in (made, real))
    lowest = found.lowest(PAIRS)
    nearest = train[found.nearest[lowest].to(train.device)].cpu().float()
    pairs = torch.stack([made[lowest].float(), nearest], dim=1)
    return Memorised(found.scores, reference.scores, pairs, len(train), min(NEIGHBOURS, len(train)))


def pooled(found: Sequence[Measured], source: Stream) -> Measured:
    """The numbers of several clients' models as those of one; one model's are unchanged."""
    if len(found) == 1:
        return found[0]
    memorised = [m.memorised for m in found if m.memorised is not None]
    guessed = [m.guessed for m in found if m.guessed is not None]
    return Measured(
        pooled_attacks([m.attacked for m in found], source.child("pooled").torch()),
        pooled_scores(memorised) if memorised else None,
        pooled_guesses(guessed) if guessed else None,
    )


def pooled_attacks(found: Sequence[Attacked], rng: torch.Generator) -> Attacked:
    """The numbers of all clients, each in standard deviations of its held-out images from their mean.

    Networks differ in scale; without this a pool would mostly compare clients. Each client adds as many members as others:
    otherwise a client would tell something about membership, and the pool would not keep DP's bound on true positives.
    """
    kept = [matched(part.other_labels, part.member_labels, rng) for part in found]
    members: Numbers = {}
    others: Numbers = {}
    for name in found[0].members:
        own = [part.members[name][rows].double() for part, rows in zip(found, kept)]
        other = [part.others[name].double() for part in found]
        scales = [(x.mean(), float(x.std(correction=0)) or 1.0) for x in other]
        members[name], others[name] = (
            torch.cat([(x - mean) / deviation for x, (mean, deviation) in zip(side, scales)]) for side in (own, other)
        )
    labels = torch.cat([part.member_labels[rows] for part, rows in zip(found, kept)])
    return Attacked(members, others, labels, torch.cat([part.other_labels for part in found]))


def pooled_scores(found: Sequence[Memorised]) -> Memorised:
    """The scores of all clients, each against its own images."""
    made = torch.cat([part.made for part in found])
    # each client's pairs are those of its lowest scores, in order
    of_pairs = torch.cat([part.made.sort(stable=True).values[: len(part.pairs)] for part in found])
    order = of_pairs.sort(stable=True).indices[:PAIRS]
    pairs, real = torch.cat([part.pairs for part in found])[order], torch.cat([part.real for part in found])
    return Memorised(made, real, pairs, sum(p.training_images for p in found), min(p.neighbours for p in found))


def pooled_guesses(found: Sequence[Guessed]) -> Guessed:
    """The canaries of all clients by their rank among the client's own, so that each client's extremes are guessed."""
    ranks = [(part.values.argsort(stable=True).argsort(stable=True).double() + 0.5) / len(part.values) for part in found]
    return Guessed(found[0].attack, torch.cat(ranks), torch.cat([part.coins for part in found]))


def _as_bytes(data: Dataset) -> Tensor:
    """Stored images on the scale of bytes."""
    return data.images if data.peak == 255 else data.images.float() * (255 / data.peak)


def _placed(shard: Shard, device: torch.device) -> Shard:
    return dataclasses.replace(shard, dataset=shard.dataset.to(device))
