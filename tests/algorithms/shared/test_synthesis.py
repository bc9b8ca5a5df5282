"""The auxiliary set: sizes, proportions, origins, and how it joins a client's data."""

from collections import Counter

import pytest
import torch
from toy import ADAM, ToyImages, ToyUnet, toy_recipe

from effuse.algorithms.fedddpm import FedDDPM
from effuse.algorithms.localaug import LocalAug
from effuse.algorithms.shared.synthesis import NOBODY, AuxiliarySet, in_proportion, joined, synthesised, together
from effuse.core.data import Dataset, Shard
from effuse.core.rng import Stream
from effuse.core.solvers import Adam
from effuse.core.spec import spec
from effuse.core.workbench import Workbench
from effuse.data.dirichlet import QuantitySkew
from effuse.data.partition import Shards
from effuse.diffusion.samplers import Ddim
from effuse.machines.eager import Eager
from effuse.models.unet import Unet
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.tools.check import check

TASK = Denoise(schedule=Linear(steps=25))


def bench() -> Workbench:
    made = Workbench(Eager(torch.device("cpu")), TASK, 1)
    made.begin(Stream((0, 0, "round")), 0)
    return made


@pytest.mark.parametrize(
    ("histogram", "n", "counts"),
    [
        ((300, 300), 60, [30, 30]),
        ((5, 0, 1), 4, [3, 0, 1]),
        ((1, 1, 1), 2, [1, 1, 0]),
        ((0, 7), 3, [0, 3]),
        ((2, 1), 1, [1, 0]),
    ],
)
def test_labels_in_proportion(histogram, n, counts):
    """By largest remainders: 5/6 of 4 is 3.33 and 1/6 is 0.67, so 3 and 1."""
    assert torch.bincount(in_proportion(histogram, n), minlength=len(histogram)).tolist() == counts


def test_batches_are_drawn_whole_so_that_the_first_images_do_not_depend_on_how_many_are_kept():
    model = ToyUnet().resolved(ToyImages().load("train").shape).initial(Stream((1,)))
    three, five = (synthesised(bench(), 7, model, n, Ddim(steps=2, batch=4)) for n in (3, 5))
    assert len(three) == 3 and len(five) == 5 and torch.equal(five.pixels[:3], three.pixels)
    assert five.pixels.dtype == torch.uint8 and five.origin.tolist() == [7] * 5 and five.labels.tolist() == [0] * 5


def test_no_two_clients_images_come_of_the_same_noise():
    """One model used for two clients gives different images. Another run with the same key repeats them."""
    model, shared = ToyUnet().resolved(ToyImages().load("train").shape).initial(Stream((1,))), bench()
    first, second = (synthesised(shared, k, model, 4, Ddim(steps=2, batch=4)) for k in (0, 1))
    assert not any(torch.equal(a, b) for a, b in zip(first.pixels, second.pixels))
    assert torch.equal(first.pixels, synthesised(bench(), 0, model, 4, Ddim(steps=2, batch=4)).pixels)


def test_a_conditional_model_draws_its_clients_classes():
    data = ToyImages(side=8).load("train")
    arch = Unet(widths=(8, 8), layers=1, attention=(), middle_attention=False, groups=8, conditional=True)
    made = synthesised(bench(), 0, arch.resolved(data.shape).initial(Stream((1,))), 5, Ddim(steps=2, batch=4), (4, 1))
    assert made.labels.tolist() == [0, 0, 0, 0, 1] and made.images(labelled=True).labels.tolist() == [0, 0, 0, 0, 1]


def synthetic(*values: int, client: int = 0) -> AuxiliarySet:
    pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1)
    return AuxiliarySet(pixels, torch.zeros(len(values), dtype=torch.int64), torch.full((len(values),), client))


def test_sets_are_joined_in_order():
    both = together([synthetic(1, 2), synthetic(3, client=4)])
    assert both.pixels.flatten().tolist() == [1, 2, 3] and both.origin.tolist() == [0, 0, 4]
    assert both.rows(torch.tensor([2, 0])).pixels.flatten().tolist() == [3, 1]


