"""FedDifRC by hand: TDCL, NDCR, the scale U, padding, and when a client looks through the guide."""

import dataclasses
import math

import pytest
import torch
from hand import one_weight_recipe
from torch import Tensor, nn
from toy import ADAM, GUIDE, SMALL, TOY_GUIDE, ToyImages, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.feddifrc import FedDifRC, guided, kl, l2, mean_distance, scale, tdcl, tdcl_alone, unit, unlabelled
from effuse.algorithms.shared.guides import Encoder, Own, Vectors
from effuse.core.data import Dataset, Split
from effuse.core.errors import RecipeError
from effuse.core.model import Net
from effuse.core.spec import spec
from effuse.core.task import Batch
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.runs.save import load
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.views import Views
from effuse.tools.check import check
from effuse.transport.state import Snapshots

# the addendum's example: z, and F of three classes, of which the first is the image's own
Z = torch.tensor([[1.0, 2.0, 2.0]])
F = torch.tensor([[[2.0, 1.0, 2.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
NONE, TAU = {"U": torch.tensor(1.0)}, {"tau": torch.tensor(0.06)}


def batch_of(F: Tensor, labels: list[int], weight: Tensor | None = None, **columns: Tensor) -> Batch:
    x = torch.zeros(len(labels), 1, 1, 1)
    return Batch(x, torch.tensor(labels), Classify(), weight=weight, columns={"F": F, **columns})


@pytest.mark.parametrize("classes", [10, 100, 200])
def test_equal_similarities_give_the_log_of_the_number_of_classes(classes):
    """C equal terms: -log(1/C), so ln 10 = 2.302585, ln 100 = 4.605170, ln 200 = 5.298317."""
    loss = tdcl(Z, batch_of(torch.ones(1, classes, 3), [3]), {**TAU, **NONE})
    assert loss.item() == pytest.approx(math.log(classes), rel=1e-6)


def test_one_near_class_and_nine_far_ones():
    """s+ = 0.9 and nine s- = 0.1 at tau 0.06: ln(1 + 9 e^(-0.8 / 0.06)) = 1.4576e-5, in fp32 to a millionth."""
    sines = [math.sqrt(1 - c * c) for c in (0.9, 0.1)]
    near, far = torch.tensor([0.9, sines[0]]), torch.tensor([0.1, sines[1]])
    loss = tdcl(torch.tensor([[5.0, 0.0]]), batch_of(torch.stack([far, near, *[far] * 8])[None], [1]), {**TAU, **NONE})
    assert 9 * math.exp(-0.8 / 0.06) == pytest.approx(1.4576e-5, rel=1e-4)
    assert loss.item() == pytest.approx(1.4576e-5, abs=1e-6)


def test_tdcl_by_hand():
    """cos = 8/9, 1/3, 2/3 without U: ln(1 + e^((1/3 - 8/9) / 0.06) + e^((2/3 - 8/9) / 0.06)) = 0.024426580.

    Over the bank {z, 0}, U is the mean of |z - F| = sqrt 2, sqrt 8, sqrt 6 and |F| = 3, 1, 1: 2.207107, 1.914214, 1.724745.
    s = 0.402740, 0.174136, 0.386531, and the loss is 0.579650457.
    """
    batch = batch_of(F, [0])
    assert tdcl(Z, batch, {**TAU, **NONE}).item() == pytest.approx(0.024426580, rel=1e-5)
    U = mean_distance(torch.cat([Z, torch.zeros_like(Z)]), torch.ones(2), F)
    assert U[0].tolist() == pytest.approx([(2**0.5 + 3) / 2, (8**0.5 + 1) / 2, (6**0.5 + 1) / 2], rel=1e-6)
    assert tdcl(Z, batch_of(F, [0], U=U), TAU).item() == pytest.approx(0.579650457, rel=1e-5)


def test_u_of_a_batch_is_the_mean_over_its_images():
    """The bank {z, 0} as a batch of two images: both have the U of the example, the second for the same F."""
    both = batch_of(F.expand(2, -1, -1), [0, 0])
    z = torch.cat([Z, torch.zeros_like(Z)])
    assert scale(z, both, TAU)[1].tolist() == pytest.approx([2.207107, 1.914214, 1.724745], rel=1e-6)
    assert tdcl(z, both, TAU)[0].item() == pytest.approx(0.579650457, rel=1e-5)


def test_no_gradient_flows_through_u():
    """With U held at its value, the gradient is that of U as a column."""
    gradients = []
    for columns in ({}, {"U": mean_distance(Z, torch.ones(1), F)}):
        z = Z.clone().requires_grad_()
        tdcl(z, batch_of(F, [0], **columns), TAU).sum().backward()
        gradients.append(z.grad)
    assert torch.equal(*gradients) and gradients[0].norm() > 1e-3


def test_ndcr_by_hand():
    """z = (3, 4), H = (4, 3): 1 + 1 = 2; unit vectors (0.6, 0.8) and (0.8, 0.6): 2 * 0.2^2 = 0.08.

    The release: softmax of these is p = e^0.6 / (e^0.6 + e^0.8) = 0.450166 and 1 - p. The divergence is
    (1 - 2p) ln((1 - p) / p) = 0.099668 * 0.2 = 0.019933599.
    """
    z, H = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]])
    found = [distance(z, H).item() for distance in (l2, unit, kl)]
    assert found == pytest.approx([2.0, 0.08, 0.019933599], rel=1e-5)
    assert [distance(z, z).item() for distance in (l2, unit, kl)] == [0.0, 0.0, 0.0]


def test_the_releases_divergence_is_from_the_guides_side():
    """KL(p || q), p of H = (1, 0), q of z = (0, 1) + (1, 0): p = (0.731059, 0.268941), q = (1/2, 1/2).

    ln 2 + 0.731059 ln 0.731059 + 0.268941 ln 0.268941 = 0.110944; the other way round it is 0.120115.
    """
    assert kl(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]])).item() == pytest.approx(0.110944, rel=1e-5)


