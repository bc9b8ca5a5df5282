"""The conditional autoencoder."""

import pytest
import torch

from effuse.core.build import build
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.core.grammar import parse
from effuse.core.model import Arch
from effuse.core.rng import Stream
from effuse.machines.eager import Eager
from effuse.metrics.cost import macs, parameters
from effuse.models.cvae import Cvae, decoder_of
from effuse.models.saved import load_model

ARCH = Cvae(widths=(4, 8), z=3, groups=2).resolved(Shape(8, 2, 5))
EAGER = Eager(torch.device("cpu"))
MODEL = ARCH.initial(Stream((0,)))
X, NOISE, LABELS = torch.randn(6, 2, 8, 8), torch.randn(6, 2, 8, 8), torch.arange(6) % 5


def net_of(model):
    return EAGER.load(model).eval()


@pytest.mark.parametrize(
    ("shape", "z", "size", "work", "half"),
    [(Shape(32, 3, 10), 25, 5_986_741, 80_527_232, 2_330_083), (Shape(32, 1, 10), 10, 5_968_277, 79_330_304, 2_323_745)],
    ids=["colour", "grey"],
)
def test_the_size_that_feddiff_compares_with(shape, z, size, work, half):
    """FedDiff's Table 3: 5.97 M parameters and 79.00 M MACs. A client sends the decoder, which is less than half."""
    arch = Cvae(z=z).resolved(shape)
    assert parameters(arch) == {"total": size, "encoder": size - half, "decoder": half} and macs(arch) == work
    assert abs(size / 5.97e6 - 1) < 0.003 and abs(work / 79.0e6 - 1) < 0.02
    decoder = Cvae(z=z, only="decoder").resolved(shape)
    assert parameters(decoder)["total"] == half and macs(decoder) < work


@torch.no_grad()
def test_a_label_changes_the_decoders_output_and_not_the_code():
    net = net_of(MODEL)
    (a, mean, log_variance), (b, other, same) = (net(X, None, labels, NOISE) for labels in (LABELS, LABELS.flip(0)))
    assert torch.equal(mean, other) and torch.equal(log_variance, same) and mean.shape == (6, 3)
    assert a.shape == X.shape and not torch.allclose(a, b)
    null, none = net(NOISE, None, torch.full((6,), -1)), net(NOISE, None, None)
    assert torch.equal(null, none) and not torch.equal(null, net(NOISE, None, LABELS))


@torch.no_grad()
def test_z_is_the_mean_plus_noise_times_the_deviation():
    """Decoding that z alone gives the reconstruction; of noise in an image's shape the first three values are z."""
    net = net_of(MODEL)
    logits, mean, log_variance = net(X, None, LABELS, NOISE)
    z = mean + torch.exp(log_variance / 2) * NOISE.flatten(1)[:, :3]
    torch.testing.assert_close(net(z, None, LABELS), logits)
    padded = torch.cat([z, torch.randn(6, 125)], 1).view(X.shape)
    torch.testing.assert_close(net(padded, torch.arange(6), LABELS), logits)


@torch.no_grad()
def test_a_decoder_draws_what_the_whole_draws(tmp_path):
    half = decoder_of(MODEL)
    assert half.params.keys() == MODEL.part("decoder").keys() and not any(k.startswith("encoder") for k in half.params)
    assert torch.equal(net_of(half)(NOISE, None, LABELS), net_of(MODEL)(NOISE, None, LABELS))
    with pytest.raises(TypeError, match="has no encoder"):
        net_of(half)(X, None, LABELS, NOISE)
    half.arch.save(net_of(half).module, tmp_path, None)
    opened, _ = load_model(tmp_path)
    assert opened.arch == half.arch and opened.params.digest() == half.params.digest()


@torch.no_grad()
def test_images_do_not_depend_on_their_neighbours():
    """As differential privacy demands; the network has no BatchNorm."""
    net = EAGER.load(MODEL).train()
    together, alone = (net(X[:n], None, LABELS[:n], NOISE[:n])[0][:1] for n in (6, 1))
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("cvae(widths=[])", "at least one residual block"),
        ("cvae(widths=[6], groups=4)", "width 6 is not a multiple of groups=4"),
        ("cvae(side=12, widths=[8, 8, 8])", "side 12 cannot be halved 3 times"),
        ("cvae(side=4, widths=[8, 8])", "groups have one value each"),
        ("cvae(side=4, channels=1, widths=[8], z=17)", "z=17 is more than an image's 16 values"),
    ],
)
def test_impossible_autoencoders_are_refused(source, why):
    with pytest.raises(RecipeError, match=why):
        build(parse(source), Arch, "model")
