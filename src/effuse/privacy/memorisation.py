"""Memorisation: how much nearer a generated image is to one training image than to its neighbours (FedDiff, Eq. 4)."""

import dataclasses

import torch
from torch import Tensor

FLAGGED = 1.0  # a score below is called memorised
ALPHA, NEIGHBOURS = 0.5, 50
BLOCK = 1024  # images compared at a time
TRAIN_BLOCK = 8192  # training images compared at a time
NUMBERS = 2**24  # pixels of neighbours held at a time


@dataclasses.dataclass(frozen=True)
class Nearness:
    """For each image its score, and the row of the nearest training image."""

    scores: Tensor  # float32, from 0 (a copy) to 1 / alpha (all neighbours equally far)
    nearest: Tensor  # int64

    @property
    def share(self) -> float:
        """The share of images that are flagged."""
        return float((self.scores < FLAGGED).double().mean())

    def lowest(self, count: int) -> Tensor:
        """The images of the lowest scores, lowest first."""
        return torch.sort(self.scores, stable=True).indices[:count]


@torch.no_grad()
def adaptive_distance(
    images: Tensor,
    train: Tensor,
    *,
    alpha: float = ALPHA,
    neighbours: int = NEIGHBOURS,
    device: torch.device | str = "cpu",
) -> Nearness:
    """d(z, nearest) / (alpha * the mean of d(z, x) over the nearest training images, the nearest included).

    Both sets are stored in one scale, as integers or as floats such as [0, 1]; the score does not depend on it.
    Fewer training images than `neighbours` are all taken.
    """
    n = min(neighbours, len(train))
    centre = mean_image(train, device)
    scores, nearest = [], []
    for block in images.split(BLOCK):
        rows = candidates(block, train, centre, n)
        distances = distances_to(block.flatten(1).to(device).float(), train, rows)
        first = distances.min(dim=1)
        mean = distances.mean(dim=1)
        # all neighbours of a copy may be copies too
        scores.append(torch.where(mean > 0, first.values / (alpha * mean), 0.0).cpu())
        nearest.append(rows.gather(1, first.indices[:, None]).squeeze(1).cpu())
    return Nearness(torch.cat(scores), torch.cat(nearest))


def candidates(block: Tensor, train: Tensor, centre: Tensor, n: int) -> Tensor:
    """The rows of the n nearest training images of each image, ascending.

    Distances come from a matrix product, whose rounding is small beside those of the last neighbours but not beside
    zero. They only select; the caller computes the distances that count.
    """
    x = block.flatten(1).to(centre.device).float() - centre
    best = x.new_full((len(x), n), torch.inf)
    rows = torch.zeros((len(x), n), dtype=torch.int64, device=x.device)
    for start in range(0, len(train), TRAIN_BLOCK):
        numbers = torch.arange(start, min(start + TRAIN_BLOCK, len(train)))
        y = flat(train, numbers, centre.device) - centre
        squares = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * (x @ y.T)
        best, kept = torch.cat([best, squares], dim=1).topk(n, largest=False)
        rows = torch.cat([rows, numbers.to(x.device).expand(len(x), -1)], dim=1).gather(1, kept)
    return rows.sort(dim=1).values


def mean_image(train: Tensor, device: torch.device | str) -> Tensor:
    """The mean training image; subtracting it makes squares small, so that less is lost in their difference."""
    total = torch.zeros(train[0].numel(), device=device)
    for block in train.split(TRAIN_BLOCK):
        total += block.flatten(1).to(device).float().sum(0)
    return total / len(train)


def flat(train: Tensor, rows: Tensor, device: torch.device | str) -> Tensor:
    """Training images as rows of fp32 pixels."""
    return train[rows.flatten().to(train.device)].flatten(1).to(device).float()


def distances_to(x: Tensor, train: Tensor, rows: Tensor) -> Tensor:
    """Each image's distances from the training images in its row, difference by difference: a copy's is exactly zero."""
    some = max(1, NUMBERS // (rows.shape[1] * x.shape[1]))  # images whose neighbours fit in memory
    return torch.cat(
        [
            (flat(train, few, x.device).unflatten(0, few.shape) - own[:, None]).norm(dim=2)
            for own, few in zip(x.split(some), rows.split(some))
        ]
    )