def test_labels_and_origins_go_with_their_images():
    """Images 1, 2 and 3 of classes 0, 1, 1 by clients 5, 6, 7: the third and the first, as a set and as training data."""
    pixels = torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1, 1)
    some = AuxiliarySet(pixels, torch.tensor([0, 1, 1]), torch.tensor([5, 6, 7])).rows(torch.tensor([2, 0]))
    assert some.labels.tolist() == [1, 0] and some.origin.tolist() == [7, 5]
    data = some.shard(2, torch.device("cpu")).dataset
    assert data.images.flatten().tolist() == [3, 1] and data.labels.tolist() == [1, 0] and data.classes == ("0", "1")


def test_images_are_what_was_stored():
    """0, 128 and 255 as floats, and back to the same bytes."""
    images = synthetic(0, 128, 255).images(labelled=False)
    assert images.pixels.flatten().tolist() == pytest.approx([-1.0, 0.00392, 1.0], abs=1e-5) and images.labels is None
    assert images.bytes().flatten().tolist() == [0, 128, 255]


def test_joining_a_clients_data_of_another_depth():
    """16-bit data: 255 becomes 65535, 1 becomes 257. The client's labels and its `flip` stay."""
    own = Dataset(
        torch.tensor([7, 9], dtype=torch.int32).view(2, 1, 1, 1), torch.tensor([1, 0]), ("a", "b"), peak=65535, flip=True
    )
    both = joined(Shard(own, torch.tensor([1])), synthetic(255, 1).pixels, None)
    assert both.dataset.images.flatten().tolist() == [9, 65535, 257] and both.dataset.labels.tolist() == [0, 0, 0]
    assert both.dataset.peak == 65535 and both.dataset.flip and both.dataset.images.dtype == torch.int32 and len(both) == 3


def test_every_client_gives_in_proportion_and_at_least_one(tmp_path):
    """A tenth of 173, 24 and 3 images: 17, 2, and one instead of none."""
    algorithm = FedDDPM(warmup=ADAM, local=ADAM, central=ADAM, sampler=Ddim(steps=2, batch=4))
    skewed = QuantitySkew(beta=0.3, minimum=2)
    recipe = toy_recipe(algorithm=algorithm, data=ToyImages(n=200), partition=skewed, rounds=1, seed=7)
    assert [len(s) for s in recipe.shards(recipe.data.load("train"))] == [173, 24, 3]
    run(recipe, tmp_path / "run")
    origin = RunFolder(tmp_path / "run").load_checkpoint().server.auxiliary.origin
    assert torch.bincount(origin).tolist() == [17, 2, 1]


def test_every_warm_up_begins_with_weights_of_its_own(tmp_path, monkeypatch):
    """With steps of no effect, clients upload their initial models: three different ones."""
    uploaded = []

    def noted(bench, client, model, *rest):
        uploaded.append(model.params.digest())
        return synthesised(bench, client, model, *rest)

    monkeypatch.setattr("effuse.algorithms.shared.synthesis.synthesised", noted)
    algorithm = FedDDPM(warmup=Adam(lr=1e-30, batch=8, steps=1), local=ADAM, central=ADAM, sampler=Ddim(steps=2, batch=4))
    run(toy_recipe(algorithm=algorithm, rounds=1), tmp_path / "run")
    assert len(uploaded) == len(set(uploaded)) == 3


@spec
class ConditionalToy(ToyUnet):
    """A toy U-Net with class labels."""

    conditional: bool = True


@spec
class LabelSampler(Ddim):
    """Draws black for the first class and white for the second, so that an image shows its label."""

    def draw(self, net, task, shape, labels, generator, tick):
        return (2.0 * labels - 1.0).view(-1, 1, 1, 1).expand(shape)


