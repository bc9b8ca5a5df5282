"""EDM's objective: its coefficients, its noise levels, its optimum, and augmentation that the network is told of."""

import math

import pytest
import torch
from recorded import Speckled
from torch import Tensor, nn
from toy import ADAM, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.build import build
from effuse.core.data import Dataset, Shape, Source, Split
from effuse.core.errors import RecipeError
from effuse.core.grammar import parse
from effuse.core.model import Net
from effuse.core.rng import Stream
from effuse.core.solvers import Adam
from effuse.core.spec import spec, text
from effuse.core.task import Batch, Task
from effuse.diffusion.heun import Heun
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.unet import Unet
from effuse.runs.driver import run
from effuse.runs.save import load
from effuse.tasks.edm import Edm, transformed
from effuse.transport.refusals import try_step

IMAGE = torch.Size((1, 4, 4))
SMALL = Unet(widths=(8, 16), layers=1, attention=(), middle_attention=False, groups=4, conditional=True)


def one(value: float) -> Tensor:
    return torch.full((1, 1, 1, 1), value)


def batch_of(task: Edm, n: int = 64, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    return Batch(torch.rand((n, *IMAGE), generator=generator) * 2 - 1, labels, task, task.draw(n, IMAGE, labels, generator))


def test_coefficients_by_hand() -> None:
    """sigma_data = 3, sigma = 4: c_skip = 9/25, c_out = 12/5, c_in = 1/5, c_noise = ln(4)/4, and lambda c_out^2 = 1.

    lambda = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2 = 25/144, and c_out^2 = 144/25.
    """
    c = Edm(sigma_data=3.0).at(one(4.0))
    found = [value.item() for value in c]
    assert found == pytest.approx([9 / 25, 12 / 5, 1 / 5, math.log(4) / 4])
    assert (16 + 9) / (4 * 3) ** 2 * c.c_out.item() ** 2 == pytest.approx(1)


def test_inputs_and_loss_by_hand() -> None:
    """y = 1, noise 1.5 at sigma = 4: x = 7, the input 7/5, the target (1 - 9/25 * 7) / (12/5) = -0.6333.

    An output of 0 has the loss 0.4011. D = c_skip x + c_out F is y where F is the target: 2.52 - 1.52 = 1.
    """
    task = Edm(sigma_data=3.0)
    drawn = {"sigma": one(4.0), "noise": one(1.5), "dropped": torch.tensor([True])}
    batch = Batch(one(1.0), torch.tensor([1]), task, drawn)
    x, c_noise, labels = task.inputs(batch)
    assert (x.item(), c_noise.tolist(), labels.tolist()) == (pytest.approx(1.4), [pytest.approx(math.log(4) / 4)], [-1])
    assert task.error(one(0.0), batch).item() == pytest.approx(0.6333333**2)
    assert task.error(one(-0.6333333), batch).item() == pytest.approx(0.0, abs=1e-10)


def test_inputs_and_targets_have_unit_variance_at_every_level() -> None:
    """Section 5: for images of variance sigma_data^2. 200,000 values have a relative standard error of sqrt(2/200,000)."""
    task, n = Edm(sigma_data=0.5), 200_000
    generator = torch.Generator().manual_seed(1)
    y, noise = (torch.randn((n, 1, 1, 1), generator=generator) for _ in range(2))
    for sigma in (0.01, 0.5, 20.0):
        drawn = {"sigma": one(sigma).expand(n, 1, 1, 1), "noise": noise, "dropped": torch.zeros(n, dtype=torch.bool)}
        batch = Batch(0.5 * y, torch.zeros(n, dtype=torch.int64), task, drawn)
        assert task.inputs(batch)[0].var().item() == pytest.approx(1, abs=0.013)
        assert task.error(torch.zeros_like(y), batch).mean().item() == pytest.approx(1, abs=0.013)


def test_noise_levels_are_log_normal() -> None:
    """ln sigma ~ N(-1.2, 1.2^2): 40,000 draws have standard errors of 0.006 and 0.0042."""
    drawn = Edm().draw(40_000, torch.Size((1, 1, 1)), torch.zeros(1), torch.Generator().manual_seed(0))
    logs = drawn["sigma"].log()
    assert logs.shape == (40_000, 1, 1, 1)
    assert logs.mean().item() == pytest.approx(-1.2, abs=0.024) and logs.std().item() == pytest.approx(1.2, abs=0.017)


class Scaled(nn.Module):
    """F(x) = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        return self.w * x


def test_the_optimum_of_one_weight() -> None:
    """Images of variance 1 with sigma_data = 1/2, all noise of sigma = 1: the loss is a parabola in w.

    x = y + n has variance 2, c_in^2 = 4/5, so the input has 8/5. c_skip = 1/5, c_out^2 = 1/5.
    The target (y - x/5) / c_out has covariance c_in (1 - 2/5) / c_out = (2/sqrt 5)(3/5) sqrt 5 = 6/5 with the input.
    So w* = (6/5) / (8/5) = 3/4: D = x/5 + (1/sqrt 5)(3/4)(2/sqrt 5) x = x/2, which is E[y | x].
    """
    task, n = Edm(sigma_data=0.5), 400_000
    generator = torch.Generator().manual_seed(2)
    y, noise = (torch.randn((n, 1, 1, 1), generator=generator) for _ in range(2))
    drawn = {"sigma": one(1.0).expand_as(y), "noise": noise, "dropped": torch.zeros(n, dtype=torch.bool)}
    batch, net = Batch(y, torch.zeros(n, dtype=torch.int64), task, drawn), Net(Scaled())
    slopes = []
    for w in (0.0, 1.0):
        net.params["w"].data.fill_(w)
        slopes += torch.autograd.grad(task.loss(net, batch), [net.params["w"]])
    optimum = slopes[0] / (slopes[0] - slopes[1])
    assert optimum.item() == pytest.approx(0.75, abs=0.005)


def parameters(**values: float) -> Tensor:
    names = ("mirrored", "cosine", "sine", "scale", "down", "right")
    return torch.tensor([[values.get(name, 0.0) for name in names]])


def test_transformations_by_hand() -> None:
    """Four pixels a side: a quarter turn is torch's, a quarter of the side is one pixel, a scale of 2 shows the middle."""
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert torch.equal(transformed(x, parameters()), x)
    assert torch.equal(transformed(x, parameters(mirrored=1)), x.flip(-1))
    for quarters, (cosine, sine) in {1: (-1, 1), 2: (-2, 0), 3: (-1, -1)}.items():
        assert torch.equal(transformed(x, parameters(cosine=cosine, sine=sine)), torch.rot90(x, quarters, (2, 3)))
    moved = transformed(x, parameters(down=0.25))[0, 0]
    assert torch.equal(moved, x[0, 0, [0, 0, 1, 2]]), "the first row is repeated"
    assert torch.equal(transformed(x, parameters(right=-0.25))[0, 0], x[0, 0][:, [1, 2, 3, 3]])
    # of twice the size, new pixels lie at old places 0.75, 1.25, 1.75, 2.25, and x is linear: x[i, j] = 4 i + j
    places = torch.tensor([0.75, 1.25, 1.75, 2.25])
    torch.testing.assert_close(transformed(x, parameters(scale=1))[0, 0], 4 * places[:, None] + places)


def test_each_transformation_has_its_chance() -> None:
    """p = 0.3 of 20,000: half of the mirrorings and three quarters of the turns are made; standard errors are 0.003."""
    drawn = Edm(augment=0.3).transformation(20_000, torch.Generator().manual_seed(0))
    made = (drawn.abs() > 1e-6).float()
    shares = [made[:, 0].mean(), (made[:, 1] + made[:, 2] > 0).float().mean(), *made[:, 3:].mean(0)]
    assert [s.item() for s in shares] == pytest.approx([0.15, 0.225, 0.3, 0.3, 0.3], abs=0.013)
    assert torch.equal(made[:, 4], made[:, 5]), "a move is one transformation along both axes"
    assert drawn[:, 3].std().item() == pytest.approx(0.2 * math.sqrt(0.3), rel=0.05)
    assert drawn[:, 4].std().item() == pytest.approx(0.125 * math.sqrt(0.3), rel=0.05)


def test_the_network_is_told_and_learns_the_transformed_image() -> None:
    """The fourth input is what was done, and the target is the image to which it was done."""
    task = Edm(augment=1.0)
    batch = batch_of(task)
    x, _, _, told = task.inputs(batch)
    assert torch.equal(told, batch.drawn["augment"]) and told.abs().sum() > 0
    c, y = task.at(batch.drawn["sigma"]), transformed(batch.x, told)
    assert not torch.allclose(y, batch.x)
    torch.testing.assert_close(x, c.c_in * (y + batch.drawn["sigma"] * batch.drawn["noise"]))
    target = (y - c.c_skip * x / c.c_in) / c.c_out
    assert task.error(target, batch).max() < 1e-6
    assert len(Edm().inputs(batch_of(Edm()))) == 3 and "augment" not in batch_of(Edm()).drawn


def test_zeros_are_no_transformation() -> None:
    """At sampling the network is told nothing, which gives the output of zeros to the bit, and not that of a mirroring."""
    module = SMALL.resolved(Shape(8, 1, 2)).initial(Stream((3,))).arch.build()
    x, t, labels = torch.randn(2, 1, 8, 8), torch.tensor([0.3, -0.2]), torch.tensor([0, 1])
    with torch.no_grad():
        plain = module(x, t, labels)
        assert torch.equal(plain, module(x, t, labels, torch.zeros(2, 6)))
        assert not torch.allclose(plain, module(x, t, labels, parameters(mirrored=1).expand(2, 6)))


@spec
class Halves(Source):
    """Images whose left half is white and whose right half is black."""

    def load(self, split: Split) -> Dataset:
        pixels = torch.zeros(64, 1, 4, 4, dtype=torch.uint8)
        pixels[..., :2] = 255
        return Dataset(pixels, torch.zeros(64, dtype=torch.int64), ("left",))


@spec
class Untold(Edm):
    """The same augmentation without telling the network."""

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return super().inputs(batch)[:3]


@pytest.mark.parametrize(("task", "least", "most"), [(Edm(augment=0.5), 0.8, 1.0), (Untold(augment=0.5), 0.0, 0.6)])
def test_augmentation_leaks_only_where_the_network_is_not_told(task, least, most, tmp_path) -> None:
    """The share of 128 drawn images that are white on the left, after 400 steps.

    An image shows another side where it is mirrored or turned: in 44 % of the training images.
    """
    net = Unet(widths=(16,), layers=1, attention=(), middle_attention=False, groups=4)
    algorithm = FedAvg(local=Adam(lr=3e-3, batch=64, steps=400))
    recipe = toy_recipe(data=Halves(), clients=1, model=net, task=task, algorithm=algorithm, rounds=1, sampler=Heun(steps=8))
    run(recipe, tmp_path / "run")
    pixels = load(tmp_path / "run").sample(128).pixels
    share = (pixels[..., :2].mean((1, 2, 3)) > pixels[..., 2:].mean((1, 2, 3)) + 1).float().mean().item()
    assert least <= share <= most


@pytest.mark.parametrize("arch", [ConvnextUnet(dim=8)], ids=str)
def test_a_network_that_cannot_be_told_is_refused(arch) -> None:
    with pytest.raises(RecipeError, match="task.augment: model convnext_unet takes no condition"):
        try_step(arch.resolved(Shape(8, 1, 2)), Edm(augment=0.1), "model")
    try_step(arch.resolved(Shape(8, 1, 2)), Edm(), "model")
    try_step(SMALL.resolved(Shape(8, 1, 2)), Edm(augment=0.1), "model")


def test_draws_repeat_and_grammar() -> None:
    task = Edm(augment=0.5, drop=0.1)
    a, b = batch_of(task), batch_of(task)
    assert all(torch.equal(a.drawn[k], b.drawn[k]) for k in a.drawn)
    assert build(parse(text(task)), Task, "task") == task


@pytest.mark.parametrize("task", [Edm(), Edm(augment=0.5, drop=0.2)], ids=str)
def test_engines_give_the_same_bits_and_the_model_opens(task, tmp_path) -> None:
    """Two rounds of a class-conditional network, drawn with and without guidance from the saved folder."""
    recipe = toy_recipe(
        data=Speckled(), model=SMALL, task=task, algorithm=FedAvg(local=ADAM), sampler=Heun(steps=3, batch=4), ema=0.5
    ).changed(["model.widths=[8]"])
    digests = {run(recipe, tmp_path / engine, engine=engine).weights_sha256 for engine in ("simulator", "loopback")}
    assert len(digests) == 1
    opened = load(tmp_path / "simulator")
    plain = opened.sample(4, labels=[0, 1, 0, 1])
    guided = opened.sample(4, labels=[0, 1, 0, 1], sampler="heun(steps=3, guidance=1.0)")
    assert plain.pixels.isfinite().all() and not torch.equal(plain.pixels, guided.pixels)
    assert torch.equal(plain.pixels, load(tmp_path / "loopback").sample(4, labels=[0, 1, 0, 1]).pixels)
