"""A place to train and sample: the server has one, and every client is one."""

from typing import Any

import torch
from torch import Tensor, nn

from effuse.core.data import Shard
from effuse.core.errors import FederationError
from effuse.core.machine import Machine, Work
from effuse.core.metric import Images
from effuse.core.model import Model
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import Fit, Solver
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
        self._address, self._calls, self.federated = address, 0, federated
        self.machine.release()

    def stream(self, purpose: str) -> Stream:
        """A stream of this place's own; every use gets a new one."""
        self._calls += 1
        return self._address.child(self._calls, purpose)

    def load(self, model: Model) -> nn.Module:
        """A network with the model's values, this job's to change."""
        net = self.machine.load(model)
        net.arch = model.arch  # type: ignore[assignment]
        return net

    def unload(self, net: nn.Module) -> Model:
        """The network's present values as a model."""
        return Model(net.arch, Params.of(net), Buffers.of(net))  # type: ignore[arg-type]

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
    ) -> Fit:
        """Train the network in place on a shard."""
        if not len(data):
            raise FederationError(f"{self.where}: there is no data to fit; relax the partition or drop this client")
        kept = self.state.get("optimiser") if solver.state == "kept" else None
        if kept is not None and self.state.get("optimiser_arch") != str(net.arch):
            kept = None  # moments of a network that has since been cut mean nothing
        work = Work(
            solver=solver, shard=data, lr=self.rate(solver), stream=self.stream("fit"), place=self.id, where=self.where,
            loss=loss, direction=direction, given=given or {}, optimiser=kept, average=average,
        )  # fmt: skip
        done, kept = self.machine.fit(net, work)
        if kept is not None:
            self.state["optimiser"], self.state["optimiser_arch"] = kept, str(net.arch)
        return done

    def generate(
        self, model: Model, n: int, sampler: Sampler, labels: Tensor | None = None, stream: Stream | None = None
    ) -> Images:
        """Draw `n` images; a conditional model without labels draws its classes in turn."""
        if labels is None and getattr(model.arch, "conditional", False):
            labels = torch.arange(n) % model.arch.shape.classes
        return self.machine.generate(self.load(model), model.arch, n, sampler, labels, stream or self.stream("generate"))

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
