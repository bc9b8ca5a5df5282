"""The machine under a workbench: it holds networks, trains them and samples from them."""

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.errors import FederationError
from effuse.core.fit import Fit, Work
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.task import Feature, Given, Task


@dataclasses.dataclass
class Meter:
    """Counts work while it is done, to display progress."""

    images: int = 0  # trained
    evaluations: int = 0  # network evaluations while sampling
    watcher: Callable[[], None] = lambda: None
    stopped: bool = False  # the run is over: the next count raises KeyboardInterrupt
    # slots count from several threads
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    def trained(self, images: int) -> None:
        self._count(images, 0)

    def sampled(self, images: int) -> None:
        self._count(0, images)

    def _count(self, images: int, evaluations: int) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        with self.lock:
            self.images += images
            self.evaluations += evaluations
        self.watcher()


class Machine(ABC):
    """Holds networks, trains them and samples from them. It knows no recipe: every call carries its own settings."""

    device: torch.device
    meter: Meter
    stream: "torch.cuda.Stream | None" = None  # its own where machines share a GPU
    arithmetic: str = "fp32"  # of a network's evaluations
    threads: int | None = None  # torch threads per client, where several machines share a CPU

    def initial(self, arch: Arch, stream: Stream) -> Model:
        """A model to start from."""
        return arch.initial(stream).to(self.device)

    @abstractmethod
    def load(self, model: Model, owner: object = None) -> Net:
        """A network with the model's values, lent to the owner until `release`."""

    def release(self, owner: object = None) -> None:
        """Take back all networks lent to the owner."""

    def forget(self, arch: Arch) -> None:
        """Free what is cached for an architecture that the run no longer uses."""

    def values(self, net: Net) -> tuple[Params, Buffers]:
        """Copies of a network's present values."""
        return Params.of(net), Buffers.of(net)

    @abstractmethod
    def fit(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        """Train the network; returns the result, and the optimiser's state if the solver keeps it."""

    @abstractmethod
    def apply(self, net: Net, function: Feature, task: Task, shard: Shard, given: Given, stream: Stream) -> Tensor:
        """A function of the network and each image, in the shard's order, in evaluation mode and without gradients."""

    @abstractmethod
    def generate(self, net: Net, task: Task, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream) -> Images:
        """Draw images from a trained network."""


def require_rows(result: Tensor, n: int, function: Feature) -> None:
    """Refuse what a function made of a batch unless it has a row for each image; sums would depend on the batches."""
    if result.shape[:1] != (n,):
        name, shape = function.__qualname__, tuple(result.shape)
        raise FederationError(f"{name} returns a tensor of shape {shape} for {n} images; return a row for each image")
