"""A place to train and sample: the server has one, and every client is one."""

from typing import Any

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.errors import FederationError
from effuse.core.fit import Fit, Work
from effuse.core.machine import Machine
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import SGD, Solver
from effuse.core.spans import span
from effuse.core.task import Direction, Feature, Given, Loss, Task

SERVER = -1  # the server's number among those who draw random numbers
RESERVED = ("average",)  # what a loss finds in `given` without anybody handing it over


class Workbench:
    """Loads, fits and generates on a machine, with randomness keyed by round, job, call and place."""

    def __init__(self, machine: Machine, task: Task, rounds: int, id: int = SERVER) -> None:
        self.machine = machine
        self.task = task  # the recipe's: what is trained for unless a call says otherwise
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

    def load(self, model: Model) -> Net:
        """A network with the model's values, this job's to change."""
        return self.machine.load(model, self.id)

    def unload(self, net: Net) -> Model:
        """The network's present values as a model."""
        return Model(net.arch, *self.machine.values(net))

    def rate(self, solver: Solver) -> float:
        """The solver's learning rate in this round."""
        return solver.lr * solver.schedule.factor(self.federated, self.rounds)

    def fit(
        self,
        net: Net,
        solver: Solver,
        data: Shard,
        *,
        task: Task | None = None,
        loss: Loss | None = None,
        direction: Direction | None = None,
        given: Given | None = None,
        average: Params | None = None,
        uphill: float | None = None,
        report_gradient: bool = False,
        slot: str = "",
    ) -> Fit:
        """Train the network in place on a shard.

        `task` is the recipe's unless said. `loss` stands in place of the task's own, `direction` is made of the gradient, and
        `given` is what both are handed: numbers, tensors, Params, and models, which a loss may call as frozen networks.
        `average` is where a moving average of the weights goes on from. `uphill` is SAM's rho. `slot` tells apart networks of one
        architecture whose optimisers keep their moments under one kind of solver.
        """
        # moments mean nothing to another kind of solver, nor to another network; those of a cut one replace the wider one's
        place = f"optimiser of {solver.name} on {net.arch.whole()}" + (f" in {slot}" if slot else "")
        kept = _of(self.state.get(place), net) if solver.state == "kept" else None
        work = Work(
            solver=solver,
            task=task or self.task,
            shard=self._data(data),
            lr=self.rate(solver),
            stream=self.stream("fit"),
            place=self.id,
            where=self.where,
            loss=self._plain(loss),
            direction=self._plain(direction),
            given=self._given(given),
            optimiser=kept,
            average=average,
            uphill=uphill,
            report_gradient=report_gradient,
        )
        with span("step"):
            done, kept = self.machine.fit(net, work)
        if kept is not None:
            self.state[place] = kept
        return done

    def gradient(
        self,
        net: Net,
        data: Shard,
        *,
        batch: int,
        task: Task | None = None,
        loss: Loss | None = None,
        given: Given | None = None,
    ) -> Params:
        """The mean gradient over one pass of the shard's batches, with the weights as they are."""
        solver = SGD(lr=1.0, batch=batch, epochs=1)
        work = Work(
            solver=solver,
            task=task or self.task,
            shard=self._data(data),
            lr=1.0,
            stream=self.stream("fit"),
            place=self.id,
            where=self.where,
            loss=self._plain(loss),
            given=self._given(given),
            report_gradient=True,
            updates=False,
        )
        with span("step"):
            found = self.machine.fit(net, work)[0].gradient
        assert found is not None
        return found

    def apply(
        self, net: Net, function: Feature, data: Shard, *, task: Task | None = None, given: Given | None = None
    ) -> Tensor:
        """A function of the network and each image, without a gradient: rows in the shard's order, in evaluation mode."""
        shard, placed = self._data(data), self._given(given)
        self._plain(function)
        with span("step"):
            return self.machine.apply(net, function, task or self.task, shard, placed)

    def generate(
        self,
        model: Model,
        n: int,
        sampler: Sampler,
        labels: Tensor | None = None,
        *,
        task: Task | None = None,
        stream: Stream | None = None,
    ) -> Images:
        """Draw `n` images; a conditional model without labels draws its classes in turn."""
        if labels is None and model.arch.conditional:
            labels = torch.arange(n) % model.arch.shape.classes
        borrower = object()  # given back at once: a job that draws from a hundred models needs one network
        try:
            with span("sample"):
                net = self.machine.load(model, borrower)
                where = stream or self.stream("generate")
                return self.machine.generate(net, task or self.task, n, sampler, labels, where)
        finally:
            self.machine.release(borrower)

    @property
    def where(self) -> str:
        _, t, job, *_ = (*self._address.key, None, None, None)
        who = "the server" if self.id == SERVER else f"client {self.id}"
        return f"round {t}, {who}, job '{job}'"

    def _data(self, data: Shard) -> Shard:
        if not len(data):
            raise FederationError(f"{self.where}: there is no data to fit; relax the partition or drop this client")
        return data

    def _plain(self, function: Any) -> Any:
        """A function that a recording can be made of, and made again in another process."""
        if function is not None and (function.__closure__ or "<lambda>" in function.__qualname__):
            raise FederationError(
                f"{self.where}: {function.__qualname__} holds values of its own; a loss or direction is a plain function of a "
                "module, and what it needs goes through `given`"
            )
        return function

    def _given(self, given: Given | None) -> Given:
        taken = [name for name in RESERVED if name in (given or {})]
        if taken:
            raise FederationError(f"{self.where}: '{taken[0]}' of `given` is filled in by the fit; choose another name")
        return given or {}


def _of(kept: Params | None, net: Net) -> Params | None:
    """Kept moments, unless the network has been cut since: then they belong to a wider one."""
    if kept is None or any(t.dim() and t.shape != net.params[k.partition("/")[2]].shape for k, t in kept.items()):
        return None
    return kept


class Client(Workbench):
    """A workbench where data lives; `state` never leaves it."""

    def __init__(self, machine: Machine, task: Task, rounds: int, id: int, data: Shard) -> None:
        super().__init__(machine, task, rounds, id)
        self.data = data

    @property
    def size(self) -> int:
        return len(self.data)
