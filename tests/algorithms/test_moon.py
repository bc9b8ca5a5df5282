"""MOON by hand: the contrast of three vectors, a first participation, and frozen passes without side effects."""

import json
import math

import pytest
import torch
from torch import Tensor, nn
from toy import ADAM, ToyImages, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.moon import Moon, MoonUpdate, contrastive
from effuse.core.algorithm import on_client
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.core.fit import Fit
from effuse.core.model import Model, Net
from effuse.core.params import Buffers, Params
from effuse.core.recipe import Evaluate
from effuse.core.solvers import SGD
from effuse.core.spec import spec
from effuse.core.task import Batch
from effuse.core.workbench import Client
from effuse.metrics.accuracy import Accuracy
from effuse.metrics.cost import layer_macs
from effuse.models.convnext_unet import ConvnextUnet
from effuse.models.resnet import Cnn, Resnet
from effuse.models.unet import Unet
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.tools.check import check
from effuse.transport.state import Snapshots

NETS = {
    "unet": Unet(widths=(8, 16), layers=1, attention=(4,), groups=4, conditional=True).resolved(Shape(8, 1, 2)),
    "convnext": ConvnextUnet(dim=8, multipliers=(1, 2)).resolved(Shape(8, 1, 2)),
}


class Direction(nn.Module):
    """Features are its weight, a vector in the plane, plus the image's one pixel; its output is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, give: str = "output"):
        z = self.z + x.flatten(1)
        return z if give == "features" else (torch.zeros(len(x), 2) + 0 * z, z)


def contrast(glob, prev, mu=1.0, T=0.5, pixels=(0.0, 0.0), weight=None):
    """The loss and its contrast for z = (1, 0), images of class 0 whose cross-entropy is ln 2 each."""
    net = Net(Direction())
    given = {"glob": {"z": torch.tensor(glob)}, "prev": {"z": torch.tensor(prev)}, "mu": mu, "T": T}
    x = torch.tensor(pixels).view(-1, 1, 1, 1)
    batch = Batch(x, torch.zeros(len(x), dtype=torch.int64), Classify(), weight=weight)
    loss, noted = contrastive(net, batch, given)
    loss.backward()
    return loss.item(), noted.item(), net.params["z"].grad.tolist()


def test_the_contrast_by_hand():
    """cos 1 to the global and 0 to the previous: near 1/T = 2, far 0: -log(e^2 / (e^2 + 1)) = log(1 + e^-2) = 0.126928."""
    loss, noted, _ = contrast([3.0, 0.0], [0.0, 5.0])
    assert noted == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-6)
    assert loss == pytest.approx(math.log(2) + noted, rel=1e-6)
    loss, noted, _ = contrast([3.0, 0.0], [0.0, 5.0], mu=10.0, T=1.0)
    assert [noted, loss] == pytest.approx([math.log(1 + math.exp(-1)), math.log(2) + 10 * noted], rel=1e-6)


def test_the_contrast_of_two_cosines():
    """cos 0.9 and 0.5 at T 0.5: ln(1 + e^(1.0 - 1.8)) = 0.371100666."""
    assert contrast([0.9, 0.19**0.5], [0.5, 0.75**0.5])[1] == pytest.approx(0.371100666, abs=1e-6)


def test_equal_models_give_ln_2_and_a_gradient_of_zero():
    """near = far, so -log(1/2); the gradients of both similarities cancel."""
    _, noted, gradient = contrast([0.0, 1.0], [0.0, 1.0])
    assert noted == pytest.approx(math.log(2), rel=1e-6) and gradient == pytest.approx([0.0, 0.0], abs=1e-7)


def test_the_gradient_by_hand():
    """z = (1, 0), global (0, 1), previous (0, -1): d(far - near)/dz_2 = (-1 - 1) / T = -4, and softplus'(0) = 1/2: -2."""
    assert contrast([0.0, 1.0], [0.0, -1.0])[2] == pytest.approx([0.0, -2.0], abs=1e-6)


class Bench:
    """A client whose fit computes the loss of one image, of class 0 and pixel 0, and does not change the network."""

    size, data = 1, None

    def __init__(self, prev: Params) -> None:
        self.state = {"prev": prev}

    def load(self, model: Model) -> Net:
        net = Direction()
        net.load_state_dict(dict(model.params))
        return Net(net)

    def fit(self, net, solver, data, loss, given) -> Fit:
        batch = Batch(torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64), Classify())
        total, noted = loss(net, batch, given)
        return Fit(1, 1, total.item(), noted=noted.item())

    def unload(self, net: Net) -> Model:
        return Model(Cnn(), Params({"z": net.params["z"].detach()}), Buffers({}))


