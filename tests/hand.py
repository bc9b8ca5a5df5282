"""A federation of two clients and one weight, for tests with numbers computed by hand."""

import numpy as np
import torch
from torch import Tensor, nn

from effuse.core.data import Dataset, Partition, Source, Split
from effuse.core.model import Arch, Net
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.spec import spec
from effuse.core.task import Batch, Task
from effuse.models.saved import write_plain
from effuse.runs.driver import run
from effuse.runs.save import load


@spec
class HandImages(Source):
    """Four images of one pixel: three white (1), one black (-1)."""

    def load(self, split: Split) -> Dataset:
        pixels = torch.tensor([255, 255, 255, 0], dtype=torch.uint8).view(4, 1, 1, 1)
        return Dataset(pixels, torch.tensor([0, 0, 0, 1]), ("white", "black"))


@spec
class HandSplit(Partition):
    """Client 0 has the white images, client 1 the black one."""

    def split(self, dataset: Dataset, clients: int, seed: int) -> list[np.ndarray]:
        return [np.array([0, 1, 2]), np.array([3])]


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x))


@spec
class HandNet(Arch):
    """One weight, initially zero."""

    def build(self) -> nn.Module:
        return OneWeight()

    def save(self, net, folder, scheduler) -> None:
        write_plain(self, net, folder, scheduler)


@spec
class HandTask(Task):
    """(w - x)^2, whose gradient is 2 (w - x)."""

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def loss(self, net: Net, batch: Batch) -> Tensor:
        return batch.mean((net(batch.x) - batch.x.flatten()) ** 2)


def one_weight_recipe(algorithm, **changes) -> Recipe:
    values = {
        "data": HandImages(),
        "clients": 2,
        "partition": HandSplit(),
        "model": HandNet(),
        "task": HandTask(),
        "algorithm": algorithm,
        "rounds": 1,
        "evaluate": Evaluate(grid=0),
        "threads": 1,
    }
    return Recipe(**(values | changes))


def trained(recipe: Recipe, folder) -> float:
    """The weight after a run."""
    run(recipe, folder)
    return load(folder).model.params["w"].item()
