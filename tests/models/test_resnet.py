"""Classifiers and the classification task."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from effuse.core.build import build
from effuse.core.data import Shape
from effuse.core.errors import ModelError, RecipeError
from effuse.core.grammar import parse
from effuse.core.model import Arch, Net
from effuse.core.task import Batch
from effuse.metrics.cost import macs, parameters
from effuse.models.resnet import Cnn, CosineHead, Resnet
from effuse.tasks.classify import Classify

CIFAR, DIGITS = Shape(32, 3, 10), Shape(8, 1, 10)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet16(norm: str) -> None:
    """FedDiff's ResNet16: blocks [2, 2, 2, 1]: 6,440,640 values in convolutions, 6,453,322 in all, 479,920,128 MACs."""
    arch = Resnet(norm=norm).resolved(CIFAR)
    with torch.device("meta"):
        net = arch.build()
        with FlopCounterMode(display=False) as counter:
            net(torch.empty(1, 3, 32, 32))
    assert sum(m.weight.numel() for m in net.modules() if isinstance(m, nn.Conv2d)) == 6_440_640
    assert sum(p.numel() for p in net.parameters()) == 6_453_322
    flops = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert flops["aten.convolution"] // 2 == 479_920_128


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("classes", "projection", "count"), [(10, None, 4_903_242), (100, None, 4_949_412), (10, 256, 5_294_666)]
)
def test_the_sizes_of_resnet10(norm: str, classes: int, projection: int | None, count: int) -> None:
    """FedDifRC's network. MOON's projection to 256 is 512 x 512 + 512 and 512 x 256 + 256, and the head has 256 inputs."""
    arch = Resnet(blocks=(1, 1, 1, 1), norm=norm, projection=projection).resolved(Shape(32, 3, classes))
    assert parameters(arch)["total"] == count


def test_the_arithmetic_of_resnet10() -> None:
    assert macs(Resnet(blocks=(1, 1, 1, 1)).resolved(CIFAR)) == 253_432_832


def test_resnet10_has_512_features() -> None:
    net = Resnet(blocks=(1, 1, 1, 1)).resolved(Shape(8, 3, 5)).build()
    assert net.features(torch.randn(2, 3, 8, 8)).shape == (2, 512)
    assert net(torch.randn(2, 3, 8, 8)).shape == (2, 5)


def test_group_norm_needs_no_batch() -> None:
    """An image's logits do not depend on its neighbours, as differential privacy demands."""
    net = Resnet(widths=(8, 16), blocks=(1, 1), groups=4).resolved(DIGITS).build().train()
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(("classes", "parameters"), [(10, 4_903_242), (100, 4_949_412)])
def test_resnet10_has_five_levels(norm: str, classes: int, parameters: int) -> None:
    """The stem and four stages of 64, 64, 128, 256 and 512 channels, each before its ReLU; the output does not change."""
    net = Resnet(blocks=(1, 1, 1, 1), norm=norm).resolved(Shape(8, 3, classes)).build().eval()
    assert sum(p.numel() for p in net.parameters()) == parameters
    x, seen = torch.randn(2, 3, 8, 8), []
    for layer in (net.stem[1], *net.stages):
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    output, _, levels = net(x, give="levels")
    assert len(seen) == 1, "the blocks' own ReLUs are not used"
    assert torch.equal(output, net(x))
    assert [level.shape for level in levels] == [(2, n) for n in (64, 64, 128, 256, 512)]
    maps = net.maps(x)
    assert torch.equal(maps[0], seen[0]) and all(bool((before < 0).any()) for before in maps)
    for before, level, stage in zip(maps[1:], levels[1:], seen[2:6]):
        assert torch.equal(torch.relu(before), stage) and torch.equal(level, before.mean((2, 3)))


def test_a_level_is_the_last_block_of_its_stage() -> None:
    net = Resnet(widths=(8, 16), blocks=(2, 3), groups=4, projection=5).resolved(DIGITS).build().eval()
    x = torch.randn(2, 1, 8, 8)
    output, features, levels = net(x, give="levels")
    assert torch.equal(output, net(x)) and torch.equal(features, net(x, give="features"))
    assert [level.shape[1] for level in levels] == [8, 8, 16]
    for end, level in ((1, levels[1]), (4, levels[2])):
        before = net.stages[end].summed(net.stages[:end](net.stem(x)))
        torch.testing.assert_close(level, before.mean((2, 3)))


