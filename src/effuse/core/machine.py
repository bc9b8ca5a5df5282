"""The machine under a workbench: where networks live, learn and draw."""

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.fit import Fit, Work
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.task import Feature, Given, Task


@dataclasses.dataclass
class Meter:
    """Counts work as it is done, for whoever shows progress."""

    images: int = 0  # trained
    evaluations: int = 0  # network evaluations while sampling
    watcher: Callable[[], None] = lambda: None
    stopped: bool = False  # nobody wants the work any more: whoever counts here is to stop
    lock: threading.Lock = dataclasses.field(
        default_factory=threading.Lock, repr=False
    )  # slots count from threads of their own

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
    """Where networks live, learn and draw; it knows no recipe: every call says what is to be done."""

    device: torch.device
    meter: Meter
    stream: "torch.cuda.Stream | None" = None  # where it works beside other machines of the same GPU
    arithmetic: str = "fp32"  # of a network's evaluations
    threads: int | None = None  # torch's own for each client at a time, where several machines share a CPU

    def initial(self, arch: Arch, stream: Stream) -> Model:
        """A model to start from."""
        return arch.initial(stream).to(self.device)

    @abstractmethod
    def load(self, model: Model, owner: object = None) -> Net:
        """A network holding the model's values; it is the owner's until `release`."""

    def release(self, owner: object = None) -> None:
        """Take back every network that the owner was lent."""

    def forget(self, arch: Arch) -> None:
        """Drop what is kept for networks of an architecture that the run has left behind."""

    def values(self, net: Net) -> tuple[Params, Buffers]:
        """Copies of a network's present values."""
        return Params.of(net), Buffers.of(net)

    @abstractmethod
    def fit(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        """Train the network; returns what was done and the optimiser's state where it is kept."""

    @abstractmethod
    def apply(self, net: Net, function: Feature, task: Task, shard: Shard, given: Given) -> Tensor:
        """A function of the network and each image, in the shard's order, in evaluation mode and without a gradient."""

    @abstractmethod
    def generate(self, net: Net, task: Task, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream) -> Images:
        """Draw images from a trained network."""
