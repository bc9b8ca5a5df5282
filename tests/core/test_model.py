"""Architectures and models: parts, shapes filled in from the data, and values that must fit."""

import pytest
import torch
from torch import nn

from effuse.core.data import Shape
from effuse.core.errors import ModelError
from effuse.core.model import Arch, Model, fill
from effuse.core.params import Buffers, Params, mean
from effuse.core.registry import registry
from effuse.core.rng import Stream
from effuse.core.spec import spec
from effuse.models.unet import CifarUnet


class TwoHalves(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.front = nn.Linear(1, width, bias=False)
        self.frontier = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


@spec
class CoreHalves(Arch):
    """Two parts; the name of one layer is the beginning of another's."""

    parts = {"first": ("front",), "second": ("frontier", "norm")}

    width: int = 2

    def build(self) -> nn.Module:
        return TwoHalves(self.width)


@spec
class CoreOverlap(CoreHalves):
    """Has one layer in two parts."""

    parts = {"first": ("front", "norm"), "second": ("frontier", "norm")}


@spec
class CoreGap(CoreHalves):
    """Has a layer that is in no part."""

    parts = {"first": ("front",), "second": ("frontier",)}


@spec
class CoreWhole(CoreHalves):
    """Has no parts."""

    parts = {}


def initial(arch: Arch, *key: int) -> Model:
    return arch.initial(Stream(("test", *key)))


def test_parts_select_every_parameter_exactly_once():
    model = initial(CoreHalves())
    first, second = model.part("first"), model.part("second")
    assert set(first) == {"front.weight"} and set(second) == {"frontier.weight", "norm.weight", "norm.bias"}
    assert list(model.part("first", "second")) == list(model.params)
    assert len(model.part()) == 0


def test_a_prefix_ends_at_a_dot():
    """`front` is not a prefix of `frontier`."""
    assert CoreHalves().part_of("front.weight") == "first" and CoreHalves().part_of("frontier.weight") == "second"
    assert CoreHalves().part_of("front") == "first"
    with pytest.raises(ModelError, match="belongs to no part"):
        CoreHalves().part_of("fronts.weight")


@pytest.mark.parametrize(
    "arch, words", [(CoreOverlap(), r"'norm.weight' belongs to \['first', 'second'\]"), (CoreGap(), "belongs to no part")]
)
def test_parts_that_overlap_or_leave_a_gap_are_an_error(arch, words):
    with pytest.raises(ModelError, match=words):
        initial(arch).part("first")


def test_an_unknown_part_is_an_error_that_lists_the_parts():
    with pytest.raises(ModelError, match="core_halves has no part 'third'; it has first, second"):
        initial(CoreHalves()).part("first", "third")
    with pytest.raises(ModelError, match="it has none"):
        initial(CoreWhole()).part("first")


def test_the_parts_of_the_cifar_network_have_their_published_sizes():
    arch = CifarUnet().resolved(Shape(32, 3, 10))
    with torch.device("meta"):
        params = Params({k: p.detach() for k, p in arch.build().named_parameters()})
    model = Model(arch, params, Buffers({}))
    sizes = [model.part(p).numel for p in ("encoder", "bottleneck", "decoder")]
    assert sizes == [10_523_008, 2_888_704, 22_334_595] and sum(sizes) == params.numel


def test_every_architecture_of_the_project_has_parts_that_cover_it():
    """The networks are built on the meta device, without values."""
    checked = 0
    for cls in registry(Arch).values():
        if cls.__module__.startswith("effuse.") and cls.parts:
            try:
                arch = cls().resolved(Shape(32, 3, 10))
            except ValueError:
                continue  # needs a file or another network
            with torch.device("meta"):
                net = arch.build()
            parts = {arch.part_of(name) for name, _ in net.named_parameters()}
            assert parts <= set(cls.parts), cls
            checked += 1
    assert checked >= 3


def test_resolving_fills_in_only_missing_values():
    data = Shape(side=28, channels=1, classes=10)
    assert CoreHalves().resolved(data).shape == data
    fixed = CoreHalves(side=32, classes=3, width=5).resolved(data)
    assert fixed.shape == Shape(32, 1, 3) and fixed.width == 5
    assert CoreHalves(channels=0).resolved(data).channels == 0, "zero is a value"


def test_an_unresolved_shape_is_an_error():
    with pytest.raises(ModelError, match=r"core_halves\(side=4\) is not resolved"):
        _ = CoreHalves(side=4).shape


def test_the_initial_model_depends_only_on_its_stream():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    a = initial(CoreHalves(), 1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    assert a.params.digest() == initial(CoreHalves(), 1).params.digest() != initial(CoreHalves(), 2).params.digest()
    assert set(a.buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def model_of(weight: float, count: int, arch: Arch | None = None) -> Model:
    params, buffers = Params({"w": torch.tensor([weight])}), Buffers({"m": torch.tensor([weight]), "n": torch.tensor(count)})
    return Model(arch or CoreHalves(), params, buffers)


def test_models_are_averaged_with_their_buffers():
    """w and m: (1 * 2 + 3 * 6) / 4 = 5; n: max(9, 4) = 9."""
    average = mean([(model_of(2.0, 9), 1.0), (model_of(6.0, 4), 3.0)])
    assert average.params["w"].item() == average.buffers["m"].item() == 5.0 and average.buffers["n"].item() == 9
    assert average.arch == CoreHalves()
    with pytest.raises(ModelError, match="different architectures"):
        model_of(1.0, 1).lerp(model_of(1.0, 1, CoreHalves(width=3)), 0.5)


def test_replacing_parameters_and_moving_a_model():
    model = model_of(1.0, 1)
    changed = model.holding(Params({"w": torch.tensor([4.0])}))
    assert changed.params["w"].item() == 4.0 and changed.buffers is model.buffers and model.params["w"].item() == 1.0
    hollow = model.to("meta")
    assert hollow.params.hollow and hollow.buffers.hollow


def test_fill_copies_parameters_and_buffers():
    net, model = TwoHalves(2), initial(CoreHalves(), 1)
    buffers = Buffers({k: torch.full_like(t, 7) for k, t in model.buffers.items()})
    fill(net, Model(model.arch, model.params, buffers))
    assert Params.of(net).digest() == model.params.digest() and Buffers.of(net).digest() == buffers.digest()
    with torch.no_grad():
        net.front.weight.zero_()
    assert model.params["front.weight"].abs().sum() > 0, "values are copied"


def test_fill_refuses_what_does_not_fit():
    model = initial(CoreHalves())
    with pytest.raises(ModelError, match=r"'front.weight' of shape \(3, 1\) does not fit core_halves"):
        fill(TwoHalves(2), Model(model.arch, initial(CoreHalves(width=3)).params, model.buffers))
    with pytest.raises(ModelError, match="'stray' of shape"):
        fill(TwoHalves(2), Model(model.arch, Params({**model.params, "stray": torch.ones(1)}), model.buffers))


def test_fill_needs_every_value():
    """A reused network has the values of another job; a missing value would leave one of them in place."""
    model = initial(CoreHalves())
    incomplete = model.params.select(lambda k: k != "norm.bias")
    with pytest.raises(ModelError, match="core_halves got no value for 'norm.bias'"):
        fill(TwoHalves(2), Model(model.arch, incomplete, model.buffers))
    with pytest.raises(ModelError, match="core_halves got no value for 'norm.running_mean'"):
        fill(TwoHalves(2), Model(model.arch, model.params, Buffers({})))
