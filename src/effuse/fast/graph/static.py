"""The static buffers of a recorded fit: weights, data and randomness are copied in before each replay."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.fit import Fit, Work, kept_state
from effuse.core.model import Model, Net, fill
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.task import Batch
from effuse.machines.eager import AVERAGE, Step

if TYPE_CHECKING:
    from effuse.fast.graph.captured import Captured


class StaticFit(ABC):
    """A network, its optimiser and one batch at fixed addresses, to which a recording refers."""

    plain: ClassVar[bool] = False  # whether networks keep torch's own operations
    draws = False  # whether a step draws from torch's default generator

    def __init__(self, machine: "Captured", net: Net, work: Work, frozen: tuple[str, ...], size: int) -> None:
        self.machine, self.net, self.task, self.solver, device = machine, net, work.task, work.solver, machine.device
        self.used = False  # in the current run
        data = work.shard.dataset
        self.params = self.net.params
        for name in frozen:
            self.params[name].requires_grad_(False)
        self.lr = torch.zeros((), device=device)
        self.optimiser = self.solver.optimiser(list(self.params.values()), self.lr)
        self.given = {
            k: machine.companion(v.arch, self.plain) if isinstance(v, Model) else _buffer(v, device)
            for k, v in work.given.items()
        }
        self.average = {k: torch.zeros_like(p) for k, p in self.params.items()} if self.solver.ema else None
        if self.average is not None:
            self.given[AVERAGE] = self.average
        self.total = {k: torch.zeros_like(p) for k, p in self.params.items()} if work.report_gradient else None
        self.uphill = torch.zeros((), device=device) if work.uphill is not None else None
        self.stored = torch.zeros((size, *data.images.shape[1:]), dtype=data.images.dtype, device=device)
        self.labels = torch.zeros(size, dtype=torch.int64, device=device)
        self.columns = {
            k: torch.zeros((size, *c.shape[1:]), dtype=c.dtype, device=device) for k, c in work.shard.columns.items()
        }
        generator = Stream(("capture",)).torch(device)
        image = data.images.shape[1:]
        self.drawn = {k: v.contiguous().clone() for k, v in self.task.draw(size, image, self.labels, generator).items()}
        self.chances = data.chances(size, generator)
        # a recording outlives its first fit and its run, so it must not hold references to their data
        self.format = dataclasses.replace(
            data, images=data.images[:0].clone(), labels=data.labels[:0].clone(), groups=None, domains=None
        )

    @abstractmethod
    def run(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        """Replay a whole fit: copy the weights in, make the steps, copy the weights out."""

    def step(self, work: Work, around: Callable[[], AbstractContextManager[object]]) -> Step:
        """The training step over these buffers."""
        return Step(self.net, self.optimiser, work, self.given, self.average, self.total, self.uphill, around)

    def batch(self, weight: Tensor | None = None) -> Batch:
        """The batch in the buffers, channels last."""
        x = self.format.changed(self.format.floats(self.stored), self.chances)
        x = x.contiguous(memory_format=torch.channels_last)
        return Batch(x, self.labels, self.task, self.drawn, weight, self.columns)

    def begin(self, net: Net, work: Work) -> None:
        """Copy in what a fit starts from."""
        self.used = True
        torch._foreach_copy_(_values(self.net), _values(net))
        self._reset(work)

    def load(self, shard: Shard, rows: Tensor, chosen: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Copy in the images of a batch, and draw its random numbers. `rows` and `chosen` are as `located` gave them."""
        data, size = shard.dataset, len(self.labels)
        torch.index_select(data.images, 0, rows, out=self.stored)
        torch.index_select(data.labels, 0, rows, out=self.labels)
        for k, column in self.columns.items():
            column.copy_(shard.columns[k].index_select(0, chosen[k]))
        for k, v in self.task.draw(size, data.images.shape[1:], self.labels, generator).items():
            self.drawn[k].copy_(v)
        for k, v in data.chances(size, generator).items():
            self.chances[k].copy_(v)

    def end(self, net: Net, work: Work) -> tuple[Params | None, Params | None]:
        """Copy the weights out; returns their moving average and the optimiser's moments, where they are kept."""
        torch._foreach_copy_(_values(net), _values(self.net))
        kept = None
        if work.solver.state == "kept":  # with the moments of layers that this fit did not train
            kept = Params({**(work.optimiser or {}), **kept_state(self.optimiser, self.params)})
        average = None
        if self.average is not None:
            average = Params({k: t.clone(memory_format=torch.contiguous_format) for k, t in self.average.items()})
        return average, kept

    def _reset(self, work: Work) -> None:
        self.lr.fill_(work.lr)
        moments = [v for state in self.optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
        sums = list((self.total or {}).values())
        if moments or sums:
            torch._foreach_zero_(moments + sums)
        for full, value in (work.optimiser or {}).items():
            key, _, name = full.partition("/")
            own = self.optimiser.state[self.params[name]].get(key)
            if own is not None:  # a layer that is frozen since has moments and no step
                own.copy_(value)  # in place: the recording refers to these tensors by address
        for k, v in work.given.items():
            _fill(self.given[k], v)
        if self.uphill is not None and work.uphill is not None:
            self.uphill.fill_(work.uphill)
        if self.average is not None:
            start = work.average or self.params
            torch._foreach_copy_(list(self.average.values()), [start[k] for k in self.average])


def located(shard: Shard, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The row numbers of images on the device of the data, and their positions on the device of each column."""
    rows = shard.rows[positions].to(shard.dataset.images.device)
    return rows, {k: positions.to(c.device) for k, c in shard.columns.items()}


def _values(net: Net) -> list[Tensor]:
    return [*net.params.values(), *net.buffers.values()]


def _buffer(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return Params({k: torch.zeros_like(t, device=device) for k, t in value.items()})
    if isinstance(value, Tensor):
        return torch.zeros_like(value, device=device)
    return torch.zeros((), device=device)


def _fill(buffer: Any, value: Any) -> None:
    if isinstance(buffer, Net):
        fill(buffer, value)
    elif isinstance(buffer, Params):
        for k, t in buffer.items():
            t.copy_(value[k])
    elif isinstance(value, Tensor):
        buffer.copy_(value)
    else:
        buffer.fill_(value)
