"""A broken private fit is caught: each check passes on the real one and fails on a copy that is broken in one way."""

import pytest
import torch
from one_weight import CoreTarget, images, model_of, only_w
from private_fits import CPU, Chosen, private_work
from recorded import play_on_a_cpu
from torch import Tensor, nn

from effuse.core.data import Dataset, Shard
from effuse.core.fit import deal_units
from effuse.core.model import Arch
from effuse.core.noise import KeyedNoise
from effuse.core.privacy import Budget, DpSgd, Release
from effuse.core.protection import Protection
from effuse.core.rng import Stream, stream
from effuse.core.solvers import SGD
from effuse.core.spec import spec
from effuse.core.task import Task
from effuse.core.workbench import Client, Workbench
from effuse.fast.graph.captured import Captured
from effuse.machines import private
from effuse.machines.eager import Eager
from effuse.machines.private import PrivateStep
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.one_run import audited, guesses_by_rule

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")
MACHINES = {"eager": Eager, "recorded": lambda device: Captured(device, compiled=False)}
SIDE, DELTA = 20, 1e-5


class Weights(nn.Module):
    """One weight for every pixel; the output is the sum of those whose pixels are white."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return ((x + 1) / 2 * self.w).sum((1, 2, 3))


@spec
class PixelWeights(Arch):
    def build(self) -> nn.Module:
        return Weights()


@spec
class Climb(Task):
    """Climb the weights of the white pixels."""

    def draw(self, n, image, labels, generator):
        return {}

    def loss(self, net, batch):
        return batch.mean(-net(batch.x))


def promise_is_kept(machine) -> None:
    """The one-run audit: 400 canaries of one white pixel each, of which a coin takes part, in one step of all at sigma 2.

    A canary's gradient is minus one at its own weight, so a weight is its own canary's score. Without noise all 200 guesses
    are right, which shows at least 4; sigma 2 promises less than 2.
    """
    m, sigma = SIDE * SIDE, 2.0
    coins = torch.rand(m, generator=Stream(("coins",)).torch()) < 0.5
    pixels = (torch.eye(m)[coins] * 255).to(torch.uint8).view(-1, 1, SIDE, SIDE)
    shard = Shard.whole(Dataset(pixels, torch.zeros(len(pixels), dtype=torch.int64), ("a",)))
    solver = SGD(lr=1.0, batch=m, steps=1, privacy=DpSgd(clip=1.0))
    net = machine.load(PixelWeights(side=SIDE, channels=1, classes=1).initial(Stream((0,))))
    machine.fit(net, private_work(solver, shard, Climb(), sigma=sigma))
    found = audited(-net.params["w"].detach().flatten(), coins, guesses_by_rule(m), DELTA)
    promised = epsilon_of([Release("fit", noise=sigma)], DELTA)
    assert 1 < promised < 2.5
    assert found.epsilon <= promised


def sums(machine, *batches, value=0.0) -> list[float]:
    """What each step of images x = 1, 1, 0.6 and -1 adds up for f(x) = w x, noised and divided; clip 5, sigma 2, q n = 2.

    At w = 0 the gradients are -6, -6, -3.6 and 6. Every step begins there.
    """
    found = []
    for batch in batches:
        machine.release(None)
        net = machine.load(model_of())
        net.params["v"].requires_grad_(False)
        solver = SGD(lr=0.25, batch=2, steps=1, privacy=DpSgd(clip=5.0, physical=2))
        noise = Chosen(batch, value=value)
        shard = images(255, 255, 204, 0)
        machine.fit(net, private_work(solver, shard, CoreTarget(), noise=noise, sigma=2.0, direction=only_w))
        found.append(-net.params["w"].item() / 0.25 * 2)
    return found


def units_are_clipped(machine) -> None:
    """Image 3 changes the sum of image 2 from -3.6 to 1.4: by the clip of 5, and not by its gradient of 6."""
    without, beside = sums(machine, [2], [2, 3])
    assert (without, beside) == pytest.approx((-3.6, 1.4), abs=1e-4)
    assert abs(beside - without) <= 5 * (1 + 1e-5)


def divisor_is_public(machine) -> None:
    """Batches of one and of three units, -5 and -5 - 5 - 3.6, are both divided by two; so is the noise, 0.5 * 2 * 5."""
    assert sums(machine, [0], [0, 1, 2]) == pytest.approx([-5.0, -13.6], abs=1e-4)
    assert sums(machine, [], [0], value=0.5) == pytest.approx([5.0, 0.0], abs=1e-4)


def noise_belongs_to_a_message(machine) -> None:
    """The same order with other weights. Both gradients, -6 and -8, are clipped to -5: the difference is noise alone.

    Were the noise the same, the difference would show both gradients free of it. The same message has the same noise.
    """
    shard = images(255)
    shard = Shard.whole(Dataset(shard.dataset.images, shard.dataset.labels, shard.dataset.classes, private=True))
    moved = []
    for w, message in ((0.0, "a"), (-1.0, "b"), (0.0, "a")):
        client = Client(machine, CoreTarget(), 10, 7, shard)
        client.protection, client.message = Protection(Budget(epsilon=10.0), 1.0), message
        client.begin(stream(0, 3, "train", 0, 7, ""), federated=2)
        net = client.load(model_of(w))
        net.params["v"].requires_grad_(False)
        client.fit(net, SGD(lr=0.25, batch=1, steps=1, privacy=DpSgd(clip=5.0)), client.data, direction=only_w)
        moved.append(net.params["w"].item() - w)
        client.end()
    first, other, again = moved
    assert first == again
    assert abs(first - other) > 1e-3


def batches_are_poisson(machine) -> None:
    """40 units at q = 1/4, 100 steps: the sizes vary by 7.5 with a standard error of about 1.1."""
    work = private_work(SGD(lr=0.1, batch=10, steps=100, privacy=DpSgd()), images(*[0] * 40), CoreTarget())
    sizes = torch.tensor([float(sum(part.real for part in parts)) for parts in deal_units(work)])
    assert abs(sizes.var() - 7.5) < 4 * 1.1


def without_noise(patch) -> None:
    patch.setattr(KeyedNoise, "normal", lambda self, n, device: torch.zeros(n, device=device))


def with_a_tenth_of_the_noise(patch) -> None:
    finish = PrivateStep.finish
    patch.setattr(
        PrivateStep, "finish", lambda self, noise, deviation, expected: finish(self, noise / 10, deviation, expected)
    )


def clipping_the_batch(patch) -> None:
    def clipped(grads, weight, bound):
        total = {k: (weight @ g.reshape(len(g), -1)).view(g.shape[1:]) for k, g in grads.items()}
        norm = torch.stack([t.norm() for t in total.values()]).norm()
        return {k: t * (bound / norm.clamp(min=bound)) for k, t in total.items()}

    patch.setattr(private, "clipped_sum", clipped)


def clipping_to_twice_the_bound(patch) -> None:
    clipped = private.clipped_sum
    patch.setattr(private, "clipped_sum", lambda grads, weight, bound: clipped(grads, weight, 2 * bound))


def dividing_by_the_realised_batch(patch) -> None:
    accumulate, finish = PrivateStep.accumulate, PrivateStep.finish

    def counting(self, batch, weight):
        self.realised = getattr(self, "realised", 0.0) + weight.sum()
        accumulate(self, batch, weight)

    def dividing(self, noise, deviation, expected):
        finish(self, noise, deviation, max(1.0, float(getattr(self, "realised", 0.0))))
        self.realised = 0.0

    patch.setattr(PrivateStep, "accumulate", counting)
    patch.setattr(PrivateStep, "finish", dividing)


def dividing_before_the_noise(patch) -> None:
    finish = PrivateStep.finish

    def late(self, noise, deviation, expected):
        finish(self, noise, deviation * expected, expected)

    patch.setattr(PrivateStep, "finish", late)


def repeating_the_noise(patch) -> None:
    patch.setattr(Workbench, "_noise", lambda self, source: KeyedNoise(source.child("noise"), CPU))


def shuffling(patch) -> None:
    def every_fourth(self, units, rate):
        taken = torch.zeros(units, dtype=torch.bool)
        taken[torch.randperm(units, generator=self._poisson)[: round(units * rate)]] = True
        return taken

    patch.setattr(KeyedNoise, "included", every_fourth)


BROKEN = {
    "noise off": (without_noise, promise_is_kept),
    "a tenth of the noise": (with_a_tenth_of_the_noise, promise_is_kept),
    "batch clipped instead of units": (clipping_the_batch, units_are_clipped),
    "clipped to twice the bound": (clipping_to_twice_the_bound, units_are_clipped),
    "realised batch as divisor": (dividing_by_the_realised_batch, divisor_is_public),
    "noise added after the division": (dividing_before_the_noise, divisor_is_public),
    "noise repeated under another message": (repeating_the_noise, noise_belongs_to_a_message),
    "shuffled batches": (shuffling, batches_are_poisson),
}


@pytest.mark.parametrize("place", MACHINES)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_fit_is_caught(name, place, monkeypatch):
    play_on_a_cpu(monkeypatch)
    breakage, check = BROKEN[name]
    check(MACHINES[place](CPU))
    breakage(monkeypatch)
    with pytest.raises(AssertionError):
        check(MACHINES[place](CPU))
