"""What a guide is: a source of frozen features of an image under a class, and the basis that all clients share."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from effuse.core.data import Shard
from effuse.core.model import Net
from effuse.core.prelude import Client, Federation, Model, RecipeError, message, spec
from effuse.core.rng import Stream
from effuse.core.spec import Spec
from effuse.tasks.denoise import NULL


@message(name="guide.basis")
class Basis:
    """What brings a guide's channels to the width of a classifier's features, equal at every client."""

    centre: tuple[Tensor, ...]  # of each stage, subtracted first
    axes: tuple[Tensor, ...]  # of each stage, channels x width; of class vectors, the vectors
    condition: Tensor | None  # from a classifier's features to a condition of the guide's network


@spec
class Guide(Spec, ABC):
    """A source of frozen features, as wide as the classifier's."""

    labelled: ClassVar[bool] = True  # whether features depend on the class that is asked for
    conditioned: ClassVar[bool] = False  # whether it takes a condition, such as a classifier's features

    def ready(self, width: int, classes: int, t: int) -> None:
        """Refuse what cannot guide a network with features of that width, at that time step; without labels classes is 0."""

    @property
    def asks(self) -> bool:
        """Whether its basis is made from moments that the clients tell."""
        return False

    def model(self, fed: Federation) -> Model | None:
        """The frozen network that every client is sent; None where there is none, or every client has its own copy."""
        return None

    def open(self, client: Client, model: Model | None) -> Net | None:
        """The network at a client: the one that was sent, or its own copy."""
        return None if model is None else client.load(model)

    @abstractmethod
    def basis(self, width: int, classes: int, source: Stream, moments: Tensor | None) -> Basis:
        """The basis for a classifier with features of that width, random or from the moments that it asks for."""

    @property
    def cost(self) -> int:
        """Multiply-accumulates of one image under one class."""
        return 0

    def moments(self, client: Client, net: Net, t: int, labels: Tensor | None = None) -> Tensor:
        """What a client tells for the basis, to be averaged over images; only of a guide that asks.

        Without `labels`, the images are asked for under their own.
        """
        raise RecipeError(f"algorithm.guide: {self.name} asks for no moments")

    def unlabelled(self, classes: int) -> tuple[int, tuple[int, ...]]:
        """In runs without labels, what is asked for: one for noisy images; for clean ones a positive, then negatives.

        A positive alone has the other images of a batch as its negatives.
        """
        return NULL, (NULL,)

    def entry(self, width: int, source: Stream) -> Tensor | None:
        """From a unit vector of that width to a condition; None where it takes none."""
        return None

    @abstractmethod
    def features(
        self,
        client: Client,
        net: Net | None,
        basis: Basis,
        labels: Tensor,
        t: int | None,
        z: Tensor | None = None,
        data: Shard | None = None,
    ) -> Tensor:
        """A vector for each of the client's images, or of those in `data`, asked for under these labels.

        The image has the noise of step `t`, or none at None. `z` goes in as a condition.
        """
