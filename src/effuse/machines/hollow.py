"""The machine of a rehearsal: it counts the work without doing it. Networks and images are shapes without values."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.fit import Fit, Work
from effuse.core.machine import Machine, Meter, require_rows
from effuse.core.metric import Images
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream, keyed
from effuse.core.sampler import Sampler
from effuse.core.task import Batch, Feature, Given, Task
from effuse.core.workbench import SERVER
from effuse.machines.private import refuse_mixing


class Hollow(Machine):
    """Counts the work without doing it."""

    def __init__(self) -> None:
        self.device = torch.device("meta")
        self.meter = Meter()
        self.steps: Counter[str] = Counter()
        self.images: Counter[Arch] = Counter()  # trained on, by network
        self._tried: set[Any] = set()  # private losses
        self._nets: dict[Arch, Net] = {}
        self._values: dict[Arch, tuple[Params, Buffers]] = {}

    def initial(self, arch: Arch, stream: Stream) -> Model:
        return Model(arch, *self.values(self._net(arch)))

    def load(self, model: Model, owner: object = None) -> Net:
        return self._net(model.arch)

    def _net(self, arch: Arch) -> Net:
        if arch not in self._nets:
            with self.device:
                self._nets[arch] = net = Net(arch.build(), arch=arch)
            self._values[arch] = super().values(net)
        return self._nets[arch]

    def values(self, net: Net) -> tuple[Params, Buffers]:
        return self._values[net.arch]  # cached: listing a U-Net's values takes longer than the rest of a rehearsed round

    def fit(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        size = len(work.shard)
        units = size if work.private is None else len(work.private.units)
        steps, images = work.solver.steps_on(units), work.solver.images_on(units)
        self.steps["server" if work.place == SERVER else "client"] += steps
        self.images[net.arch] += images
        params, _ = self.values(net)
        moments = None
        if work.solver.state == "kept":
            moments = Params({f"{m}/{k}": t for m in ("exp_avg", "exp_avg_sq") for k, t in params.items()})
        average, gradient = params if work.solver.ema else None, params if work.report_gradient else None
        if work.private is not None:
            self._refuse_mixing(net, work)
        return Fit(steps, images, 0.0, average, gradient), moments

    def _refuse_mixing(self, net: Net, work: Work) -> None:
        """Try a private fit's loss on two images, once for each network and loss."""
        key = (net.arch, work.task, work.loss)
        if key in self._tried:
            return
        self._tried.add(key)
        real = _invented(net.arch)
        given = {k: _invented(v.arch) if isinstance(v, Model) else filled(v) for k, v in work.given.items()}
        average = {"average": dict(real.params)} if work.solver.ema else {}
        refuse_mixing(real, work.task, work, {**given, **average})

    def apply(self, net: Net, function: Feature, task: Task, shard: Shard, given: Given, stream: Stream) -> Tensor:
        data, n = shard.dataset, len(shard)
        x = torch.empty((n, *data.images.shape[1:]), device=self.device)
        columns = {k: torch.empty_like(c, device=self.device) for k, c in shard.columns.items()}
        labels = torch.zeros(2, dtype=torch.int64)
        few = task.draw(2, x.shape[1:], labels, torch.Generator().manual_seed(0))  # for their shapes
        drawn = {k: v.new_empty((n, *v.shape[1:]), device=self.device) for k, v in few.items()}
        batch = Batch(x, labels.new_empty(n, device=self.device), task, drawn, columns=columns)
        placed = {k: self._net(v.arch) if isinstance(v, Model) else v for k, v in given.items()}
        rows = function(net.eval(), batch, placed)
        require_rows(rows, n, function)
        return rows

    def generate(self, net: Net, task: Task, n: int, sampler: Sampler, labels: Tensor | None, stream: Stream) -> Images:
        side, channels, _ = net.arch.shape
        pixels = torch.empty((n, channels, side, side), device=self.device)
        return Images(pixels, None if labels is None else labels.to(self.device))


def _invented(arch: Arch) -> Net:
    """A network with random values, in evaluation mode."""
    with keyed(Stream(("tried",))), torch.device("cpu"):
        return Net(arch.build(), arch=arch).eval()


def filled(value: Any) -> Any:
    """Random values in place of shapes."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(value, Params):
        return Params({k: torch.randn(t.shape, generator=generator) for k, t in value.items()})
    if isinstance(value, Tensor):
        floats = value.is_floating_point()
        return torch.randn(value.shape, generator=generator) if floats else torch.zeros(value.shape, dtype=value.dtype)
    return torch.as_tensor(value)