def test_the_gradient_of_ndcr_is_twice_the_difference():
    """Eq. 12: 2 (z - H) = (-2, 2)."""
    z = torch.tensor([[3.0, 4.0]], requires_grad=True)
    l2(z, torch.tensor([[4.0, 3.0]])).sum().backward()
    assert z.grad.tolist() == [[-2.0, 2.0]]


class Fixed(nn.Module):
    """Its features are a weight of each image's pixel, and its logits are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor([[1.0, 2.0, 2.0], [3.0, 1.0, 0.5], [0.2, 0.1, 4.0]]))

    def forward(self, x: Tensor, give: str = "output"):
        z = self.rows[x.flatten().long()]
        return (torch.zeros(len(x), 3) + 0 * z, z) if give == "both" else z


def loss_of(rows: list[int], weight=None, **given: float):
    """The loss of these rows of `Fixed`, its second value if any, and the gradient."""
    net = Net(Fixed())
    generator = torch.Generator().manual_seed(0)
    F, H = torch.randn(3, 3, 3, generator=generator), torch.randn(3, 3, generator=generator)
    x, labels = torch.tensor(rows).float().view(-1, 1, 1, 1), torch.tensor([0, 2, 1])[rows]
    columns = {"F": F[rows].half(), "H": H[rows].half()}
    given = {k: torch.tensor(v) for k, v in given.items()}
    found = guided(net, Batch(x, labels, Classify(), weight=weight, columns=columns), given)
    loss, held = found if isinstance(found, tuple) else (found, None)
    loss.backward()
    return loss, held, net.params["rows"].grad


def test_the_loss_is_the_sum_of_three_terms():
    """The cross-entropy of zero logits is ln 3; the second value is the weighted TDCL and NDCR."""
    terms = [loss_of([0, 1, 2], **given)[1].item() for given in ({"tdcl": 1.0, "tau": 0.06}, {"unit": 1.0})]
    loss, held, _ = loss_of([0, 1, 2], tdcl=0.5, tau=0.06, unit=3.0)
    assert held.item() == pytest.approx(0.5 * terms[0] + 3.0 * terms[1], rel=1e-6) and min(terms) > 0.01
    assert loss.item() == pytest.approx(math.log(3) + held.item(), rel=1e-6)
    plain, held, _ = loss_of([0, 1, 2])
    assert held is None and plain.item() == pytest.approx(math.log(3), rel=1e-6)


@pytest.mark.parametrize("distance", ["unit", "l2", "kl"])
def test_a_padded_batch_equals_the_unpadded_one(distance):
    """Two images, and copies of the first as padding: it enters neither the means nor the U of the others."""
    given = {"tdcl": 1.0, "tau": 0.06, distance: 1.0}
    loss, held, gradient = loss_of([0, 1], **given)
    padded = loss_of([0, 1, 0, 0], weight=torch.tensor([1.0, 1.0, 0.0, 0.0]), **given)
    torch.testing.assert_close(padded, (loss, held, gradient), rtol=1e-6, atol=1e-7)
    full = loss_of([0, 1, 0, 0], **given)
    assert abs(full[0] - loss) > 1e-3, "copies that count would change it"


def test_similarities_are_in_fp32_under_autocast():
    """The features of `Fixed` are fp32, and bf16 products would round their cosines."""
    exact = loss_of([0, 1, 2], tdcl=1.0, tau=0.06, unit=1.0)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss_of([0, 1, 2], tdcl=1.0, tau=0.06, unit=1.0)[0], exact)
        a, b = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
        assert (a @ b).dtype == torch.bfloat16, "otherwise this shows nothing"


@pytest.mark.parametrize("engine", ["simulator", "loopback"])
def test_weights_of_nought_give_fedavgs_bits(engine, tmp_path):
    plain = toy_recipe(algorithm=FedDifRC(local=ADAM, guide=GUIDE, tdcl=0.0, ndcr=0.0, t=3), rounds=3)
    fedavg = dataclasses.replace(plain, algorithm=FedAvg(local=ADAM))
    found = [run(recipe, tmp_path / recipe.algorithm.name, engine=engine) for recipe in (plain, fedavg)]
    assert found[0].weights_sha256 == found[1].weights_sha256
    assert found[0].traffic.bytes == found[1].traffic.bytes, "and nothing of the guide is sent"


def last_states(tmp_path, algorithm, **changes):
    """Each client's state after a run of three rounds on the loopback, and the records of these."""
    run(toy_recipe(algorithm=algorithm, rounds=3, **changes), tmp_path / "run", engine="loopback")
    folder = RunFolder(tmp_path / "run")
    ended = folder.load_checkpoint()
    return ended, [Snapshots(folder.path / "clients" / str(k)).read(ended.snapshots[k]) for k in range(3)]


