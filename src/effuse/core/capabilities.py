"""What some algorithms do and most do not. An algorithm inherits a capability to declare it; a caller asks `isinstance`."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from effuse.core.algorithm import Algorithm, on_client
from effuse.core.message import message
from effuse.core.metric import Images
from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.sampler import Sampler
from effuse.core.workbench import Client

if TYPE_CHECKING:
    from effuse.core.federation import Federation


@message(name="personal.samples")
class PersonalSamples:
    """A client's personal model, shown by what it draws and by its digest; the model itself stays."""

    images: Images | None  # None when none were asked for
    digest: str


class Personal(Algorithm):
    """Every client ends with a model of its own. It stays at the client and is evaluated there."""

    @abstractmethod
    def owners(self, server: Any, fed: "Federation") -> Sequence[int]:
        """The clients that have trained a model of their own; only these are evaluated."""

    @abstractmethod
    def own(self, client: Client, model: Model) -> Model:
        """A client's own model, given the global one."""

    @property
    def averages(self) -> bool:
        """Whether clients keep moving averages of their models, which are then evaluated beside them."""
        return False

    def own_average(self, client: Client, model: Model) -> Model:
        """The moving average of a client's own model, where `averages` says that there is one."""
        raise NotImplementedError

    @on_client
    def draw(self, client: Client, model: Model, n: int, sampler: Sampler | None, average: bool) -> PersonalSamples:
        own = self.own_average(client, model) if average else self.own(client, model)
        return PersonalSamples(client.generate(own, n, sampler) if sampler and n else None, own.params.digest())


class Hierarchical(Algorithm):
    """Clients talk to edges, and edges to the cloud by `fed.carry`. Both links are charged apart."""


class Discloses(Algorithm):
    """Clients send histograms of their labels. A class must then have one number at every site."""

    @abstractmethod
    def spent(self, server: Any) -> dict[str, Any] | None:
        """The privacy that the histograms cost each client; None where they are exact."""


class Draws(Algorithm):
    """The server keeps synthetic images. They are measured beside the model's own when a run ends."""

    @abstractmethod
    def images(self, server: Any) -> Images | None:
        """The images, if there are any by now."""


class Averages(Algorithm):
    """The algorithm keeps a moving average of the weights itself. It is evaluated and saved beside the model."""

    @abstractmethod
    def average(self, server: Any) -> Params | None:
        """The average, where the solver keeps one."""


class StopsEarly(Algorithm):
    """Trained values may end a run before the recipe's last round. A rehearsal shows the longest run."""

    early_stop: ClassVar[str]  # the reason, for whoever reads the rehearsal

    @abstractmethod
    def done(self, server: Any) -> bool:
        """Whether to stop now."""


class Companions(Algorithm):
    """The loss calls frozen networks beside the one that trains."""

    frozen: ClassVar[int]  # passes up to a network's features that every training image costs beside its own
