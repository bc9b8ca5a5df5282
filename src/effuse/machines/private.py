"""DP-SGD on batches of any loss: the gradient of each unit is clipped before they are added up."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, vmap

from effuse.core.errors import RecipeError
from effuse.core.fit import Fit, UnitRows, Work, deal_units, loss_and_note, task_loss
from effuse.core.model import Functional, Net
from effuse.core.task import Batch, Given, Task
from effuse.core.units import rounded
from effuse.machines.per_unit import PerUnit

if TYPE_CHECKING:
    from effuse.machines.eager import Eager, Step

BLOCK = 64  # values whose norm is taken at a time: over a million, torch's norm of fp32 can be half a per cent too small
MARGIN = 1 + 2**-18  # 64 roundings of 2^-24: whatever the order of its sum, a block's norm has at most 64 / 2 + 1


class PrivateStep:
    """A private training step in two parts: `accumulate` for each part of a Poisson batch, then `finish`."""

    def __init__(self, step: "Step", work: Work) -> None:
        assert work.private is not None
        self.step, self.task, self.bound = step, work.task, work.private.clip
        self.trained = {k: p for k, p in step.params.items() if p.requires_grad}
        self.fixed = {k: p for k, p in step.params.items() if not p.requires_grad}
        self.summed = {k: torch.zeros_like(p) for k, p in self.trained.items()}

    def accumulate(self, batch: Batch, weight: Tensor) -> None:
        """Add the clipped gradients of a part's units. The batch's first dimension counts units, its second their rows."""
        pieces = (batch.x, batch.labels, batch.drawn, batch.columns)
        weights = {k: p.detach() for k, p in self.trained.items()}
        with PerUnit():
            grads = vmap(grad(self._unit_loss), in_dims=(None, 0, 0, 0, 0), randomness="different")(weights, *pieces)
        with torch.no_grad():
            for k, total in clipped_sum(grads, weight, self.bound).items():
                self.summed[k] += total

    def _unit_loss(
        self, weights: Mapping[str, Tensor], x: Tensor, labels: Tensor, drawn: dict[str, Tensor], columns: dict[str, Tensor]
    ) -> Tensor:
        step, batch = self.step, Batch(x, labels, self.task, drawn, columns=columns)
        with step.around():
            return loss_and_note(step.loss(Functional(step.net, {**self.fixed, **weights}), batch, step.given))[0].float()

    @torch.no_grad()
    def finish(self, noise: Tensor, deviation: float | Tensor, expected: float | Tensor) -> None:
        """Add noise to the sum, divide by the expected number of units, and update the weights."""
        step, first = self.step, 0
        for k, p in self.trained.items():
            values = noise[first : first + p.numel()].view(p.shape)
            # in the parameter's memory layout, which fused optimisers expect
            p.grad = torch.empty_like(p).copy_((self.summed[k] + deviation * values) / expected)
            self.summed[k].zero_()
            first += p.numel()
            if step.total is not None:
                step.total[k] += p.grad
        if step.updates:
            step.direct()
            step.update()

    @property
    def numbers(self) -> int:
        """How many values of noise a step needs."""
        return sum(p.numel() for p in self.trained.values())


def clipped_sum(grads: Mapping[str, Tensor], weight: Tensor, bound: float) -> dict[str, Tensor]:
    """The sum of the units' gradients, each scaled to a norm of at most `bound` over all parameters.

    `weight` is 1 for a unit and 0 for padding. A unit whose gradient is not finite adds nothing; its values become zero.
    """
    # of a weight that no unit uses, all gradients may be one zero in memory, which cannot be changed in place
    flat = {k: g.reshape(len(g), -1).contiguous() for k, g in grads.items()}
    norm = torch.linalg.vector_norm(torch.cat([_block_norms(g) for g in flat.values()], dim=1), dim=1, dtype=torch.float64)
    finite = norm.isfinite()
    scale = torch.where(finite, bound / torch.clamp(norm * MARGIN, min=bound), 0.0).float() * weight
    return {k: (scale @ g.masked_fill_(~finite[:, None], 0.0)).view(grads[k].shape[1:]) for k, g in flat.items()}


def _block_norms(g: Tensor) -> Tensor:
    """The norm of every block of a unit's values, and of what is left over."""
    whole = g.shape[1] // BLOCK * BLOCK
    blocks = g[:, :whole].unflatten(1, (-1, BLOCK))
    return torch.cat([torch.linalg.vector_norm(part, dim=-1) for part in (blocks, g[:, None, whole:])], dim=1)


