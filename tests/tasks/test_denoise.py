"""The denoising objective: random numbers, targets and distances."""

import pytest
import torch
from torch import Tensor, nn

from effuse.core.build import build
from effuse.core.grammar import parse
from effuse.core.model import Net
from effuse.core.spec import text
from effuse.core.task import Batch, Task
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Cosine, Linear, signal_and_noise

IMAGE = torch.Size((1, 4, 4))


class Oracle(nn.Module):
    """The exact output if every image is the constant c."""

    def __init__(self, task: Denoise, c: float) -> None:
        super().__init__()
        self.task, self.c = task, c

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        a, s = signal_and_noise(self.task.schedule, x.device)[t].view(-1, 2, 1, 1, 1).unbind(1)
        epsilon = (x - a * self.c) / s
        return {"epsilon": epsilon, "v": a * epsilon - s * self.c, "x0": (x - s * epsilon) / a}[self.task.target]


class Answer(nn.Module):
    """Returns a constant."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        return torch.full_like(x, self.value)


def batch_of(task: Denoise, n: int = 64, c: float = 0.3, seed: int = 0) -> Batch:
    labels = torch.arange(n) % 10
    drawn = task.draw(n, IMAGE, labels, torch.Generator().manual_seed(seed))
    return Batch(torch.full((n, *IMAGE), c), labels, task, drawn)


@pytest.mark.parametrize("target", ["epsilon", "v", "x0"])
@pytest.mark.parametrize("distance", ["mse", "huber"])
def test_a_perfect_network_has_no_loss(target: str, distance: str) -> None:
    task = Denoise(target=target, distance=distance)
    assert task.loss(Net(Oracle(task, 0.3)), batch_of(task)).item() < 1e-6
    assert task.loss(Net(Oracle(task, 0.6)), batch_of(task)).item() > 1e-3


def test_noisy_image_and_targets_by_hand() -> None:
    """alpha_bar = 0.64: a = 0.8, s = 0.6; x0 = 0.5, epsilon = 1: x_t = 0.4 + 0.6 = 1.0; v = 0.8 - 0.3 = 0.5."""
    task = Denoise(target="v")
    drawn = {"a": torch.tensor(0.8), "s": torch.tensor(0.6), "noise": torch.ones(1, 1, 1, 1)}
    batch = Batch(torch.full((1, 1, 1, 1), 0.5), torch.tensor([0]), task, drawn)
    assert task.noisy(batch).item() == pytest.approx(1.0)
    assert task.wanted(batch).item() == pytest.approx(0.5)
    assert Denoise(target="x0").wanted(batch).item() == 0.5
    assert Denoise().wanted(batch).item() == 1.0


def test_distances_by_hand() -> None:
    """Off by 2: mse 4, huber 2 - 1/2 = 1.5. Off by 0.5: mse 0.25, huber 0.125."""
    for distance, far, near in (("mse", 4.0, 0.25), ("huber", 1.5, 0.125)):
        task = Denoise(target="x0", distance=distance)
        batch = batch_of(task, c=0.0)
        assert task.loss(Net(Answer(2.0)), batch).item() == pytest.approx(far)
        assert task.loss(Net(Answer(0.5)), batch).item() == pytest.approx(near)


def test_min_snr_weights_by_hand() -> None:
    """a = 0.8, s = 0.6: SNR = 16/9. Capped at 1, x0's error weighs 1, epsilon's 1 / SNR = 9/16, v's 1 / (SNR + 1) = 9/25."""
    drawn = {"a": torch.full((1, 1, 1, 1), 0.8), "s": torch.full((1, 1, 1, 1), 0.6), "noise": torch.ones(1, 1, 1, 1)}
    batch = Batch(torch.full((1, 1, 1, 1), 0.5), torch.tensor([0]), Denoise(), drawn)
    for gamma, weights in ((1.0, (1.0, 9 / 16, 9 / 25)), (5.0, (16 / 9, 1.0, 16 / 25))):
        for target, weight in zip(("x0", "epsilon", "v"), weights):
            task = Denoise(target=target, min_snr=gamma)
            assert task.weight(batch, gamma).tolist() == pytest.approx([weight])
            off_by_two = task.wanted(batch) + 2.0
            assert task.error(off_by_two, batch).tolist() == pytest.approx([4 * weight])


