"""Pruning: the published counts, Torch-Pruning's own cut as oracle, and small networks by hand."""

import pytest
import torch
import torch_pruning
from torch import nn
from toy import ToyUnet

from effuse.core.build import build
from effuse.core.data import Shape
from effuse.core.errors import ModelError, RecipeError
from effuse.core.grammar import parse
from effuse.core.model import Arch, Model, fill
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream
from effuse.core.spec import spec, text
from effuse.diffusion.samplers import Ancestral
from effuse.metrics.cost import layer_macs, parameters
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.cut import Cut, narrowed
from effuse.models.resnet import Cnn
from effuse.models.saved import load_model
from effuse.models.unet import CifarUnet, DigitsUnet, Unet
from effuse.pruning.groups import Group, groups_of
from effuse.pruning.prune import cut, group_weights, importance, prune
from effuse.tasks.denoise import Denoise

CIFAR = CifarUnet().resolved(Shape(32, 3, 10))
NETS = {
    "unet": Unet(widths=(16, 32), layers=1, attention=(4,), groups=4).resolved(Shape(8, 3, 10)),
    "unet with heads and scales": Unet(
        widths=(16, 32), layers=1, attention=(4,), groups=4, heads=8, conditional=True, resnet_time_scale_shift="scale_shift"
    ).resolved(Shape(8, 3, 10)),
    "unet whose skips begin anywhere": Unet(widths=(16, 24), layers=1, attention=(), groups=4).resolved(Shape(8, 3, 10)),
    "digits": DigitsUnet().resolved(Shape(8, 1, 10)),
    "convnext": ConvnextUnet(dim=12).resolved(Shape(8, 1, 10)),
    "conditional convnext": ConvnextUnet(dim=12, conditional=True).resolved(Shape(8, 1, 10)),
}


def small(name: str) -> Model:
    return NETS[name].initial(Stream((0,)))


