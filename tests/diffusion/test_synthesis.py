"""The auxiliary set: sizes, proportions, origins, and how it joins a client's data."""

import pytest
import torch
from toy import ADAM, ToyImages, ToyUnet, toy_recipe

from effuse.algorithms.fedddpm import FedDDPM
from effuse.core.data import Dataset, Shard
from effuse.core.machine import Eager
from effuse.core.rng import Stream
from effuse.core.workbench import Workbench
from effuse.data.dirichlet import QuantitySkew
from effuse.diffusion.objective import Denoise
from effuse.diffusion.samplers import Ddim
from effuse.diffusion.schedules import Linear
from effuse.diffusion.synthesis import Synthetic, in_proportion, joined, synthesised, together
from effuse.engines.driver import run
from effuse.engines.folder import RunFolder
from effuse.models.unet import Unet

TASK = Denoise(schedule=Linear(steps=25))


def bench() -> Workbench:
    made = Workbench(Eager(torch.device("cpu"), TASK), 1)
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


def test_a_conditional_model_draws_its_clients_classes():
    data = ToyImages(side=8).load("train")
    arch = Unet(widths=(8, 8), layers=1, attention=(), middle_attention=False, groups=8, conditional=True)
    made = synthesised(bench(), 0, arch.resolved(data.shape).initial(Stream((1,))), 5, Ddim(steps=2, batch=4), (4, 1))
    assert made.labels.tolist() == [0, 0, 0, 0, 1] and made.images(labelled=True).labels.tolist() == [0, 0, 0, 0, 1]


def synthetic(*values: int, client: int = 0) -> Synthetic:
    pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1)
    return Synthetic(pixels, torch.zeros(len(values), dtype=torch.int64), torch.full((len(values),), client))


def test_sets_are_joined_in_order():
    both = together([synthetic(1, 2), synthetic(3, client=4)])
    assert both.pixels.flatten().tolist() == [1, 2, 3] and both.origin.tolist() == [0, 0, 4]
    assert both.rows(torch.tensor([2, 0])).pixels.flatten().tolist() == [3, 1]


def test_images_are_what_was_stored():
    """0, 128 and 255 as floats, and back to the same bytes."""
    images = synthetic(0, 128, 255).images(labelled=False)
    assert images.pixels.flatten().tolist() == pytest.approx([-1.0, 0.00392, 1.0], abs=1e-5) and images.labels is None
    assert images.bytes().flatten().tolist() == [0, 128, 255]


def test_joining_a_clients_data_of_another_depth():
    """16-bit data: 255 becomes 65535, 1 becomes 257; labels and the mirror of the client's own stay."""
    own = Dataset(
        torch.tensor([7, 9], dtype=torch.int32).view(2, 1, 1, 1), torch.tensor([1, 0]), ("a", "b"), peak=65535, flip=True
    )
    both = joined(Shard(own, torch.tensor([1])), synthetic(255, 1).pixels, None)
    assert both.dataset.images.flatten().tolist() == [9, 65535, 257] and both.dataset.labels.tolist() == [0, 0, 0]
    assert both.dataset.peak == 65535 and both.dataset.flip and both.dataset.images.dtype == torch.int32 and len(both) == 3


def test_every_client_gives_in_proportion_and_at_least_one(tmp_path):
    """A tenth of each client's images, rounded; a client of three still gives one."""
    algorithm = FedDDPM(warmup=ADAM, local=ADAM, central=ADAM, sampler=Ddim(steps=2, batch=4))
    recipe = toy_recipe(algorithm=algorithm, data=ToyImages(n=200), partition=QuantitySkew(beta=0.3, minimum=3), rounds=1)
    sizes = [len(s) for s in recipe.shards(recipe.data.load("train"))]
    run(recipe, tmp_path / "run")
    origin = RunFolder(tmp_path / "run").load_checkpoint().server.auxiliary.origin
    assert torch.bincount(origin).tolist() == [max(1, round(0.1 * n)) for n in sizes]
    assert len(set(sizes)) == 3