def test_a_run_draws_every_clients_classes(tmp_path):
    """Sorted by label and cut in three: 67 dark; 33 dark and 34 light; 66 light.

    Halves are 34, 34 and 33; 34 x 33/67 = 16.75 and 34 x 34/67 = 17.25 round to 17 each. Four are drawn at a time, and
    surplus images dropped. Images show their labels.
    """
    algorithm = FedDDPM(warmup=ADAM, local=ADAM, central=ADAM, sampler=LabelSampler(steps=2, batch=4), share=0.5)
    recipe = toy_recipe(
        algorithm=algorithm, data=ToyImages(n=200), partition=Shards(per_client=1), model=ConditionalToy(), rounds=1
    )
    held = [s.histogram for s in recipe.shards(recipe.data.load("train"))]
    run(recipe, tmp_path / "run")
    A = RunFolder(tmp_path / "run").load_checkpoint().server.auxiliary
    drawn = [torch.bincount(A.labels[A.origin == k], minlength=2).tolist() for k in range(3)]
    assert sorted(zip(map(list, held), drawn)) == [([0, 66], [0, 33]), ([33, 34], [17, 17]), ([67, 0], [34, 0])]
    assert torch.equal(A.pixels.flatten(1), (255 * A.labels).to(torch.uint8)[:, None].expand(-1, 16))


def test_a_share_keeps_the_labels_of_its_images(tmp_path, monkeypatch):
    """A has 34 + 34 + 33 = 101 images of 16 bytes with labels of 8 bytes: 101 x 24 = 2,424 bytes down.

    Every client's share is shuffled: it has both classes, although two of the three clients own one class.
    """
    seen = []

    def noted(shard, pixels, labels):
        seen.append((joined(shard, pixels, labels), len(pixels)))
        return seen[-1][0]

    monkeypatch.setattr("effuse.algorithms.localaug.joined", noted)
    algorithm = LocalAug(warmup=ADAM, local=ADAM, sampler=LabelSampler(steps=2, batch=4), share=0.5)
    recipe = toy_recipe(
        algorithm=algorithm, data=ToyImages(n=200), partition=Shards(per_client=1), model=ConditionalToy(), rounds=1
    )
    run(recipe, tmp_path / "run")
    sharing = next(r for r in RunFolder(tmp_path / "run").records() if r.phase == "sharing")
    assert sharing.traffic.bytes.down == 2424 and sorted(n for _, n in seen) == [33, 34, 34]
    for shard, n in seen:
        images, labels = shard.dataset.images[-n:, 0, 0, 0], shard.dataset.labels[-n:]
        assert torch.equal(images, (255 * labels).to(torch.uint8)) and set(labels.tolist()) == {0, 1}


@pytest.mark.parametrize("model", [ToyUnet(), ConditionalToy()])
@pytest.mark.parametrize("kind", [FedDDPM, LocalAug])
def test_real_images_instead_of_drawn_ones(kind, model, tmp_path):
    """A quarter of 200 are 50 different real images, chosen at random. There is no warm-up.

    Only LocalAug's shares are sent: 50 images of 16 bytes, and labels of 8 bytes for a conditional model.
    """
    rest = {"central": ADAM} if kind is FedDDPM else {}
    algorithm = kind(warmup=ADAM, local=ADAM, sampler=Ddim(steps=2, batch=4), share=0.25, real=True, **rest)
    recipe = toy_recipe(algorithm=algorithm, data=ToyImages(n=200), partition=Shards(per_client=1), model=model, rounds=1)
    predicted = check(recipe)["traffic"]
    run(recipe, tmp_path / "run")
    data, folder = recipe.data.load("train"), RunFolder(tmp_path / "run")
    A = folder.load_checkpoint().server.auxiliary
    shades, own = data.images[:, 0, 0, 0].tolist(), dict(zip(data.images[:, 0, 0, 0].tolist(), data.labels.tolist()))
    taken = A.pixels[:, 0, 0, 0].tolist()
    assert len(taken) == 50 and not Counter(taken) - Counter(shades) and set(A.origin.tolist()) == {NOBODY}
    assert taken != shades[:50] and {own[shade] for shade in taken} == {0, 1}
    assert A.labels.tolist() == ([own[shade] for shade in taken] if model.conditional else [0] * 50)
    records = list(folder.records())
    assert [r.phase for r in records] == ["synthesis", *(["sharing"] if kind is LocalAug else []), "federate"]
    sent = 50 * (16 + 8 * model.conditional) if kind is LocalAug else 0
    assert sum(r.traffic.bytes.total for r in records[:-1]) == sent
    assert sum(r.traffic.bytes.total for r in records) == predicted["bytes"]["total"]
