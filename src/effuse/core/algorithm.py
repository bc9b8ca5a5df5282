"""An algorithm: hyper-parameters, a server program, and the jobs it sends to clients."""

import dataclasses
import functools
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

from effuse.core.errors import FederationError, WireError
from effuse.core.message import check, is_message, message
from effuse.core.model import Arch, Model
from effuse.core.solvers import Solver
from effuse.core.spec import Spec, spec
from effuse.core.task import Task

if typing.TYPE_CHECKING:
    from effuse.core.federation import Federation
    from effuse.core.recipe import Recipe

FEDERATE = "federate"  # the phase whose rounds the recipe counts


@message(name="server")
class Server:
    """The server's state after a round. It is a message, so a checkpoint is its wire form."""

    model: Model
    phase: str = dataclasses.field(default=FEDERATE, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Job:
    """A request that a client can carry out: its name, the message it takes and the type that it returns."""

    name: str
    arguments: type  # a message made from the signature
    returns: Any
    covered: bool = False  # whether its reply may be sent under a budget


class Trained(NamedTuple):
    """A network that an algorithm trains, the task, and the solver."""

    arch: Arch
    task: Task
    solver: Solver


F = TypeVar("F", bound=Callable[..., Any])


@typing.overload
def on_client(function: F) -> F: ...
@typing.overload
def on_client(*, covered: bool = False) -> Callable[[F], F]: ...
def on_client(function: Any = None, *, covered: bool = False) -> Any:
    """Mark a method as a job. Only its annotated arguments and its return value cross the wire.

    `covered=True` says that the reply holds nothing of the client's images but what private fits, `noised` and disclosures
    release, and the number of images. Other jobs are refused where the recipe has a budget.
    """
    if function is None:
        return functools.partial(on_client, covered=covered)
    function.__on_client__, function.__covered__ = True, covered
    return function


def _job(cls: type["Algorithm"], function: Callable[..., Any]) -> Job:
    where = f"{cls.__qualname__}.{function.__name__}"
    hints = typing.get_type_hints(function)
    names = list(inspect.signature(function).parameters)[2:]  # self, client
    missing = [n for n in (*names, "return") if n not in hints]
    if missing:
        raise WireError(f"job {where}: '{missing[0]}' has no annotation; what crosses the wire must be declared")
    check(hints["return"], f"{where}'s return value")
    made = type(where, (), {"__annotations__": {n: hints[n] for n in names}, "__module__": cls.__module__})
    arguments: type = message(name=f"{cls.name}.{function.__name__}")(made)
    return Job(function.__name__, arguments, hints["return"], getattr(function, "__covered__", False))


@spec
class Algorithm(Spec, ABC):
    """Hyper-parameters, and straight-line code on both sides of `fed.ask`.

    What only few algorithms do, such as personal models or edges, is declared by a base class of `core/capabilities.py`.
    """

    jobs: ClassVar[dict[str, Job]] = {}

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        own = {name: _job(cls, f) for name, f in vars(cls).items() if getattr(f, "__on_client__", False)}
        inherited = {name: job for base in reversed(cls.__mro__) for name, job in vars(base).get("jobs", {}).items()}
        cls.jobs = {**inherited, **own}

    def solvers(self) -> list[Solver]:
        """All solvers among the keys."""
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return [v for v in values if isinstance(v, Solver)]

    def trains(self, recipe: "Recipe") -> list[Trained]:
        """The networks that a run trains; by default the recipe's model, by every solver."""
        return [Trained(recipe.model, recipe.task, solver) for solver in self.solvers()]

    def ready(self, clients: int) -> None:
        """Refuse settings that cannot work with that many clients, before anything is computed."""

    def setup(self, model: Model, fed: "Federation") -> Server:
        """The state before the first round. It may neither fit nor generate."""
        return Server(model)

    @abstractmethod
    def round(self, server: Any, fed: "Federation") -> Server:
        """One round: ask clients, combine their answers. `server` is what `setup` or the last round returned."""

    def deliver(self, server: Server) -> Model:
        """The global model that is evaluated and saved."""
        return server.model

    def warnings(self, rounds: int) -> list[str]:
        """Warnings to print before a run of that many rounds."""
        return []


def job_of(algorithm: Algorithm, name: str) -> Job:
    """The declared job of that name; only declared jobs can be dispatched."""
    if name not in algorithm.jobs:
        raise FederationError(f"{algorithm.name} has no job '{name}'; it has {', '.join(sorted(algorithm.jobs)) or 'none'}")
    return algorithm.jobs[name]


def fields_of(value: Any) -> dict[str, Any]:
    """A message's fields; their values are not copied."""
    if not is_message(type(value)):
        raise WireError(f"{type(value).__name__} is not a message")
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
