"""A network that learns images by heart, and random images of which nothing else can be learnt, for tests of audits."""

import torch
from torch import Tensor, nn

from effuse.core.data import Dataset, Source, Split
from effuse.core.model import Arch
from effuse.core.rng import Stream
from effuse.core.spec import spec
from effuse.models.saved import write_plain


class Table(nn.Module):
    """Dense layers from all pixels and the time to all pixels."""

    def __init__(self, pixels: int, width: int) -> None:
        super().__init__()
        self.down, self.middle = nn.Linear(pixels + 1, width), nn.Linear(width, width)
        self.up = nn.Linear(width, pixels)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None, give: str = "output") -> Tensor:
        hidden = torch.relu(self.down(torch.cat([x.flatten(1), t[:, None] / 10.0], dim=1)))
        return self.up(torch.relu(self.middle(hidden))).view_as(x)


@spec
class Memoriser(Arch):
    """The network above as an architecture."""

    parts = {"encoder": ("down",), "bottleneck": ("middle",), "decoder": ("up",)}
    width: int = 128

    def build(self) -> nn.Module:
        return Table(self.shape.channels * self.shape.side**2, self.width)

    def save(self, net, folder, scheduler) -> None:
        write_plain(self, net, folder, scheduler)


@spec
class RandomImages(Source):
    """Random pixels in two classes, without anything in common."""

    n: int = 64
    test: int = 200
    side: int = 4

    def load(self, split: Split) -> Dataset:
        return random_images(self.n if split == "train" else self.test, split, self.side)


def random_images(n: int, name: str, side: int = 4) -> Dataset:
    pixels = torch.randint(256, (n, 1, side, side), generator=Stream(("random images", name)).torch(), dtype=torch.uint8)
    return Dataset(pixels, torch.arange(n) % 2, ("a", "b"))


@spec
class LabelledMemoriser(Memoriser):
    """The same as a conditional network, which does not look at the labels."""

    conditional = True