def test_the_levels_of_a_cnn_are_its_normalised_maps() -> None:
    net = Cnn(widths=(8, 16), groups=4, projection=5).resolved(DIGITS).build()
    x = torch.randn(2, 1, 8, 8)
    output, _, levels = net(x, give="levels")
    assert torch.equal(output, net(x)) and [level.shape[1] for level in levels] == [8, 16]
    torch.testing.assert_close(levels[0], net.stages[1](net.stages[0](x)).mean((2, 3)))


def test_levels_are_in_fp32_under_autocast() -> None:
    net = Resnet(widths=(8,), blocks=(1,), groups=4).resolved(DIGITS).build()
    with torch.autocast("cpu", torch.bfloat16):
        output, _, levels = net(torch.randn(2, 1, 8, 8), give="levels")
    assert output.dtype == torch.bfloat16 and {level.dtype for level in levels} == {torch.float32}


@pytest.mark.parametrize("arch", [Resnet(widths=(16,), blocks=(1,), groups=4), Cnn(widths=(16,)), Cnn(projection=12)])
def test_a_cosine_head_has_orthonormal_vectors_that_no_optimiser_sees(arch: Arch) -> None:
    """Ten rows of length one, at right angles; s is 20 for a ResNet and 1 for the small network."""
    net = dataclasses.replace(arch, head="cosine").resolved(DIGITS).build()
    W = net.head.weight
    torch.testing.assert_close(W @ W.T, torch.eye(10), rtol=0, atol=1e-5)
    assert [k for k, _ in net.named_parameters() if k.startswith("head")] == ["head.scale"]
    assert net.head.scale.item() == (20.0 if isinstance(arch, Resnet) else 1.0)


def test_a_cosine_head_by_hand() -> None:
    """z = (3, 4), W_0 = (1, 0), W_1 = (0, 2) and s = 10: cosines 0.6 and 0.8, whatever the lengths; also under autocast."""
    head = CosineHead(2, 2, 10.0)
    head.weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    logits = head(torch.tensor([[3.0, 4.0]]))
    assert logits[0].tolist() == pytest.approx([6.0, 8.0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(torch.tensor([[3.0, 4.0]])), logits)


def test_more_classes_than_features_have_no_orthonormal_vectors() -> None:
    with pytest.raises(ModelError, match="10 classes have no orthonormal vectors among 8 features; use head=linear"):
        Resnet(widths=(8,), blocks=(1,), groups=4, head="cosine").resolved(DIGITS).build()


def test_cnn_learns_two_blobs() -> None:
    torch.manual_seed(0)
    net = Cnn(widths=(8,), groups=4).resolved(Shape(4, 1, 2)).build()
    labels = torch.arange(32) % 2
    x = torch.randn(32, 1, 4, 4) * 0.1 + (labels * 2.0 - 1.0)[:, None, None, None] * torch.linspace(-1, 1, 4)
    batch, task = Batch(x, labels, Classify()), Classify()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(40):
        optimiser.zero_grad()
        task.loss(Net(net), batch).backward()
        optimiser.step()
    assert (net(x).argmax(1) == labels).float().mean() == 1.0


def test_equal_logits_cost_ln_classes() -> None:
    """-ln(1/10) = 2.302585; padding counts for nothing."""
    task = Classify()
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 10))
    nn.init.zeros_(net[1].weight), nn.init.zeros_(net[1].bias)
    x, labels = torch.randn(3, 1, 2, 2), torch.tensor([0, 5, 9])
    assert task.draw(3, x.shape[1:], labels, torch.Generator()) == {}
    assert task.loss(Net(net), Batch(x, labels, task)).item() == pytest.approx(math.log(10))
    with torch.no_grad():
        net[1].weight[0] = 1.0
    weight = torch.tensor([1.0, 1.0, 0.0])
    padded = task.loss(Net(net), Batch(x, labels, task, weight=weight))
    torch.testing.assert_close(padded, task.loss(Net(net), Batch(x[:2], labels[:2], task)))


@pytest.mark.parametrize(
    "source", ["resnet(widths=[64], blocks=[1, 1])", "resnet(widths=[20], blocks=[1])", "cnn(side=2)", "cnn(widths=[])"]
)
def test_impossible_classifiers_are_refused(source: str) -> None:
    with pytest.raises(RecipeError, match="model: "):
        build(parse(source), Arch, "model")