def test_a_client_keeps_what_the_guide_saw_and_not_the_guide(tmp_path):
    """14, 13 and 13 images of two classes, 16 features, in fp16."""
    _, states = last_states(tmp_path, FedDifRC(local=ADAM, guide=GUIDE, t=3))
    assert [state.keys() for state in states] == [{"seen"}] * 3
    seen = [state["seen"] for state in states]
    assert [(s.H.shape, s.F.shape) for s in seen] == [((n, 16), (n, 2, 16)) for n in (14, 13, 13)]
    assert {s.H.dtype for s in seen} | {s.F.dtype for s in seen} == {torch.float16}


def test_terms_without_weight_are_not_looked_at(tmp_path):
    _, states = last_states(tmp_path, FedDifRC(local=ADAM, guide=GUIDE, t=3, tdcl=0.0))
    assert all(state["seen"].F is None and state["seen"].H is not None for state in states)


def test_f_is_refreshed_under_the_clients_own_features(tmp_path):
    """Every two rounds: in rounds 0 and 2 of three. H has no condition and stays that of round 0."""
    algorithm = FedDifRC(local=ADAM, guide=GUIDE, t=3, refresh=2)
    _, states = last_states(tmp_path / "a", algorithm)
    _, once = last_states(tmp_path / "b", dataclasses.replace(algorithm, refresh=3))
    assert [(s["seen"].at, o["seen"].at) for s, o in zip(states, once)] == [(2, 0)] * 3
    for s, o in zip(states, once):
        assert torch.equal(s["seen"].H, o["seen"].H) and not torch.equal(s["seen"].F, o["seen"].F)
    assert all({"guide", "basis"} <= state.keys() for state in states), "they are needed again"