def test_min_snr_makes_every_target_the_same_loss() -> None:
    """A prediction of 0.6 for an image of 0.3 has loss min(SNR, 5) 0.09 on average, for every target."""
    expected = batch_of(Denoise()).drawn
    snr = (expected["a"] / expected["s"]).square()
    for target in ("epsilon", "v", "x0"):
        task = Denoise(target=target, min_snr=5.0)
        loss = task.loss(Net(Oracle(task, 0.6)), batch_of(task)).item()
        assert loss == pytest.approx(0.09 * snr.clamp(max=5).mean().item(), rel=1e-3)


def test_padding_does_not_count() -> None:
    """Random numbers are drawn for the full batch, so 3 images padded to 5 get those of the first 3 of 5."""
    task = Denoise()
    whole = batch_of(task, 5)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    padded = Batch(whole.x, whole.labels, task, whole.drawn, weight)
    first = Batch(whole.x[:3], whole.labels[:3], task, {k: v[:3] for k, v in whole.drawn.items()})
    net = Net(Answer(0.1))
    torch.testing.assert_close(task.loss(net, padded), task.loss(net, first))


def test_draws_repeat_in_a_fixed_order() -> None:
    """Time steps, then noise, then dropped labels, from one generator; neither target nor drop rate changes them."""
    generator = torch.Generator().manual_seed(3)
    t = torch.randint(1000, (4,), generator=generator)
    noise = torch.randn((4, *IMAGE), generator=generator)
    dropped = torch.rand(4, generator=generator) < 0.5
    for task in (Denoise(drop=0.5), Denoise(drop=0.5, target="v", distance="huber")):
        drawn = task.draw(4, IMAGE, torch.zeros(2, dtype=torch.int64), torch.Generator().manual_seed(3))
        assert torch.equal(drawn["t"], t) and torch.equal(drawn["noise"], noise) and torch.equal(drawn["dropped"], dropped)
    plain = Denoise().draw(4, IMAGE, torch.zeros(4, dtype=torch.int64), torch.Generator().manual_seed(3))
    assert torch.equal(plain["noise"], noise) and not plain["dropped"].any()


def test_dropped_labels_become_null() -> None:
    task = Denoise(drop=0.25)
    batch = batch_of(task, 4000)
    labels = task.labels(batch)
    assert (labels == -1).float().mean().item() == pytest.approx(0.25, abs=0.03)
    others = labels != -1
    assert torch.equal(labels[others], batch.labels[others])


def test_time_steps_are_uniform_and_in_range() -> None:
    drawn = Denoise(schedule=Cosine(steps=50)).draw(5000, torch.Size((1,)), torch.empty(0), torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn["t"], minlength=50)
    assert len(counts) == 50 and counts.min() > 50


def test_the_loss_reads_no_values() -> None:
    """It runs on the meta device, so it can be captured."""
    task = Denoise(drop=0.1)
    net = nn.Conv2d(1, 1, 3, padding=1)

    def step(x: Tensor, labels: Tensor, drawn: dict[str, Tensor]) -> Tensor:
        return task.loss(Net(Labelled(net)), Batch(x, labels, task, drawn))

    batch = batch_of(task, 4)
    meta = {k: v.to("meta") for k, v in batch.drawn.items()}
    net.to("meta")
    assert step(batch.x.to("meta"), batch.labels.to("meta"), meta).shape == ()


class Labelled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        return self.inner(x)


def test_grammar() -> None:
    task = Denoise(target="v", distance="huber", schedule=Linear(steps=500), drop=0.1)
    assert build(parse(text(task)), Task, "task") == task
    assert build(parse("denoise"), Task, "task") == Denoise()
