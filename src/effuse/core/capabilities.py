"""Capabilities that few algorithms have. An algorithm inherits from a capability to declare it; callers use `isinstance`."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from effuse.core.algorithm import Algorithm, on_client
from effuse.core.data import Dataset, Shard
from effuse.core.errors import FederationError
from effuse.core.message import message
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Params
from effuse.core.sampler import Sampler
from effuse.core.task import Batch, Given, Task
from effuse.core.workbench import Client

if TYPE_CHECKING:
    from effuse.core.federation import Federation
    from effuse.core.recipe import Recipe


@message(name="personal.samples")
class PersonalSamples:
    """Images from a client's personal model, and its digest. The model itself stays at the client."""

    images: Images | None  # None when no images were requested
    digest: str


@message(name="personal.scores")
class PersonalScores:
    """The class scores that a client's personal model gives to images of the server."""

    scores: Tensor


def scored(net: Net, batch: Batch, given: Given) -> Tensor:
    return net(batch.x)


class Personal(Algorithm):
    """Every client ends with its own model. It stays at the client and is evaluated there."""

    @abstractmethod
    def owners(self, server: Any, fed: "Federation") -> Sequence[int]:
        """The clients that have trained their own model; only these are evaluated."""

    @abstractmethod
    def own(self, client: Client, model: Model) -> Model:
        """A client's own model, given the global one."""

    @property
    def averages(self) -> bool:
        """Whether clients keep moving averages of their models; the averages are then evaluated too."""
        return False

    def own_average(self, client: Client, model: Model) -> Model:
        """The moving average of a client's own model; called only where `averages` is true."""
        raise FederationError(f"{self.name} says that its clients keep averages, and does not say which")

    @on_client(covered=True)
    def draw(self, client: Client, model: Model, n: int, sampler: Sampler | None, average: bool) -> PersonalSamples:
        own = self.own_average(client, model) if average else self.own(client, model)
        return PersonalSamples(client.generate(own, n, sampler) if sampler and n else None, own.params.digest())

    @on_client(covered=True)
    def classify(self, client: Client, model: Model, images: Tensor, peak: int, average: bool) -> PersonalScores:
        own = self.own_average(client, model) if average else self.own(client, model)
        unknown = torch.zeros(len(images), dtype=torch.int64, device="cpu" if images.is_meta else images.device)
        data = Dataset(images, unknown, ("unknown",), peak=peak)
        return PersonalScores(client.apply(client.load(own), scored, Shard.whole(data)))


class Hierarchical(Algorithm):
    """Clients exchange messages with edges, and edges with the cloud by `fed.carry`. Both links are charged separately."""


class Discloses(Algorithm):
    """Clients send histograms of their labels. A class must then have the same number at every site."""

    @abstractmethod
    def spent(self, server: Any) -> dict[str, Any] | None:
        """The privacy budget that the histograms cost each client; None where they are exact."""


class Draws(Algorithm):
    """The server holds synthetic images. They are measured, like those of the model, when a run ends."""

    generated: ClassVar[bool] = True  # by a network; other images may be those of clients, and are never released

    @abstractmethod
    def images(self, server: Any) -> Images | None:
        """The images, if there are any yet."""

    def drawn_from(self, recipe: "Recipe") -> list[tuple[Arch, Task]]:
        """The networks that the images are drawn from, and their tasks; by default the run's own."""
        return [(recipe.model, recipe.task)]


class Prepares(Algorithm):
    """Rounds of preparation come before the federated ones. A run may take them over from another run that had the same."""

    @abstractmethod
    def prepares(self, server: Any) -> bool:
        """Whether the next round is one of preparation."""

    @abstractmethod
    def preparation(self) -> Mapping[str, Any]:
        """The keys that decide what the preparation ends in."""

    @abstractmethod
    def prepared(self, server: Any, other: Any) -> Any:
        """`server`, the state before the first round, with what the preparation of the state `other` ended in."""


class Averages(Algorithm):
    """The algorithm maintains its own moving average of the weights, which is evaluated and saved with the model."""

    @abstractmethod
    def average(self, server: Any) -> Params | None:
        """The average, where the solver keeps one."""


class StopsEarly(Algorithm):
    """Trained values may end a run before the recipe's last round. A rehearsal assumes that they do not."""

    early_stop: ClassVar[str]  # the reason, which the rehearsal prints

    @abstractmethod
    def done(self, server: Any) -> bool:
        """Whether to stop now."""


class Companions(Algorithm):
    """The loss calls frozen networks in addition to the one that is trained."""

    frozen: ClassVar[int]  # additional forward passes, up to the features, that every training image costs