def test_the_guide_is_charged_once(tmp_path):
    """Three rounds of three clients: each is sent the classifier three times, the guide and the basis once.

    The guide has 16 * 1 * 9 + 16 + 16 * 16 + 16 + 16 * 9 + 1 + 3 = 580 values of 4 bytes. Its basis brings 16 channels to
    15 features and 1 to 1: 16 + 1 + 16 * 15 + 1 = 258 values. Up go models, and once the moments in fp64 of the 17 channels:
    16 + 256 + 1 + 1 = 274 values of 8 bytes.
    """
    algorithm = FedDifRC(local=ADAM, guide=GUIDE, t=3)
    sent = run(toy_recipe(algorithm=algorithm, rounds=3), tmp_path / "run").traffic
    plain = run(
        toy_recipe(algorithm=dataclasses.replace(algorithm, tdcl=0.0, ndcr=0.0), rounds=3), tmp_path / "plain"
    ).traffic
    assert sent.bytes.down - plain.bytes.down == 3 * 4 * (580 + 258)
    assert sent.bytes.up - plain.bytes.up == 3 * 8 * 274
    assert check(toy_recipe(algorithm=algorithm, rounds=3))["traffic"]["bytes"]["total"] == sent.bytes.total


def test_what_cannot_work_is_refused_before_a_run():
    with pytest.raises(RecipeError, match="tdcl: encoder gives the same features for every class; set tdcl=0"):
        FedDifRC(local=ADAM, guide=Encoder(network=SMALL))
    with pytest.raises(RecipeError, match="refresh: only F takes z .* with vectors and tdcl=1 leave refresh out"):
        FedDifRC(local=ADAM, guide=Vectors(), refresh=2)
    unet = one_weight_recipe(FedDifRC(local=ADAM, guide=Vectors()))
    with pytest.raises(RecipeError, match="model: hand_net is no classifier with features"):
        check(unet)
    for change, words in (
        ({"widths": None}, "8 principal axes of a stage of 1 channels do not exist; set widths or other stages"),
        ({"widths": (3, 1)}, r"widths \[3, 1\] of 2 stages must add up to the classifier's 16 features"),
        ({"stages": (0, 2)}, "there is no stage 2; toy_labelled has 0 to 1, set stages"),
        ({"network": SMALL}, "cnn shows no stages under a class"),
        ({"network": dataclasses.replace(TOY_GUIDE, classes=3)}, "a network of 3 classes cannot guide one of 2"),
        ({"task": Denoise(), "stages": (0, 1)}, "no step 1000; the guide's task has 1000"),
    ):
        guide = dataclasses.replace(GUIDE, **change)
        with pytest.raises(RecipeError, match=words):
            check(toy_recipe(algorithm=FedDifRC(local=ADAM, guide=guide, t=1000 if "task" in change else 3)))


def test_the_price_of_refreshing_is_told_before_a_run():
    """Five rounds, refreshed every two: rounds 0, 2 and 4. A pass: 16 * 16 * (9 + 16 + 9) = 8,704 products."""
    algorithm = FedDifRC(local=ADAM, guide=GUIDE, t=3, refresh=2)
    (told,) = check(toy_recipe(algorithm=algorithm, rounds=5))["warnings"]
    assert told.startswith("algorithm.refresh: clients look 3 times instead of once; ") and "8,704 multiply-adds" in told
    assert check(toy_recipe(algorithm=dataclasses.replace(algorithm, refresh=None), rounds=5))["warnings"] == []


