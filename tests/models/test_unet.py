"""The DDPM U-Nets: parameter counts, parts, labels."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effuse.core.build import build
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.core.grammar import parse
from effuse.core.model import Arch
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.metrics.cost import parameters
from effuse.models.unet import CifarUnet, DigitsUnet, MnistUnet, Unet
from effuse.recipes.feddifrc.methods import NETWORK

CIFAR, MNIST, DIGITS = Shape(32, 3, 10), Shape(28, 1, 10), Shape(8, 1, 10)
TINY = Unet(side=8, channels=1, classes=3, widths=(8, 16), layers=1, attention=(4,), groups=4, conditional=True)


def test_cifar_network() -> None:
    """The DDPM paper's network: 10,523,008 + 2,888,704 + 22,334,595 = 35,746,307, of which 328,704 in the time MLP."""
    arch = CifarUnet().resolved(CIFAR)
    assert parameters(arch) == {"total": 35_746_307, "encoder": 10_523_008, "bottleneck": 2_888_704, "decoder": 22_334_595}
    with torch.device("meta"):
        time = arch.build().time_embedding
    assert sum(p.numel() for p in time.parameters()) == 128 * 512 + 512 + 512 * 512 + 512 == 328_704


def test_cifar_network_with_classes() -> None:
    """Eleven embeddings of 4 x 128 values, all in the encoder."""
    arch = CifarUnet(conditional=True).resolved(CIFAR)
    assert parameters(arch)["encoder"] == 10_523_008 + 11 * 512


@pytest.mark.parametrize(
    ("arch", "count", "stages"),
    [
        (CifarUnet(conditional=True), 35_751_939, [(256, 4), (256, 8), (256, 16), (256, 32), (128, 32)]),
        (NETWORK, 8_954_883, [(128, 4), (128, 8), (128, 16), (128, 32), (64, 32)]),
    ],
)
def test_stages_of_the_guides_of_cifar(arch: Arch, count: int, stages: list[tuple[int, int]]) -> None:
    """Channels and side of the middle and of the decoder's stages; 35,746,307 + 11 x 512 = 35,751,939 parameters."""
    arch = arch.resolved(CIFAR)
    assert parameters(arch)["total"] == count
    maps = arch.hollow_net()(*arch.example(), give="stages")
    assert [tuple(m.shape[1:3]) for m in maps] == stages


def test_attention_everywhere() -> None:
    """FedDDPM's networks: 38.71 M when every resolution attends."""
    assert parameters(Unet(attention=(32, 16, 8, 4)).resolved(CIFAR))["total"] == 38_714_627


def test_mnist_network() -> None:
    """FedDDPM's networks: about 12.10 M, reached with attention in the middle only (no resolution has side 16)."""
    assert parameters(MnistUnet().resolved(MNIST))["total"] == 12_098_305


def test_digits_network_is_small() -> None:
    assert parameters(DigitsUnet().resolved(DIGITS))["total"] < 1_000_000


def test_cifar_multiply_accumulates() -> None:
    """The literature's 6.0655 G leaves attention's products out and counts normalisation.

    Convolutions and linear maps make 6.0540 G. Attention adds, at 16x16, (256 x 256 + 256 x 256) x 256 for each of five
    layers and, in the middle at 4x4, (16 x 16 + 16 x 16) x 256: 167,903,232 in all.
    """
    arch = CifarUnet().resolved(CIFAR)
    with torch.device("meta"):
        net = arch.build().eval()
        with FlopCounterMode(display=False) as counter:
            net(torch.empty(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64), None)
    attention = 5 * 2 * 256 * 256 * 256 + 2 * 16 * 16 * 256
    dense = counter.get_total_flops() / 2 - attention
    assert dense == pytest.approx(6.0655e9, rel=0.002)


def test_presets_resolve_to_the_plain_name() -> None:
    arch = DigitsUnet().resolved(DIGITS)
    assert type(arch) is Unet and arch.conditional and arch.shape == DIGITS
    assert build(parse(text(arch)), Arch, "model") == arch


def test_missing_and_negative_labels_are_the_null_label() -> None:
    """With three classes there are four embeddings: -1, 3 and no labels at all mean the same."""
    net = TINY.build().eval()
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([5, 7])
    with torch.no_grad():
        null = net(x, t, torch.tensor([3, 3]))
        assert net.class_embedding.num_embeddings == 4
        assert torch.equal(net(x, t, None), null)
        assert torch.equal(net(x, t, torch.tensor([-1, -1])), null)
        assert not torch.equal(net(x, t, torch.tensor([0, 1])), null)


def test_stages_are_the_middle_and_the_decoder_s() -> None:
    """The 9 M network of 32x32 images: 128x4x4, then 128x8x8, 128x16x16, 128x32x32 and 64x32x32; the large one has 256s."""
    for widths, channels in (
        ((64, 128, 128, 128), (128, 128, 128, 128, 64)),
        ((128, 256, 256, 256), (256, 256, 256, 256, 128)),
    ):
        arch = Unet(widths=widths, conditional=True).resolved(CIFAR)
        assert arch.staged
        with torch.device("meta"):
            maps = arch.build()(*arch.example(), give="stages")
        assert [tuple(m.shape[1:]) for m in maps] == [(c, s, s) for c, s in zip(channels, (4, 8, 16, 32, 32))]


def test_the_last_stage_gives_the_output_and_the_middle_the_features() -> None:
    net = TINY.build().eval()
    inputs = torch.randn(2, 1, 8, 8), torch.tensor([5, 7]), torch.tensor([0, 1])
    with torch.no_grad():
        middle, *_, last = net(*inputs, give="stages")
        assert torch.equal(net.conv_out(net.conv_act(net.conv_norm_out(last))), net(*inputs))
        assert torch.equal(middle.mean(dim=(2, 3)), net(*inputs, give="features"))


def test_a_condition_is_added_as_a_class_is() -> None:
    """The null label with the difference of two embeddings, of class 1 and of the null label, is class 1."""
    net = TINY.build().eval()
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([5, 7])
    with torch.no_grad():
        embeddings = net.class_embedding.weight
        condition = (embeddings[1] - embeddings[3]).expand(2, -1)
        assert condition.shape == (2, net.condition_width) == (2, 4 * 8)
        wanted = net(x, t, torch.tensor([1, 1]))
        torch.testing.assert_close(net(x, t, None, condition=condition), wanted)
        assert not torch.allclose(net(x, t, None), wanted)


def test_an_unconditional_network_ignores_labels() -> None:
    net = Unet(side=8, channels=1, classes=3, widths=(8,), layers=1, attention=(), groups=4).build().eval()
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([5, 7])
    with torch.no_grad():
        assert torch.equal(net(x, t, torch.tensor([0, 1])), net(x, t))


def test_initial_values_follow_the_stream() -> None:
    assert TINY.initial(Stream((1,))).params.digest() == TINY.initial(Stream((1,))).params.digest()
    assert TINY.initial(Stream((1,))).params.digest() != TINY.initial(Stream((2,))).params.digest()


def test_only_group_norm() -> None:
    with torch.device("meta"):
        names = {type(m).__name__ for m in CifarUnet().resolved(CIFAR).build().modules()}
    assert "GroupNorm" in names and not any("Batch" in n or "LayerNorm" in n for n in names)


@pytest.mark.parametrize(
    "source", ["unet(widths=[30])", "unet(side=6, widths=[32, 32, 32])", "unet(layers=0)", "unet(widths=[])"]
)
def test_impossible_networks_are_refused_as_recipes(source: str) -> None:
    with pytest.raises(RecipeError, match="model: "):
        build(parse(source), Arch, "model")