def by_unit(batch: Batch, repeats: int) -> Batch:
    """The same batch with one dimension for the units and one for their rows."""

    def split(t: Tensor) -> Tensor:
        return t.unflatten(0, (-1, repeats))

    drawn = {k: split(v) for k, v in batch.drawn.items()}
    columns = {k: split(v) for k, v in batch.columns.items()}
    return Batch(split(batch.x), split(batch.labels), batch.task, drawn, columns=columns)


def private_fit(step: PrivateStep, work: Work, machine: "Eager") -> Fit:
    """A private fit, one operation after another."""
    private, device = work.private, machine.device
    assert private is not None
    repeats, physical = private.repeats, private.physical
    generator = work.stream.child("draw").torch(device)

    def accumulate(rows: UnitRows) -> None:
        units = min(rounded(rows.real, repeats), physical)  # no recording needs all of the padding
        batch = machine.batch(work, rows.positions[: units * repeats], generator, len(rows.positions))
        step.accumulate(by_unit(batch, repeats), (torch.arange(units, device=device) < rows.real).float())

    return private_steps(work, machine, step.numbers, accumulate, step.finish)


def private_steps(
    work: Work,
    machine: "Eager",
    numbers: int,
    accumulate: Callable[[UnitRows], None],
    finish: Callable[[Tensor, float, float], None],
) -> Fit:
    """All steps of a private fit on any machine. It returns no loss: a loss has no noise."""
    private, steps = work.private, 0
    assert private is not None
    if private.sigma is None:
        raise RecipeError(
            f"{work.where}: the noise of this private fit is not settled; solve it from the budget, or set sigma"
        )
    for parts in deal_units(work):
        for rows in parts:
            accumulate(rows)
            machine.meter.trained(rows.real * private.repeats)
        finish(private.noise.normal(numbers, machine.device), private.sigma * private.clip, private.expected)
        steps += 1
    return Fit(steps, round(steps * private.expected) * private.repeats, None)


def refuse_mixing(net: Net, task: Task, work: Work, given: Given) -> None:
    """Refuse a loss that compares the images of a batch: then a unit has no loss of its own.

    On two random images the loss of both must be the mean of each one's. The network's values are random too.
    """
    shape, loss = work.shard.dataset.shape, work.loss or task_loss
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, shape.channels, shape.side, shape.side, generator=generator) * 2 - 1
    labels = torch.arange(2) % shape.classes
    drawn = task.draw(2, x.shape[1:], labels, generator)
    columns = {k: _random(c[:1].expand(2, *c.shape[1:]), generator) for k, c in work.shard.columns.items()}

    def of(rows: slice) -> Tensor:
        parts = [{k: v[rows] for k, v in values.items()} for values in (drawn, columns)]
        return loss_and_note(loss(net, Batch(x[rows], labels[rows], task, parts[0], columns=parts[1]), given))[0]

    with torch.no_grad():
        together, apart = of(slice(0, 2)), (of(slice(0, 1)) + of(slice(1, 2))) / 2
    if together.isfinite() and apart.isfinite() and not torch.isclose(together, apart, rtol=1e-3, atol=1e-5):
        raise RecipeError(
            f"{work.where}: the loss {loss.__qualname__} compares the images of a batch, so a single image has no gradient "
            "of its own and the fit cannot be private; use an algorithm whose loss is a mean over images"
        )


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(like.shape, generator=generator)
    return values if like.is_floating_point() else torch.zeros(like.shape, dtype=like.dtype)
