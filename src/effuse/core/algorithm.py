"""An algorithm: hyper-parameters, a server program, and the jobs it sends to clients."""

import dataclasses
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from effuse.core.errors import FederationError, WireError
from effuse.core.ledger import CLIENT_SERVER
from effuse.core.metric import Images
from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.sampler import Sampler
from effuse.core.solvers import Solver
from effuse.core.spec import Spec, spec
from effuse.core.wire import check, is_message, message
from effuse.core.workbench import Client

if typing.TYPE_CHECKING:
    from effuse.core.federation import Federation

FEDERATE = "federate"  # the phase whose rounds the recipe counts


@message(name="server")
class Server:
    """What the server knows after a round; it is a message, so a checkpoint is its wire form."""

    model: Model
    phase: str = dataclasses.field(default=FEDERATE, kw_only=True)


@message(name="personal.samples")
class Drawn:
    """A client's personal model, shown by what it draws and by its digest; the model itself stays."""

    images: Images | None  # None when none were asked for
    digest: str


@dataclasses.dataclass(frozen=True)
class Job:
    """What may be asked of a client: a name, the message it takes, the message it gives."""

    name: str
    arguments: type  # a message made from the signature
    returns: Any


def on_client(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method as a job; its annotated arguments and its return value are all that crosses."""
    function.__on_client__ = True  # type: ignore[attr-defined]
    return function


def _job(cls: type, function: Callable[..., Any]) -> Job:
    where = f"{cls.__qualname__}.{function.__name__}"
    hints = typing.get_type_hints(function)
    names = list(inspect.signature(function).parameters)[2:]  # self, client
    missing = [n for n in (*names, "return") if n not in hints]
    if missing:
        raise WireError(f"job {where}: '{missing[0]}' has no annotation; what crosses the wire must be declared")
    check(hints["return"], f"{where}'s return value")
    made = type(where, (), {"__annotations__": {n: hints[n] for n in names}, "__module__": cls.__module__})
    return Job(function.__name__, message(name=f"{cls.name}.{function.__name__}")(made), hints["return"])


@spec
class Algorithm(Spec, ABC):
    """A frozen set of hyper-parameters with straight-line code on both sides of `fed.ask`."""

    jobs: ClassVar[dict[str, Job]] = {}
    personal: ClassVar[bool] = False  # clients end up with models of their own, evaluated where they are
    frozen: ClassVar[int] = 0  # passes up to a network's features that every training image costs beside its own
    link: ClassVar[str] = CLIENT_SERVER  # what its clients talk over
    counts_labels: ClassVar[bool] = False  # clients tell histograms, whose classes must then mean the same at every site
    early_stop: ClassVar[str | None] = None  # the reason, where trained values may end a run early (see fed.rehearsing)

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        own = {name: _job(cls, f) for name, f in vars(cls).items() if getattr(f, "__on_client__", False)}
        inherited = {name: job for base in reversed(cls.__mro__) for name, job in vars(base).get("jobs", {}).items()}
        cls.jobs = {**inherited, **own}

    def solvers(self) -> list[Solver]:
        """Everything that trains here: the keys that are solvers."""
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return [v for v in values if isinstance(v, Solver)]

    def ready(self, clients: int) -> None:
        """Refuse, before anything is computed, what cannot work with that many clients."""

    def setup(self, model: Model, fed: "Federation") -> Server:
        """The state before the first round; neither fits nor generates."""
        return Server(model)

    @abstractmethod
    def round(self, server: Server, fed: "Federation") -> Server:
        """One round: ask clients, combine their answers."""

    def done(self, server: Server) -> bool:
        """Whether to stop before the recipe's last round."""
        return False

    def deliver(self, server: Server) -> Model:
        """The global model that is evaluated and saved."""
        return server.model

    def average(self, server: Server) -> Params | None:
        """A moving average of the weights that the algorithm keeps itself; reported beside the model."""
        return None

    def warnings(self, rounds: int) -> list[str]:
        """What a reader should know before a run of so many rounds."""
        return []

    def spent(self, server: Server) -> dict[str, Any] | None:
        """What clients have spent of their privacy, by what they told, where an algorithm asks for more than models."""
        return None

    def images(self, server: Server) -> Images | None:
        """Synthetic images that the server keeps; they are measured beside the model's own when a run ends."""
        return None

    def owners(self, server: Server, fed: "Federation") -> Sequence[int]:
        """The clients that have trained a personal model by now; those that have not would be looked at untrained."""
        return fed.clients

    def own(self, client: Client, model: Model) -> Model:
        """A client's personal model, given the global one."""
        raise FederationError(f"{self.name} has no personal models")

    def own_average(self, client: Client, model: Model) -> Model:
        """The moving average of a client's personal model, where `averages` says that there is one."""
        raise FederationError(f"{self.name} keeps no averages of personal models")

    @property
    def averages(self) -> bool:
        """Whether personal models have a moving average, which is then evaluated beside them."""
        return False

    @on_client
    def draw(self, client: Client, model: Model, n: int, sampler: Sampler | None, average: bool) -> Drawn:
        own = self.own_average(client, model) if average else self.own(client, model)
        return Drawn(client.generate(own, n, sampler) if sampler and n else None, own.params.digest())


Algorithm.jobs = {"draw": _job(Algorithm, Algorithm.draw)}


def job_of(algorithm: Algorithm, name: str) -> Job:
    """The declared job of that name; nothing else can be dispatched."""
    if name not in algorithm.jobs:
        raise FederationError(f"{algorithm.name} has no job '{name}'; it has {', '.join(sorted(algorithm.jobs))}")
    return algorithm.jobs[name]


def fields_of(value: Any) -> dict[str, Any]:
    """A message's fields without copying what they hold."""
    if not is_message(type(value)):
        raise WireError(f"{type(value).__name__} is not a message")
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