def test_a_client_is_drawn_to_what_it_received_and_from_what_it_kept():
    """Received (3, 0), cos 1, and kept (0, 5), cos 0; T=1, mu=10: ln(1 + e^-1) = 0.313262, in total ln 2 + 3.132617.

    Exchanged, they would give ln(1 + e) = 1.313262; the default T would give ln(1 + e^-2).
    """
    received, kept = (Params({"z": torch.tensor(z)}) for z in ([3.0, 0.0], [0.0, 5.0]))
    update = Moon(local=ADAM, mu=10.0, T=1.0).train(Bench(kept), Model(Cnn(), received, Buffers({})))
    assert update.contrast == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6) == pytest.approx(0.313262, abs=1e-6)
    assert update.loss == pytest.approx(math.log(2) + 10 * update.contrast, rel=1e-6)


def test_padding_does_not_count():
    """A pixel of 1 makes (2, 1), (4, 1) and (1, 6) of (1, 0), (3, 0) and (0, 5): cosines of 9 / sqrt 85 and 8 / sqrt 185.

    So the contrast is ln(1 + e^(-2 * 0.388015)) = 0.378593; a pixel of 0 has 0.126928. Two images have the mean of both, and
    padding has no weight.
    """
    alone, both, padded = (
        contrast([3.0, 0.0], [0.0, 5.0], pixels=pixels, weight=weight)
        for pixels, weight in (((0.0,), None), ((0.0, 1.0), None), ((0.0, 1.0), torch.tensor([1.0, 0.0])))
    )
    other = math.log(1 + math.exp(2 * (8 / 185**0.5 - 9 / 85**0.5)))
    assert [alone[1], other] == pytest.approx([0.126928, 0.378593], abs=1e-6)
    assert both[1] == pytest.approx((alone[1] + other) / 2, rel=1e-6)
    assert padded[:2] == pytest.approx(alone[:2], rel=1e-6) and padded[2] == pytest.approx(alone[2], abs=1e-7)


class Onlooker(nn.Module):
    """Features are the input times a weight; inputs are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.shown: list[tuple[Tensor, ...]] = []

    def forward(self, x: Tensor, t: Tensor, labels: Tensor, give: str = "output"):
        self.shown.append((x, t, labels))
        z = self.w * x.flatten(1)
        return z if give == "features" else (0 * x, z)


def test_all_three_models_see_the_same_noisy_image():
    """Features are the input times a weight, here 1, 2 and 3: of one input all cosines are 1, and the contrast is ln 2."""
    task, net = Denoise(schedule=Linear(steps=25), drop=0.5), Net(Onlooker())
    x, labels = torch.linspace(-1, 1, 4 * 9).view(4, 1, 3, 3), torch.tensor([0, 1, 0, 1])
    batch = Batch(x, labels, task, task.draw(4, x.shape[1:], labels, torch.Generator().manual_seed(0)))
    given = {"glob": {"w": torch.tensor(2.0)}, "prev": {"w": torch.tensor(3.0)}, "mu": 1.0, "T": 0.5}
    assert contrastive(net, batch, given)[1].item() == pytest.approx(math.log(2), rel=1e-6)
    own, *others = net.module.shown
    assert len(others) == 2 and all(torch.equal(a, b) for other in others for a, b in zip(own, other))
    assert torch.equal(own[0], task.noisy(batch)) and torch.equal(own[1], batch.drawn["t"])


@pytest.mark.parametrize("name", NETS)
def test_features_are_the_pooled_bottleneck(name):
    net = NETS[name].build().eval()
    seen = []
    middle = net.mid_block if name == "unet" else net.middle
    middle.register_forward_hook(lambda module, inputs, output: seen.append(output))
    x, t, labels = torch.randn(2, 1, 8, 8), torch.tensor([1, 2]), torch.tensor([0, 1])
    output, features = net(x, t, labels, give="both")
    assert torch.equal(features, seen[0].mean((2, 3))) and torch.equal(net(x, t, labels), output)
    assert torch.equal(net(x, t, labels, give="features"), features) and features.shape == (2, 16)


def test_the_written_out_pass_is_diffusers_own():
    from diffusers import UNet2DModel

    arch = NETS["unet"]
    ours = arch.build().eval()
    theirs = UNet2DModel(**arch.diffusers_config()).eval()
    theirs.load_state_dict(ours.state_dict())
    x, t, labels = torch.randn(3, 1, 8, 8), torch.tensor([1, 20, 300]), torch.tensor([0, 1, 2])
    assert torch.equal(ours(x, t, labels), theirs(x, t, labels).sample)
    assert torch.equal(ours(x, torch.tensor(7), labels), theirs(x, 7, labels).sample)


def test_other_weights_leave_the_statistics_alone():
    net = Resnet(widths=(8,), blocks=(1,), norm="batch", projection=4).resolved(Shape(8, 1, 2)).build().train()
    before = {k: b.clone() for k, b in net.named_buffers()}
    features = Net(net)(torch.randn(4, 1, 8, 8), params={k: p * 2 for k, p in net.named_parameters()}, give="features")
    assert features.shape == (4, 4) and all(torch.equal(before[k], b) for k, b in net.named_buffers())
    Net(net)(torch.randn(4, 1, 8, 8))
    assert any(not torch.equal(before[k], b) for k, b in net.named_buffers()), "its own pass does write them"


def test_the_first_participation_is_fedavg(tmp_path):
    """Nobody has a previous model in round 0, so one round is FedAvg's to the bit; the second is not, unless mu is 0."""
    arch, task = ConvnextUnet(dim=4, multipliers=(1, 2)), Denoise(schedule=Linear(steps=25))
    digests = {}
    for name, algorithm in {
        "fedavg": FedAvg(local=ADAM),
        "moon": Moon(local=ADAM),
        "mu=0": Moon(local=ADAM, mu=0.0),
    }.items():
        for rounds in (1, 2):
            recipe = toy_recipe(algorithm=algorithm, rounds=rounds, model=arch, task=task)
            digests[name, rounds] = run(recipe, tmp_path / f"{name}-{rounds}").weights_sha256
    assert digests["moon", 1] == digests["fedavg", 1] and digests["moon", 2] != digests["fedavg", 2]
    assert digests["mu=0", 2] == digests["fedavg", 2]
    lines = [json.loads(x) for x in (tmp_path / "moon-2" / "rounds.jsonl").read_text().splitlines()]
    assert "noted" not in lines[0] and abs(lines[1]["noted"]["contrast_from_ln2"]) < math.log(2)