def answer(model: Model, net: nn.Module | None = None) -> torch.Tensor:
    """The output of a model, or of another network for the same input."""
    if net is None:
        net = model.arch.build().eval()
        fill(net, model)
    shape = model.arch.shape
    x = torch.randn(2, shape.channels, shape.side, shape.side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return net(x, torch.tensor([3, 7]), torch.tensor([0, 1]) if model.arch.conditional else None)


class Links(nn.Module):
    """Seven convolutions in a row; those of the decoder are created first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.e, self.f, self.g = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1), nn.Conv2d(width, 1, 1)
        self.a, self.b, self.c = nn.Conv2d(1, width, 1), nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.d = nn.Conv2d(width, width, 1)

    def forward(self, x, t, labels=None):
        for layer in (self.a, self.b, self.c, self.d, self.e, self.f):
            x = torch.relu(layer(x))
        return self.g(x)


@spec
class Chain(Arch):
    """Layers a to g, each in one group with the next."""

    parts = {"encoder": ("a", "b", "c"), "bottleneck": ("d",), "decoder": ("e", "f", "g")}
    uncut = ("g",)

    width: int = 8
    cut: Cut = ""

    def build(self) -> nn.Module:
        return narrowed(Links(self.width), self.cut)


def test_the_published_table():
    """FedPhD, Table III: 26.9, 20.3, 13.9 and 9.3 million of 35.7. Ratio 0.2 gives exactly 20,395,598 and 3.436 G."""
    counts = {ratio: parameters(cut(CIFAR, ratio))["total"] for ratio in (0.1, 0.2, 0.3, 0.4)}
    assert counts == {0.1: 26_981_231, 0.2: 20_395_598, 0.3: 13_949_333, 0.4: 9_336_440}
    assert [layer_macs(CIFAR), layer_macs(cut(CIFAR, 0.2))] == [6_065_456_000, 3_436_088_099]
    saved = [round(100 * (1 - n / 35_746_307), 1) for n in counts.values()]
    assert saved == [24.5, 42.9, 61.0, 73.9]


def test_the_rounding_rule():
    """256 channels in 32 groups of 8: any ratio in (0.125, 0.25] leaves 6 of each, so 192. Inner widths: 512 -> 409."""
    for ratio in (0.126, 0.2, 0.25):
        widths = dict(entry.split(":") for entry in cut(CIFAR, ratio).cut.split())
        assert widths["down_blocks.2.resnets.0.conv1"] == "192>192"
    assert dict(entry.split(":") for entry in cut(CIFAR, 0.2).cut.split())["time_embedding.linear_1"] == "128>409"
    group = groups_of(NETS["digits"])[0]
    assert [group.channels, group.blocks] == [32, 8]
    assert [group.keeps(r) for r in (0.0, 0.25, 0.26, 0.5, 0.99)] == [4, 3, 2, 2, 1], "never the last channel of a block"
    ten = Group("ten", 10, 1, ())
    assert 10 * (1 - 0.8) < 2 and [ten.keeps(tenth / 10) for tenth in range(10)] == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("criterion", ["norm", "random"])
@pytest.mark.parametrize("name", NETS)
def test_a_pruned_model_works_and_has_the_predicted_shapes(name, criterion):
    model = small(name)
    less = prune(model, 0.3, criterion, Stream((1,)))
    assert less.arch == cut(model.arch, 0.3) and less.params.numel == parameters(less.arch)["total"] < model.params.numel
    assert answer(less).isfinite().all()
    again = prune(less, 0.4, criterion, Stream((2,)))
    assert again.params.numel < less.params.numel and answer(again).isfinite().all()
    assert prune(model, 0.0, criterion, Stream((1,))).params.digest() == model.params.digest()


@pytest.mark.parametrize("name", NETS)
def test_torch_pruning_gives_the_same(name):
    """The sliced parameters, and the network's output with them, against Torch-Pruning's pruning of modules."""
    model = small(name)
    less = prune(model, 0.3, "norm", Stream((1,)))
    net = model.arch.build().eval()
    fill(net, model)
    shape = model.arch.shape
    one = torch.zeros(1, dtype=torch.int64)
    inputs = (torch.zeros(1, shape.channels, shape.side, shape.side), one, one if model.arch.conditional else None)
    net_before = model.arch.build()
    graph = torch_pruning.DependencyGraph().build_dependency(net, example_inputs=inputs)
    for group in groups_of(model.arch):
        scores = importance(group, net_before, model.params)
        size = group.channels // group.blocks
        worst = scores.view(group.blocks, -1).argsort(1)[:, : size - group.keeps(0.3)]
        worst = worst + torch.arange(group.blocks)[:, None] * size
        root = net.get_submodule(group.name)
        cutter = graph.get_pruner_of_module(root).prune_out_channels
        graph.get_pruning_group(root, cutter, worst.flatten().tolist()).prune()
    assert {k: tuple(p.shape) for k, p in net.named_parameters()} == {k: tuple(t.shape) for k, t in less.params.items()}
    for key, value in net.named_parameters():
        assert torch.equal(value, less.params[key]), key
    for module in net.modules():  # the graph does not update an attribute that diffusers' resampling layers check
        if hasattr(module, "channels") and hasattr(module, "conv"):
            module.channels = module.conv.in_channels
    assert torch.allclose(answer(less), answer(less, net), rtol=1e-4, atol=1e-5)


def test_the_norm_by_hand():
    """Two channels of `down`. Channel 0: a weight of 3 among zeros, no bias, a column of 1 and 2 in `middle`: 9 + 0 + 5 =
    14.

    Channel 1: nine weights of 1, a bias of 2, a column of 0 and 1/2: 9 + 4 + 1/4 = 13.25. So 0 stays. By absolute values (6
    < 11.5), or without the next layer (9 < 13), it would be removed. Channels of `middle`: rows (1, 0) and (2, 1/2), biases
    3 and 1, nine times 1/3 and 1/2 in `up`: 1 + 9 + 1 = 11 and 4.25 + 1 + 2.25 = 7.5. So 0 stays again; without biases it
    would be removed (2 < 6.5).
    """
    arch = ToyUnet(width=2).resolved(Shape(4, 1, 2))
    params = {k: torch.zeros_like(t) for k, t in arch.initial(Stream((0,))).params.items()}
    params["down.weight"][0, 0, 1, 1], params["down.weight"][1] = 3.0, 1.0
    params["down.bias"] = torch.tensor([0.0, 2.0])
    params["middle.weight"] = torch.tensor([[1.0, 0.0], [2.0, 0.5]])[..., None, None]
    params["middle.bias"] = torch.tensor([3.0, 1.0])
    params["up.weight"][0, 0], params["up.weight"][0, 1] = 1 / 3, 0.5
    params["up.bias"] = torch.tensor([99.0])
    model = Model(arch, Params(params), Buffers({}))
    found = {g.name: importance(g, arch.hollow_net(), model.params).tolist() for g in groups_of(arch)}
    assert found == {"down": pytest.approx([14.0, 13.25]), "middle": pytest.approx([11.0, 7.5])}
    less = prune(model, 0.5, "norm", Stream((0,))).params
    assert (less["down.bias"].tolist(), less["middle.bias"].tolist(), less["middle.weight"].item()) == ([0.0], [3.0], 1.0)


def test_the_smallest_norms_are_removed():
    """`down` has 4 channels, each with a row, a bias and a column of `middle`: here multiples of ones, 3, 1, 4 and 2."""
    arch = ToyUnet().resolved(Shape(4, 1, 2))
    size = torch.tensor([3.0, 1.0, 4.0, 2.0])
    ones = {k: torch.ones_like(t) for k, t in arch.initial(Stream((0,))).params.items()}
    ones["down.weight"] *= size[:, None, None, None]
    ones["down.bias"] *= size
    ones["middle.weight"] *= size[None, :, None, None]
    less = prune(Model(arch, Params(ones), Buffers({})), 0.5, "norm", Stream((0,)))
    assert less.params["down.bias"].tolist() == [3.0, 4.0] and less.params["middle.weight"].shape == (2, 2, 1, 1)
    assert less.params["middle.weight"][0, :, 0, 0].tolist() == [3.0, 4.0]
    assert less.params["up.weight"].shape == (1, 2, 3, 3), "the network's output keeps its width"


def test_group_weights_by_hand():
    """Layers down 0, middle 1, up 2; the middle layer is 1. The group of down's outputs has layers down and middle: Q = (1
    + 0) / 2, clamped to 1. The group of middle's outputs, middle and up, has the same. middle.weight is in both groups and
    has twice lambda; up.weight is in one, up.bias in none.
    """
    weights = group_weights(ToyUnet().resolved(Shape(4, 1, 2)), 0.25)
    means = {k: t.unique().tolist() for k, t in weights.items()}
    assert means == {
        "down.weight": [0.25],
        "down.bias": [0.25],
        "middle.weight": [0.5],
        "middle.bias": [0.25],
        "up.weight": [0.25],
        "up.bias": [0.0],
    }


def test_the_distance_from_the_middle_by_hand():
    """Seven layers from a to g, in any order of creation; d is the middle. Each but the last has a group with the next one.

    Mean distances are (3 + 2) / 2, (2 + 1) / 2, (1 + 0) / 2, clamped to 1, then the reverse: lambda 2/5, 2/3, 1, 1, 2/3,
    2/5.
    """
    weights = {k: t.unique().tolist() for k, t in group_weights(Chain().resolved(Shape(4, 1, 2)), 1.0).items()}
    out = dict(zip("abcdefg", (0.4, 2 / 3, 1.0, 1.0, 2 / 3, 0.4, 0.0)))
    for before, layer in zip(" abcdef", "abcdefg"):
        assert weights[f"{layer}.bias"] == pytest.approx([out[layer]])
        assert weights[f"{layer}.weight"] == pytest.approx([out.get(before, 0.0) + out[layer]])


def test_group_weights_fall_towards_both_ends():
    weights = {k: t.mean().item() for k, t in group_weights(CIFAR, 1.0).items()}
    assert weights["mid_block.resnets.0.conv1.weight"] > weights["down_blocks.0.resnets.0.conv1.weight"]
    assert weights["mid_block.resnets.0.conv1.weight"] > weights["up_blocks.3.resnets.2.conv1.weight"] > 0
    assert weights["conv_out.bias"] == 0


def test_random_channels_depend_on_the_stream_alone():
    model = small("unet")
    a, b, c = (prune(model, 0.3, "random", Stream((seed,))).params.digest() for seed in (1, 1, 2))
    assert a == b != c


def test_random_channels_of_one_group_are_not_those_of_the_next():
    """Biases are numbered in each of six layers: four of eight stay in each, and not always the same four."""
    model = Chain().resolved(Shape(4, 1, 2)).initial(Stream((0,)))
    numbered = {f"{layer}.bias": torch.arange(8.0) for layer in "abcdef"}
    less = prune(model.holding(Params(numbered)), 0.5, "random", Stream((0,)))
    stayed = {tuple(less.params[name].tolist()) for name in numbered}
    assert {len(channels) for channels in stayed} == {4} and len(stayed) > 3


def test_a_cut_architecture_is_text():
    arch = cut(CIFAR, 0.2)
    assert build(parse(text(arch)), Arch, "model") == arch and len(arch.cut) < 7000
    assert cut(arch, 0.2).cut != arch.cut


@pytest.mark.parametrize("name", NETS)
def test_a_pruned_model_is_saved_and_opened(name, tmp_path):
    less = prune(small(name), 0.3, "norm", Stream((1,)))
    net = less.arch.build()
    fill(net, less)
    less.arch.save(net, tmp_path, Ancestral().scheduler(Denoise()))
    opened, scheduler = load_model(tmp_path)
    assert opened.arch == less.arch and opened.params.digest() == less.params.digest() and scheduler is not None
    note = "UNet2DModel cannot hold layers of such widths; open this folder with effuse.load"
    assert (note in (tmp_path / "config.json").read_text()) == isinstance(less.arch, Unet)


def test_impossible_cuts_are_refused():
    with pytest.raises(ModelError, match="cnn cannot be pruned"):
        prune(Cnn().resolved(Shape(8, 1, 2)).initial(Stream((0,))), 0.2, "norm", Stream((0,)))
    with pytest.raises(RecipeError, match="cut"):
        build(parse('unet(cut="conv_in:0>3")'), Arch, "model")
    for text_, why in (
        ("nowhere:1>1", "names a layer that the network does not have"),
        ("conv_in:3>999", "no wider than in the uncut network"),
        ("conv_norm_out:33>33", "is not a multiple of its 32 groups"),
    ):
        with pytest.raises(ModelError, match=why):
            CifarUnet(cut=text_).resolved(Shape(32, 3, 10)).build()
