"""FedRCL by hand: the relaxed contrast, the penalty on images too alike, padding, and what is refused."""

import dataclasses
import math

import pytest
import torch
from hand import HandNet, one_weight_recipe
from private_fits import private
from recorded import Speckled
from torch import Tensor, nn
from toy import ADAM, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.fedrcl import FedRCL, contrasted, pulled, relaxed
from effuse.core.errors import RecipeError
from effuse.core.model import Net
from effuse.core.privacy import Budget
from effuse.core.solvers import SGD, Adam
from effuse.core.task import Batch
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tasks.classify import Classify

ROWS = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])


def given(near: float = 0.6, tau: float = 0.05, beta: float = 1.0, contrast: float = 1.0):
    values = {"near": near, "tau": tau, "beta": beta, "contrast": contrast}
    return {name: torch.tensor(value) for name, value in values.items()}


def terms(rows: Tensor, labels: list[int], **keys: float):
    found = relaxed(rows, torch.tensor(labels), torch.ones(len(labels), dtype=torch.bool), given(**keys))
    return [term.tolist() for term in found]


def test_contrast_and_penalty_by_hand():
    """Features (1, 0), (0.8, 0.6) of class 0 and (0, 1) of class 1; tau 0.05.

    Image 0: its least similar of the class is image 1 at 0.8, the other class is at 0: ln(1 + e^-16) = 1.125e-7.
    Image 1: 0.8 against 0.6: ln(1 + e^-4) = 0.018149928. Image 2: itself at 1 against 0.6 and 0: ln(1 + e^-8 + e^-20) =
    0.000335406. The mean is 0.006161816. The penalty of images 0 and 1 is ln(1 + e^((0.8 - 1) / 0.05)) = 0.018149928, that
    of image 2 is 0: the mean is 0.012099952.
    """
    contrast, penalty = terms(ROWS, [0, 0, 1])
    assert contrast == pytest.approx([1.125e-7, 0.018149928, 0.000335406], abs=2e-7)
    assert sum(contrast) / 3 == pytest.approx(0.006161816, rel=1e-4)
    assert penalty == pytest.approx([0.018149928, 0.018149928, 0.0], rel=1e-4)
    assert sum(penalty) / 3 == pytest.approx(0.012099952, rel=1e-4)


def test_images_that_are_not_too_alike_have_no_penalty():
    """0.8 is below 0.85."""
    assert terms(ROWS, [0, 0, 1], near=0.85)[1] == [0.0, 0.0, 0.0]


def test_the_least_similar_image_of_the_class_decides():
    """Image 0 has 0.96 and 0.6 in its class: the penalty is ln(1 + e^-8) with near 0.5, and none with near 0.7."""
    rows = torch.tensor([[1.0, 0.0], [0.96, 0.28], [0.6, 0.8]])
    assert terms(rows, [0, 0, 0], near=0.5)[1][0] == pytest.approx(math.log1p(math.exp(-8)), rel=1e-3)
    assert terms(rows, [0, 0, 0], near=0.7)[1][0] == 0.0


def test_two_images_of_other_classes_count():
    """An image alone in its class, others at 0.8, 0.6 and 0: ln(1 + e^-1 + e^-2) at tau 0.2; the third is left out."""
    rows = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
    assert terms(rows, [0, 1, 1, 1], tau=0.2)[0][0] == pytest.approx(math.log(1 + math.exp(-1) + math.exp(-2)), rel=1e-5)


def test_one_class_or_one_image_has_nothing_to_tell_apart():
    assert terms(ROWS, [1, 1, 1])[0] == [0.0, 0.0, 0.0]
    assert terms(ROWS[:1], [1]) == [[0.0], [0.0]]