def test_a_client_keeps_the_model_that_it_trained_last(tmp_path):
    """With one client, its model is the global one: after two rounds it keeps the second round's model."""
    run(toy_recipe(algorithm=Moon(local=ADAM), clients=1, rounds=2), tmp_path / "run")
    last = RunFolder(tmp_path / "run").load_checkpoint().snapshots[0]
    kept = Snapshots(tmp_path / "run" / "clients" / "0").read(last)["prev"]
    assert kept.digest() == load(tmp_path / "run").model.params.digest()


@spec
class Contrasting(Moon):
    """Client 0 has no last model; the others report contrasts of 1 and 2."""

    @on_client
    def train(self, client: Client, model: Model) -> MoonUpdate:
        return MoonUpdate(model, 1.0, 0.0, float(client.id) or None)


def test_the_noted_contrast_is_told_from_ln_2(tmp_path):
    """(1 + 2) / 2 - ln 2 = 0.806853; who has no last model does not count."""
    run(toy_recipe(algorithm=Contrasting(local=ADAM), rounds=1), tmp_path / "run")
    assert RunFolder(tmp_path / "run").records()[0].noted["contrast_from_ln2"] == pytest.approx(0.806853, abs=1e-6)


def test_a_classifier_with_a_projection_learns(tmp_path):
    """Dark and light squares; MOON's head of two layers stands between the network and its last layer."""
    local = SGD(lr=0.1, batch=8, epochs=2)
    recipe = toy_recipe(
        algorithm=Moon(local=local, mu=5.0),
        rounds=3,
        data=ToyImages(side=8),
        model=Cnn(widths=(8,), projection=16),
        task=Classify(),
        evaluate=Evaluate(grid=0, metrics=(Accuracy(),)),
    )
    result = run(recipe, tmp_path / "run")
    assert result.metrics["accuracy"].value == 1.0
    assert result.parameters == 8 * 9 + 2 * 8 + (128 * 128 + 128) + (128 * 16 + 16) + (16 * 2 + 2)


def test_it_sends_what_fedavg_sends_and_tells_its_frozen_passes():
    """Table IV of FedPhD gives MOON FedAvg's traffic: the previous model never leaves its client."""
    reports = [
        check(toy_recipe(algorithm=a, model=NETS["unet"], data=ToyImages(side=8)))
        for a in (FedAvg(local=ADAM), Moon(local=ADAM))
    ]
    assert reports[0]["traffic"]["parameters"] == reports[1]["traffic"]["parameters"]
    assert reports[0]["macs_frozen"] == 0 < reports[1]["macs_frozen"] < 2 * reports[1]["macs"]
    assert "gmacs_frozen" not in reports[0]["figures"]
    assert reports[1]["figures"] == reports[0]["figures"] | {"gmacs_frozen": 2 * layer_macs(NETS["unet"], "features") / 1e9}


def test_a_network_without_features_is_refused(tmp_path):
    from hand import HandNet, one_weight_recipe

    with pytest.raises(RecipeError, match="hand_net shows no features"):
        run(one_weight_recipe(Moon(local=SGD(lr=0.5, batch=4, steps=1)), model=HandNet()), tmp_path / "run")
