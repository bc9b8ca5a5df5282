"""The workbench, on which models are trained and sampled: the server has one, and every client is one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.errors import FederationError, RecipeError
from effuse.core.fit import Fit, Private, Work
from effuse.core.machine import Machine
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, Net
from effuse.core.noise import KeyedNoise, Noise
from effuse.core.params import Params
from effuse.core.privacy import Release
from effuse.core.protection import Protection, protected
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import SGD, Solver
from effuse.core.spans import span
from effuse.core.task import Direction, Feature, Given, Loss, Task
from effuse.core.units import PrivacyUnits

SERVER = -1  # the server's id in addresses of random streams
RESERVED = ("average",)  # names in `given` that the fit fills in


class Workbench:
    """Loads, fits and generates on a machine, with random numbers keyed by round, job, call and client."""

    def __init__(self, machine: Machine, task: Task, rounds: int, id: int = SERVER) -> None:
        self.machine = machine
        self.task = task  # the recipe's task, used unless a call gives another
        self.rounds = rounds
        self.id = id
        self.state: dict[str, Any] = {}
        self.federated = 0  # the federated round, which schedules depend on
        self.protection: Protection | None = None  # of private data
        self.message = ""  # the digest of the job's message; private noise is never repeated under another message
        self.releases: list[Release] = []  # of private data, in this job
        self.charge: Callable[[Stream, Release], None] = lambda stream, release: None  # for noise without a budget
        self._address = Stream(())
        self._calls = 0

    def begin(self, address: Stream, federated: int) -> None:
        """Start a job or a server round, whose draws are keyed by this address."""
        self.end()
        self._address, self._calls, self.federated = address, 0, federated
        self.releases = []

    def end(self) -> None:
        """Return the networks of the job that has ended."""
        self.machine.release(self.id)

    def stream(self, purpose: str) -> Stream:
        """A new random stream; every call returns a different one."""
        self._calls += 1
        return self._address.child(self._calls, purpose)

    def by_federated_round(self, purpose: str) -> Stream:
        """A new stream keyed by the federated round, which does not count warm-ups, in place of the round."""
        own = self.stream(purpose)
        seed, _, *rest = own.key
        return Stream((seed, self.federated, *rest), own.secret)

    def lasting(self, purpose: str) -> Stream:
        """A stream that is the same in every round, so that repeated draws are equal."""
        return Stream((*self._address.key[:1], "lasting", self.id, purpose), self._address.secret)

    def initial(self, arch: Arch) -> Model:
        """A model with random weights from a stream of this workbench."""
        return self.machine.initial(arch, self.stream("initial"))

    def load(self, model: Model) -> Net:
        """A network with the model's values, which this job may change."""
        return self.machine.load(model, self.id)

    def unload(self, net: Net) -> Model:
        """The network's current values as a model."""
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

        `task` is the recipe's by default. `loss` replaces the task's loss. `direction` computes what replaces the gradient.
        Both get `given`: numbers, tensors, Params, and models, which a loss may call as frozen networks. A moving average
        of the weights continues from `average`. `uphill` is SAM's rho. `slot` separates the optimiser states of several
        networks of one architecture.
        """
        # moments fit one kind of solver and one architecture; those of a pruned network replace those of the whole one
        place = f"optimiser of {solver.name} on {net.arch.whole()}" + (f" in {slot}" if slot else "")
        moments = _fitting(self.state.get(place), net) if solver.state == "kept" else None
        source = self.stream("fit")
        work = Work(
            solver=solver,
            task=task or self.task,
            shard=self._data(data),
            lr=self.rate(solver),
            stream=source,
            place=self.id,
            where=self.where,
            loss=self._plain(loss),
            direction=self._plain(direction),
            given=self._given(given),
            optimiser=moments,
            average=average,
            uphill=uphill,
            report_gradient=report_gradient,
            private=self._private(net, solver, data, source, uphill),
        )
        with span("step"):
            result, moments = self.machine.fit(net, work)
        if moments is not None:
            self.state[place] = moments
        return result

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
        """The mean gradient over one pass of the shard's batches; neither weights nor buffers change."""
        if data.dataset.private:
            raise RecipeError(f"{self.where}: this gradient would leave the client without noise; use another algorithm")
        buffers = {k: b.clone() for k, b in net.buffers.items()}  # BatchNorm follows the data of a pass
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
            gradient = self.machine.fit(net, work)[0].gradient
        assert gradient is not None  # since report_gradient is set
        with torch.no_grad():
            for k, before in buffers.items():
                net.buffers[k].copy_(before)
        return gradient

    def apply(
        self, net: Net, function: Feature, data: Shard, *, task: Task | None = None, given: Given | None = None
    ) -> Tensor:
        """A function of the network and each image: rows in the shard's order, in evaluation mode, without gradients.

        It returns a row for each image of its batch. It computes in fp32, also where training steps are recorded.
        """
        shard, placed, source = self._data(data), self._given(given), self.stream("apply")
        self._plain(function)
        with span("step"):
            return self.machine.apply(net, function, task or self.task, shard, placed, source)

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
        """Draw `n` images. Without labels, a conditional model draws its classes in turn."""
        if labels is None and model.arch.conditional:
            labels = torch.arange(n) % model.arch.shape.classes
        borrower = object()  # the network is returned at once, so that a job with a hundred models needs only one
        try:
            with span("sample"):
                net = self.machine.load(model, borrower)
                source = stream or self.stream("generate")
                return self.machine.generate(net, task or self.task, n, sampler, labels, source)
        finally:
            self.machine.release(borrower)

    def noised(self, total: Tensor, *, sensitivity: float, noise: float | None, what: str) -> Tensor:
        """A sum over private images with Gaussian noise of standard deviation `noise * sensitivity`.

        `sensitivity` bounds the norm of what one unit adds to the sum. None leaves the noise to the budget; without a budget
        there is none.
        """
        source = self.stream("noised")
        if self.protection is not None:
            if noise == 0:
                raise RecipeError(f"{self.where}: {what} would leave the client without noise; set its noise, such as 10")
            noise = noise or self.protection.sigma
            if noise is None and self.machine.device.type != "meta":
                raise RecipeError(f"{self.where}: the noise of {what} is not settled; solve it from the budget, or set it")
            self.book(Release(what, noise=noise))
        if not noise or total.is_meta:
            return total
        return total + noise * sensitivity * self._noise(source).normal(total.numel(), total.device).view(total.shape)

    def book(self, release: Release) -> None:
        """Record that this job releases something of the private data."""
        self.releases.append(release)

    def _private(self, net: Net, solver: Solver, data: Shard, source: Stream, uphill: float | None) -> Private | None:
        private, release = protected(self.protection, net, solver, data, lambda: self._noise(source), uphill)
        if release is not None:
            self.book(release)
        return private

    def _noise(self, source: Stream) -> Noise:
        make = KeyedNoise if self.protection is None else self.protection.noise
        device = self.machine.device
        return make(source.child("noise", self.message), torch.device("cpu") if device.type == "meta" else device)

    @property
    def where(self) -> str:
        """The round, the client and the job, for error messages."""
        _, t, job, *_ = (*self._address.key, None, None, None)
        number = t + 1 if isinstance(t, int) else t  # rounds are shown counted from 1
        place = "the server" if self.id == SERVER else f"client {self.id}"
        return f"round {number}, {place}, job '{job}'"

    def _data(self, data: Shard) -> Shard:
        if not len(data):
            raise FederationError(f"{self.where}: there is no data to fit; relax the partition or drop this client")
        return data

    def _plain(self, function: Any) -> Any:
        """Refuse a closure or a lambda: its values would be lost when the step is captured, or built in another process."""
        if function is not None and (function.__closure__ or "<lambda>" in function.__qualname__):
            raise FederationError(
                f"{self.where}: {function.__qualname__} holds values of its own; define it in a module: "
                "what it needs goes through `given`"
            )
        return function

    def _given(self, given: Given | None) -> Given:
        reserved = [name for name in RESERVED if name in (given or {})]
        if reserved:
            raise FederationError(f"{self.where}: '{reserved[0]}' of `given` is filled in by the fit; choose another name")
        for name, value in (given or {}).items():
            if not isinstance(value, (float, Tensor, Params, Model)):  # a recorded step has a buffer for these alone
                kind = type(value).__name__
                raise FederationError(f"{self.where}: `given` has {kind} '{name}'; give floats, tensors, Params or models")
        return given or {}


def _fitting(moments: Params | None, net: Net) -> Params | None:
    """The optimiser's moments, unless the network has been pruned since and they no longer fit."""
    if moments is None or any(t.dim() and t.shape != net.params[k.partition("/")[2]].shape for k, t in moments.items()):
        return None
    return moments


class Client(Workbench):
    """A workbench with data; its `state` never leaves the client."""

    def __init__(self, machine: Machine, task: Task, rounds: int, id: int, data: Shard) -> None:
        super().__init__(machine, task, rounds, id)
        self.data = data

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def unit_weights(self) -> Tensor:
        """A weight for each image; those of a protected unit sum to one."""
        if self.protection is None:
            return torch.ones(self.size)
        return PrivacyUnits.of(self.data, self.protection.budget).weights