class Fixed(nn.Module):
    """Two levels: a row of weights for each value of the pixel, and the same mirrored and moved. Its logits are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(ROWS.clone())

    def forward(self, x: Tensor, give: str = "output"):
        z = self.rows[x.flatten().long()]
        return torch.zeros(len(x), 2) + 0 * z, z, (z, z.flip(1) + 0.3)


def loss_of(labels: list[int], rows: list[int], weight: Tensor | None = None, H: Tensor | None = None, **keys: float):
    """The loss, its second value, and the gradient of the rows; with H, half of the distance from it is added."""
    net = Net(Fixed())
    x = torch.tensor(rows).float().view(-1, 1, 1, 1)
    batch = Batch(x, torch.tensor(labels), Classify(), weight=weight, columns={} if H is None else {"H": H.half()})
    loss, held = (contrasted if H is None else pulled)(net, batch, given(**keys) | {"pull": torch.tensor(0.5)})
    loss.backward()
    return loss.detach(), held.detach(), net.params["rows"].grad


def test_the_loss_is_a_mean_over_levels():
    """The cross-entropy of zero logits is ln 2; then 0.5 times the mean over levels of contrast + 2 penalty."""
    loss, held, _ = loss_of([0, 0, 1], [0, 1, 2], beta=2.0, contrast=0.5)
    levels = [terms(rows, [0, 0, 1]) for rows in (ROWS, ROWS.flip(1) + 0.3)]
    wanted = sum(sum(contrast) / 3 + 2 * sum(penalty) / 3 for contrast, penalty in levels) / 2
    assert held.item() == pytest.approx(0.5 * wanted, rel=1e-4) and wanted > 0.01
    assert loss.item() == pytest.approx(math.log(2) + held.item(), rel=1e-6)


def test_a_padded_batch_equals_the_unpadded_one():
    """Copies of the first image: among the positives they would be the most similar, among the negatives they would fill."""
    plain = loss_of([0, 0, 1], [0, 1, 2])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    padded = loss_of([0, 0, 1, 0, 0], [0, 1, 2, 0, 0], weight)
    torch.testing.assert_close(padded, plain)
    assert torch.isfinite(padded[2]).all()
    # a padded image of another class, near image 2, would be its hardest negative
    near = loss_of([0, 0, 1, 0], [0, 1, 2, 2], weight[[0, 1, 2, 3]])
    torch.testing.assert_close(near, plain)
    assert abs(loss_of([0, 0, 1, 0], [0, 1, 2, 2])[0] - plain[0]) > 1e-3, "if it counted"


def test_the_distance_from_a_guide_by_hand():
    """Features (1, 0), (0.8, 0.6), (0, 1) and H (0, 0), (0.8, 0.6), (0, 3): distances 1, 0 and 4, half of their mean 5/6."""
    H = torch.tensor([[0.0, 0.0], [0.8, 0.6], [0.0, 3.0]])
    plain, held, _ = loss_of([0, 0, 1], [0, 1, 2])
    found = loss_of([0, 0, 1], [0, 1, 2], H=H)
    assert [x.item() for x in found[:2]] == pytest.approx([plain.item() + 5 / 6, held.item() + 5 / 6], rel=1e-3)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
    padded = loss_of([0, 0, 1, 0], [0, 1, 2, 0], weight, H=torch.cat([H, torch.full((1, 2), 9.0)]))
    torch.testing.assert_close(padded, found)


def test_similarities_are_in_fp32_under_autocast():
    exact = loss_of([0, 0, 1], [0, 1, 2])[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss_of([0, 0, 1], [0, 1, 2])[0], exact)


def test_training_lowers_it_and_the_round_notes_it(tmp_path):
    """Seventy random images of two classes, beside a run with next to no weight on the term."""
    noted = {}
    for weight in (1.0, 1e-6):
        algorithm = FedRCL(local=Adam(lr=1e-2, batch=16, epochs=2), contrast=weight, beta=0.0, tau=0.5)
        run(toy_recipe(algorithm=algorithm, rounds=5, data=Speckled()), tmp_path / str(weight))
        noted[weight] = [r.noted["contrast"] / weight for r in RunFolder(tmp_path / str(weight)).records()]
    assert noted[1.0][-1] < 0.98 * noted[1.0][0] and noted[1.0][-1] < noted[1e-6][-1]


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_without_a_weight_it_is_fedavg(engine, tmp_path):
    recipe = toy_recipe(algorithm=FedRCL(local=ADAM, contrast=0.0), rounds=3)
    fedavg = dataclasses.replace(recipe, algorithm=FedAvg(local=ADAM))
    a, b = (run(r, tmp_path / r.algorithm.name, engine=engine) for r in (recipe, fedavg))
    assert a.weights_sha256 == b.weights_sha256 and a.traffic.bytes == b.traffic.bytes


def test_a_private_fit_is_refused_and_possible_without_the_term(tmp_path):
    budget = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")
    with pytest.raises(RecipeError, match="loss of fedrcl compares the images of a batch, .* or contrast=0"):
        run(toy_recipe(algorithm=private(FedRCL(local=ADAM)), budget=budget), tmp_path / "run")
    run(toy_recipe(algorithm=private(FedRCL(local=ADAM, contrast=0.0)), budget=budget, rounds=1), tmp_path / "plain")


def test_a_network_without_levels_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="hand_net shows no levels, which FedRCL compares; use a resnet"):
        run(one_weight_recipe(FedRCL(local=SGD(lr=0.5, batch=4, steps=1)), model=HandNet()), tmp_path / "run")
