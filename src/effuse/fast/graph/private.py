"""A private fit as two recordings: one for each part of a Poisson batch, one for the end of a step."""

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from effuse.core.fit import Fit, UnitRows, Work, mean_gradient
from effuse.core.model import Arch, Net
from effuse.core.params import Params
from effuse.fast.graph.static import StaticFit, located
from effuse.fast.graph.step import in_bf16
from effuse.machines.private import PrivateStep, by_unit, private_steps

if TYPE_CHECKING:
    from effuse.fast.graph.captured import Captured


class PrivateSteps(StaticFit):
    """A recorded private step over static buffers.

    Noise, its deviation, the divisor and the learning rate are buffers, so that clients of other sizes and budgets share it.
    """

    plain: ClassVar[bool] = True  # our own operations have no rules for `vmap`

    def __init__(self, machine: "Captured", arch: Arch, work: Work, frozen: tuple[str, ...]) -> None:
        private, device = work.private, machine.device
        assert private is not None
        net = Net(machine.network(arch, plain=True).train(), arch=arch)
        super().__init__(machine, net, work, frozen, private.physical * private.repeats)
        step, repeats = PrivateStep(self.step(work, in_bf16), work), private.repeats
        self.summed = list(step.summed.values())
        self.weight = torch.ones(private.physical, device=device)
        self.noise = torch.zeros(step.numbers, device=device)
        self.deviation, self.expected = torch.zeros((), device=device), torch.ones((), device=device)

        def accumulate() -> None:
            step.accumulate(by_unit(self.batch(), repeats), self.weight)

        def finish() -> None:
            step.finish(self.noise, self.deviation, self.expected)

        self.accumulating, self.finishing = (machine.recorded(part, machine.stream) for part in (accumulate, finish))

    @torch.no_grad()
    def run(self, net: Net, work: Work) -> tuple[Fit, Params | None]:
        self.begin(net, work)
        torch._foreach_zero_(self.summed)  # an interrupted fit leaves the sum of its last parts
        generator = work.stream.child("draw").torch(self.machine.device)

        def accumulate(part: UnitRows) -> None:
            self.load(work.shard, *located(work.shard, part.positions), generator)
            self.weight.fill_(1.0)
            self.weight[part.real :] = 0.0
            self.accumulating.replay()

        def finish(noise: Tensor, deviation: float, expected: float) -> None:
            self.noise.copy_(noise)
            self.deviation.fill_(deviation)
            self.expected.fill_(expected)
            self.finishing.replay()

        fit = private_steps(work, self.machine, len(self.noise), accumulate, finish)
        average, kept = self.end(net, work)
        return fit._replace(average=average, gradient=mean_gradient(self.total, fit.steps)), kept
