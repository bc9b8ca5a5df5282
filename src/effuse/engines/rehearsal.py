"""The rehearsal: the algorithm's own server program on shapes instead of numbers, so its traffic is exact."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from effuse.core.algorithm import Algorithm, Job
from effuse.core.data import Shard
from effuse.core.federation import Order
from effuse.core.machine import Machine, Meter, Work
from effuse.core.metric import Images
from effuse.core.model import Arch, Model
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import Fit
from effuse.core.workbench import SERVER
from effuse.engines.simulator import InProcess
from effuse.engines.state import Remembered


class Hollow(Machine):
    """Counts the work and does none of it."""

    def __init__(self) -> None:
        self.device = torch.device("meta")
        self.meter = Meter()
        self.steps: Counter[str] = Counter()
        self._nets: dict[Arch, nn.Module] = {}
        self._values: dict[Arch, tuple[Params, Buffers]] = {}

    def initial(self, arch: Arch, stream: Stream) -> Model:
        return Model(arch, *self.values(self._net(arch)))

    def load(self, model: Model, owner: object = None) -> nn.Module:
        return self._net(model.arch)

    def _net(self, arch: Arch) -> nn.Module:
        if arch not in self._nets:
            with self.device:
                self._nets[arch] = net = arch.build()
            net.arch = arch  # type: ignore[assignment]
            self._values[arch] = super().values(net)
        return self._nets[arch]

    def values(self, net: nn.Module) -> tuple[Params, Buffers]:
        return self._values[net.arch]  # type: ignore[index]

    def fit(self, net: nn.Module, work: Work) -> tuple[Fit, Params | None]:
        size = len(work.shard)
        steps, images = work.solver.steps_on(size), work.solver.images_on(size)
        self.steps["server" if work.place == SERVER else "client"] += steps
        params = Params.of(net)
        kept = None
        if work.solver.state == "kept":
            kept = Params({f"{m}/{k}": t for m in ("exp_avg", "exp_avg_sq") for k, t in params.items()})
        average, gradient = params if work.solver.ema else None, params if work.gradient else None
        return Fit(steps, images, 0.0, average, gradient), kept

    def generate(
        self, net: nn.Module, arch: Arch, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream
    ) -> Images:
        side = arch.shape.side
        pixels = torch.empty((n, arch.shape.channels, side, side), device=self.device)
        return Images(pixels, None if labels is None else labels.to(self.device))


class Rehearsal(InProcess):
    """Runs jobs on shapes."""

    rehearsing = True

    def __init__(self, algorithm: Algorithm, shards: Sequence[Shard], *, rounds: int, seed: int, wire: str = "fp32") -> None:
        self.machine = Hollow()
        kept: dict[int, Remembered] = defaultdict(Remembered)
        super().__init__(algorithm, shards, self.machine, rounds=rounds, seed=seed, wire=wire, snapshots=kept.__getitem__)

    def _dispatch(
        self, job: Job, orders: dict[int, Order], messages: dict[int, Any]
    ) -> Iterator[tuple[int, Any, str | None]]:
        for client in orders:
            self._charge("down", client, messages[client])
        return self._perform(orders, messages)

    def _perform(self, orders: dict[int, Order], messages: dict[int, Any]) -> Iterator[tuple[int, Any, str | None]]:
        for client, order in orders.items():
            reply, snapshot = self.worker.perform(order, messages[client])
            self._charge("up", client, reply)
            yield client, reply, snapshot
