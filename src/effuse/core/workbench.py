"""A place to train and sample: the server has one, and every client is one."""

from typing import Any

import torch
from torch import Tensor, nn

from effuse.core.data import Shard
from effuse.core.errors import FederationError
from effuse.core.machine import Machine, Work
from effuse.core.metric import Images
from effuse.core.model import Arch, Model
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import Fit, Solver
from effuse.core.spans import span
from effuse.core.task import Direction, Given, Loss

SERVER = -1  # the server's number among those who draw random numbers


class Workbench:
    """Loads, fits and generates on a machine, with randomness keyed by round, job, call and place."""

    def __init__(self, machine: Machine, rounds: int, id: int = SERVER) -> None:
        self.machine = machine
        self.rounds = rounds
        self.id = id
        self.state: dict[str, Any] = {}
        self.federated = 0  # the federated round, by which schedules go
        self._address = Stream(())
        self._calls = 0

    def begin(self, address: Stream, federated: int) -> None:
        """Start a job or a server round: its draws are keyed by this address."""
        self.end()
        self._address, self._calls, self.federated = address, 0, federated

    def end(self) -> None:
        """Give back the networks of the job that is over."""
        self.machine.release(self.id)

    def stream(self, purpose: str) -> Stream:
        """A stream of this place's own; every use gets a new one."""
        self._calls += 1
        return self._address.child(self._calls, purpose)

    def by_federated_round(self, purpose: str) -> Stream:
        """The same, keyed by the federated round in place of the round, which counts warm-ups and the like, too."""
        own = self.stream(purpose)
        seed, _, *rest = own.key
        return Stream((seed, self.federated, *rest), own.secret)

    def lasting(self, purpose: str) -> Stream:
        """A stream that is the same in every round: what is drawn from it again is what was drawn before."""
        return Stream((*self._address.key[:1], "lasting", self.id, purpose), self._address.secret)

    def initial(self, arch: Arch) -> Model:
        """A model to start from, with random weights of this place's own."""
        return self.machine.initial(arch, self.stream("initial"))

    def load(self, model: Model) -> nn.Module:
        """A network with the model's values, this job's to change."""
        return self.machine.load(model, self.id)

    def unload(self, net: nn.Module) -> Model:
        """The network's present values as a model."""
        return Model(net.arch, *self.machine.values(net))  # type: ignore[arg-type]

    def rate(self, solver: Solver) -> float:
        """The solver's learning rate in this round."""
        return solver.lr * solver.schedule.factor(self.federated, self.rounds)

    def fit(
        self,
        net: nn.Module,
        solver: Solver,
        data: Shard,
        *,
        loss: Loss | None = None,
        direction: Direction | None = None,
        given: Given | None = None,
        average: Params | None = None,
        rho: float | None = None,
        gradient: bool = False,
    ) -> Fit:
        """Train the network in place on a shard."""
        if not len(data):
            raise FederationError(f"{self.where}: there is no data to fit; relax the partition or drop this client")
        for function in (loss, direction):
            if function is not None and (function.__closure__ or "<lambda>" in function.__qualname__):
                raise FederationError(
                    f"{self.where}: {function.__qualname__} holds values of its own; a loss or direction is a plain function of a "
                    "module, and what it needs goes through `given`"
                )
        # moments mean nothing to another kind of solver, nor to a network that has since been cut
        place = f"optimiser of {solver.name} on {net.arch}"
        kept = self.state.get(place) if solver.state == "kept" else None
        work = Work(
            solver=solver, shard=data, lr=self.rate(solver), stream=self.stream("fit"), place=self.id, where=self.where,
            loss=loss, direction=direction, given=given or {}, optimiser=kept, average=average,
            rho=rho, gradient=gradient,
        )  # fmt: skip
        with span("step"):
            done, kept = self.machine.fit(net, work)
        if kept is not None:
            for old in [k for k in self.state if k.startswith(f"optimiser of {solver.name} on ")]:
                del self.state[old]
            self.state[place] = kept
        return done

    def generate(
        self, model: Model, n: int, sampler: Sampler, labels: Tensor | None = None, stream: Stream | None = None
    ) -> Images:
        """Draw `n` images; a conditional model without labels draws its classes in turn."""
        if labels is None and model.arch.conditional:
            labels = torch.arange(n) % model.arch.shape.classes
        borrower = object()  # given back at once: a job that draws from a hundred models needs one network
        try:
            with span("sample"):
                net = self.machine.load(model, borrower)
                return self.machine.generate(net, model.arch, n, sampler, labels, stream or self.stream("generate"))
        finally:
            self.machine.release(borrower)

    @property
    def where(self) -> str:
        _, t, job, *_ = (*self._address.key, None, None, None)
        who = "the server" if self.id == SERVER else f"client {self.id}"
        return f"round {t}, {who}, job '{job}'"


class Client(Workbench):
    """A workbench where data lives; `state` never leaves it."""

    def __init__(self, machine: Machine, rounds: int, id: int, data: Shard) -> None:
        super().__init__(machine, rounds, id)
        self.data = data

    @property
    def size(self) -> int:
        return len(self.data)