def test_check_counts_the_features_on_clients():
    """40 images under two classes and one noisy: 40 * 3 * 16 numbers of 2 bytes, in three snapshots."""
    found = check(toy_recipe(algorithm=FedDifRC(local=ADAM, guide=GUIDE, t=3)))
    assert found["disk"]["clients"] == 3 * 40 * 3 * 16 * 2


class Bare(nn.Module):
    """Its features are a weight for each image and view: the first view's rows, then the second one's."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)

    def forward(self, x: Tensor, give: str = "output"):
        return self.rows[x.flatten().long()]


class Numbered(Views):
    """The second view of image i is image i + 3."""

    def seen(self, batch: Batch) -> Tensor:
        return torch.cat([batch.x, batch.x + 3])


def alone(rows: list[int], weight=None, **given: float):
    """The label-free loss of these images, of three, and its gradient."""
    generator = torch.Generator().manual_seed(0)
    net = Net(Bare(torch.randn(6, 4, generator=generator)))
    F, H = torch.randn(3, 1, 4, generator=generator), torch.randn(3, 4, generator=generator)
    columns = {"F": F[rows].half(), "H": H[rows].half()}
    x, labels = torch.tensor(rows).float().view(-1, 1, 1, 1), torch.zeros(len(rows), dtype=torch.int64)
    given = {k: torch.tensor(v) for k, v in given.items()}
    loss, held = unlabelled(net, Batch(x, labels, Numbered(), weight=weight, columns=columns), given)
    loss.backward()
    return loss, held, net.params["rows"].grad


def test_without_labels_the_negatives_are_the_batchs_other_images():
    """z (1, 0) and (0, 1), F of both images (2, 0) and (3, 4): cosines 1 and 0.6, 0 and 0.8. tau 0.5, no U.

    Image 0: ln(1 + e^((0.6 - 1) / 0.5)) = ln(1 + e^-0.8) = 0.371101; image 1: ln(1 + e^((0 - 0.8) / 0.5)) = 0.183901.
    """
    z, F = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[[2.0, 0.0]], [[3.0, 4.0]]])
    found = tdcl_alone(z, batch_of(F, [0, 0]), {"tau": torch.tensor(0.5), **NONE})
    assert found.tolist() == pytest.approx([math.log(1 + math.exp(-0.8)), math.log(1 + math.exp(-1.6))], rel=1e-5)
    assert found.tolist() == pytest.approx([0.371101, 0.183901], abs=1e-6)


def test_without_labels_u_belongs_to_each_f():
    """The same z and F. U_0 = (|(1,0) - (2,0)| + |(0,1) - (2,0)|) / 2 = (1 + sqrt 5) / 2 = 1.618034.

    U_1 = (sqrt 20 + sqrt 18) / 2 = 4.357388. Image 0: s = 1 / 1.618034 = 0.618034 and 0.6 / 4.357388 = 0.137697.
    """
    z, F = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[[2.0, 0.0]], [[3.0, 4.0]]])
    found = tdcl_alone(z, batch_of(F, [0, 0]), {"tau": torch.tensor(0.5)})
    far = (0.6 / ((20**0.5 + 18**0.5) / 2) - 1 / ((1 + 5**0.5) / 2)) / 0.5
    assert found[0].item() == pytest.approx(math.log(1 + math.exp(far)), rel=1e-5)
    assert tdcl_alone(z, batch_of(F, [0, 0], U=mean_distance(z, torch.ones(2), F)), {"tau": torch.tensor(0.5)}).tolist() == (
        pytest.approx(found.tolist(), rel=1e-5)
    )


def test_without_labels_the_loss_is_the_mean_of_both_views():
    """Both terms of both views; labels take no part."""
    given = {"tdcl": 0.5, "tau": 0.06, "unit": 3.0}
    loss, held, _ = alone([0, 1, 2], **given)
    parts = [alone([0, 1, 2], **some)[0].item() for some in ({"tdcl": 1.0, "tau": 0.06}, {"unit": 1.0})]
    assert loss.item() == held.item() == pytest.approx(0.5 * parts[0] + 3.0 * parts[1], rel=1e-6) and min(parts) > 0.01


@pytest.mark.parametrize("U", ["batch", "none"])
def test_without_labels_a_padded_batch_equals_the_unpadded_one(U):
    given = {"tdcl": 1.0, "tau": 0.06, "unit": 1.0} | ({"U": 1.0} if U == "none" else {})
    plain = alone([0, 1], **given)
    padded = alone([0, 1, 0, 0], weight=torch.tensor([1.0, 1.0, 0.0, 0.0]), **given)
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-6)
    assert abs(alone([0, 1, 0, 0], **given)[0] - plain[0]) > 1e-3, "copies that count would change it"


UNCONDITIONAL = dataclasses.replace(GUIDE, network=ToyUnet(width=16, dropout=0.0))


def test_without_labels_a_client_keeps_one_f_and_its_labels_change_nothing(tmp_path):
    """Every image is called light in the second run: it ends in the same weights and in the same features."""
    algorithm = FedDifRC(local=ADAM, guide=UNCONDITIONAL, t=3)
    _, states = last_states(tmp_path / "a", algorithm)
    _, others = last_states(tmp_path / "b", algorithm, data=Mislabelled())
    assert [s["seen"].F.shape for s in states] == [(n, 1, 16) for n in (14, 13, 13)]
    for s, o in zip(states, others):
        assert torch.equal(s["seen"].F, o["seen"].F) and torch.equal(s["seen"].H, o["seen"].H)
    digests = {load(tmp_path / name / "run").model.params.digest() for name in "ab"}
    assert len(digests) == 1


@spec
class Spoken(Own):
    """Without labels it asks noisy images for class 1, and clean ones for class 0 as positive and class 1 as negative."""

    def unlabelled(self, classes: int) -> tuple[int, tuple[int, ...]]:
        return 1, (0, 1)


def test_without_labels_a_guide_may_name_its_own_negatives(tmp_path):
    """Two F of each image; the first is the positive, also of images of the second class."""
    guide = Spoken(**{f.name: getattr(GUIDE, f.name) for f in dataclasses.fields(GUIDE)})
    recipe = toy_recipe(algorithm=FedDifRC(local=ADAM, guide=UNCONDITIONAL, t=3), rounds=1)
    run(dataclasses.replace(recipe, algorithm=FedDifRC(local=ADAM, guide=guide, t=3)), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    seen = Snapshots(folder.path / "clients" / "0").read(folder.load_checkpoint().snapshots[0])["seen"]
    assert seen.F.shape == (14, 2, 16) and not torch.equal(seen.F[:, 0], seen.F[:, 1])
    positive = tdcl_alone(Z, batch_of(F, [2]), {**TAU, **NONE})
    assert torch.equal(positive, tdcl(Z, batch_of(F, [0]), {**TAU, **NONE}))


@spec
class Mislabelled(ToyImages):
    """The same images, all of them called light."""

    def load(self, split: Split) -> Dataset:
        right = super().load(split)
        return dataclasses.replace(right, labels=torch.ones_like(right.labels))


def test_without_labels_what_needs_them_is_refused():
    for guide, weights, words in (
        (Vectors(), {}, r"vectors know labels only, and the task has none; use own"),
        (UNCONDITIONAL, {"tdcl": 0.0, "ndcr": 0.0}, "without labels and with tdcl=0, ndcr=0 there is nothing to learn"),
        (dataclasses.replace(UNCONDITIONAL, image="other"), {}, "image=other takes another image of the class"),
    ):
        recipe = toy_recipe(algorithm=FedDifRC(local=ADAM, guide=UNCONDITIONAL, t=3))
        with pytest.raises(RecipeError, match=words):
            check(dataclasses.replace(recipe, algorithm=FedDifRC(local=ADAM, guide=guide, t=3, **weights)))
    with pytest.raises(RecipeError, match="toy_unet shows no stages under a class; use a unet"):
        check(dataclasses.replace(recipe, task=Classify()))
