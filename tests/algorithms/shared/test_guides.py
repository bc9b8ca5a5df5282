"""Guides: principal axes from told moments, pooling, class vectors, and the controls."""

import dataclasses

import pytest
import torch
from one_weight import images
from toy import GUIDE, SMALL, TOY_GUIDE, TOY_NOISE, toy_recipe

from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.shared.guide_math import another, largest, pooled
from effuse.algorithms.shared.guides import Basis, Encoder, Own, Vectors
from effuse.core.build import build_text
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.errors import ModelError
from effuse.core.recipe import Evaluate
from effuse.core.rng import Stream, stream
from effuse.core.solvers import SGD
from effuse.core.workbench import Client
from effuse.machines.eager import Eager
from effuse.models.unet import DigitsUnet
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise

CPU = torch.device("cpu")
SHAPE = Shape(4, 1, 2)


def client_with(shard: Shard, call: int = 0) -> Client:
    client = Client(Eager(CPU), Classify(), 10, 1, shard)
    client.begin(stream(0, 0, "train", call, 1, ""), federated=0)
    return client


def shard_of(n: int, seed: int = 0) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (n, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return Shard.whole(Dataset(pixels, torch.arange(n) % 2, ("dark", "light")))


def ready(guide):
    """The guide with its network fitted to the images, and its model."""
    guide = dataclasses.replace(guide, network=guide.network.resolved(SHAPE))
    return guide, guide.network.initial(Stream((0,)))


def test_pooling_by_hand():
    """One image, two channels at two positions, (1, 3) and (2, -2), centre (1, 0), one axis (1, 1) / 2.

    Reduced: (1 - 1 + 2) / 2 = 1 and (3 - 1 - 2) / 2 = 0: the mean is 0.5, the root mean square the root of 0.5.
    Without a basis: means 2 and 0.
    """
    maps = [torch.zeros(1, 5, 1, 1), torch.tensor([[[[1.0, 3.0]], [[2.0, -2.0]]]])]
    given = {"stage1": 1.0, "centre1": torch.tensor([1.0, 0.0]), "axes1": torch.tensor([[0.5], [0.5]])}
    assert pooled(maps, given).tolist() == [[0.5]]
    assert pooled(maps, {**given, "l2": 1.0}).item() == pytest.approx(0.5**0.5)
    assert pooled(maps, {"stage1": 1.0}).tolist() == [[2.0, 0.0]]


def test_pooling_does_not_grow_with_the_positions():
    """A map enlarged from 2 x 2 to 32 x 32 has the same content: a sum over positions would be sixteen times as long."""
    small = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    given = {"stage0": 1.0, "l2": 1.0}
    large = small.repeat_interleave(16, 2).repeat_interleave(16, 3)
    torch.testing.assert_close(pooled((large,), given), pooled((small,), given))


def test_largest_axes_by_hand():
    """The covariance 2 (1, 1)(1, 1)' + (1, -1)(1, -1)' = (3, 1; 1, 3) has eigenvalues 4 and 2; signs are fixed."""
    found = largest(torch.tensor([[3.0, 1.0], [1.0, 3.0]], dtype=torch.float64), 1)
    torch.testing.assert_close(found, torch.full((2, 1), 0.5**0.5))
    negative = largest(torch.diag(torch.tensor([1.0, 9.0, 4.0], dtype=torch.float64)), 2)
    assert negative.tolist() == [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]


def test_principal_axes_of_told_moments_are_those_of_all_images_together():
    """Clients of 5 and 15 images: the weighted mean of their moments is that of the 20 images in one place."""
    guide, model = ready(dataclasses.replace(GUIDE, widths=(3, 1)))
    shards = [shard_of(5, seed=1), shard_of(15, seed=2)]
    both = Dataset(
        torch.cat([s.dataset.images for s in shards]), torch.cat([s.labels for s in shards]), shards[0].dataset.classes
    )

    def told(shard):
        client = client_with(shard)
        return guide.moments(client, client.load(model), t=0)

    parts = [told(shard) for shard in shards]
    mean = parts[0].lerp(parts[1], 15 / 20)
    whole = told(Shard.whole(both))
    assert mean.dtype == torch.float64 and len(mean) == 16 + 16 * 16 + 1 + 1
    # the noise of step 0 has a deviation of 0.063 and differs between the two
    torch.testing.assert_close(mean, whole, rtol=0.05, atol=0.01)
    basis = guide.basis(4, 2, Stream((0,)), whole)
    assert [a.shape for a in basis.axes] == [(16, 3), (1, 1)] and basis.condition is None
    torch.testing.assert_close(basis.axes[0].T @ basis.axes[0], torch.eye(3), atol=1e-5, rtol=0)
    client = client_with(Shard.whole(both))
    net = client.load(model)
    features = guide.features(client, net, basis, both.labels, None)[:, :3]
    variances = features.var(0)
    assert variances[0] > variances[1] > variances[2], "the first axis has the most variance"


def test_moments_are_exact_where_nothing_is_drawn():
    """An encoder has no noise: moments of two clients together are those of all images to rounding."""
    encoder = Encoder(network=SMALL.resolved(SHAPE))
    model = encoder.network.initial(Stream((0,)))

    def told(shard):
        client = client_with(shard)
        return encoder.moments(client, client.load(model), t=0)

    a, b = shard_of(5, seed=1), shard_of(15, seed=2)
    both = Dataset(torch.cat([a.dataset.images, b.dataset.images]), torch.cat([a.labels, b.labels]), a.dataset.classes)
    torch.testing.assert_close(told(a).lerp(told(b), 0.75), told(Shard.whole(both)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "steps"), [("encoder", [None]), ("own", [3, None])])
def test_an_encoder_looks_once_and_a_denoiser_twice(name, steps, monkeypatch):
    """An encoder has no noise, so that a second pass would give the same features."""
    guide = Encoder(network=SMALL.resolved(SHAPE)) if name == "encoder" else ready(GUIDE)[0]
    asked = []

    def counted(self, client, net, basis, labels, t, z=None):
        asked.append(t)
        return torch.ones(6, sum(self.channels))

    monkeypatch.setattr(type(guide), "features", counted)
    guide.moments(client_with(shard_of(6)), None, t=3)
    assert asked == steps


def test_class_vectors_are_orthonormal_and_know_no_image():
    basis = Vectors().basis(8, 3, Stream((0,)), None)
    torch.testing.assert_close(basis.axes[0] @ basis.axes[0].T, torch.eye(3), atol=1e-6, rtol=0)
    found = Vectors().features(client_with(images(0, 255)), None, basis, torch.tensor([2, 0]), None)
    assert torch.equal(found, basis.axes[0][[2, 0]])
    assert not torch.equal(Vectors().basis(8, 3, Stream((1,)), None).axes[0], basis.axes[0])


def test_more_classes_than_features_have_vectors_of_length_one():
    vectors = Vectors().basis(2, 5, Stream((0,)), None).axes[0]
    assert vectors.shape == (5, 2)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))


def test_another_image_of_the_class():
    """Order 4, 0, 3, 1, 2: class 0 has 4, 0, 2 and class 1 has 3, 1. Each is followed by the next, the last by the first."""
    labels, order = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([4, 0, 3, 1, 2])
    assert another(labels, order).tolist() == [2, 3, 4, 1, 0]
    assert another(torch.tensor([0, 1, 1]), torch.arange(3)).tolist() == [0, 2, 1], "an only image stays"


def seen(guide, model, t=None, z=None, label=0, call=0):
    client = client_with(shard_of(6), call)
    random = Basis(
        tuple(torch.zeros(c) for c in guide.channels),
        tuple(torch.eye(c) for c in guide.channels),
        guide.entry(3, Stream((0,))),
    )
    return guide.features(client, client.load(model), random, torch.full((6,), label), t, z)


def test_an_own_guide_sees_image_class_noise_and_condition():
    guide, model = ready(GUIDE)
    clean = seen(guide, model)
    assert clean.shape == (6, 17) and torch.equal(clean, seen(guide, model, call=1)), "nothing is drawn"
    noisy = seen(guide, model, t=20)
    assert not torch.equal(noisy, seen(guide, model, t=20, call=1)), "noise is"
    for other in (seen(guide, model, label=1), noisy, seen(guide, model, z=torch.eye(6, 3) + 0.1)):
        assert not torch.allclose(clean, other)


def test_the_condition_is_of_the_features_direction():
    guide, model = ready(GUIDE)
    z = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(seen(guide, model, z=z), seen(guide, model, z=10 * z))


def test_the_null_label_is_for_noisy_images():
    guide, model = ready(dataclasses.replace(GUIDE, label="null"))
    assert torch.equal(seen(guide, model, t=20, label=0), seen(guide, model, t=20, label=1))
    assert not torch.equal(seen(guide, model, label=0), seen(guide, model, label=1))


def test_the_other_images_are_the_same_ones_every_time():
    guide, model = ready(dataclasses.replace(GUIDE, image="other"))
    own = seen(dataclasses.replace(guide, image="own"), model)
    other = seen(guide, model)
    assert torch.equal(other, seen(guide, model, call=1))
    pairs = [(own[k] == other[i]).all().item() for i in range(6) for k in range(6)]
    partner = torch.tensor(pairs).view(6, 6).int().argmax(1)
    assert sum(pairs) == 6 and all(i != k and (i - k) % 2 == 0 for i, k in enumerate(partner.tolist()))


@pytest.mark.parametrize(
    ("stages", "widths", "split"),
    [((2, 3, 4), None, (256, 128, 128)), ((1,), None, (512,)), ((0, 1), None, (256, 256)), ((0, 1), (500, 12), (500, 12))],
)
def test_the_first_stage_gets_half(stages, widths, split):
    assert Own(network=TOY_GUIDE, stages=stages, widths=widths).split(512) == split


def test_sixty_four_features_of_digits():
    """64 = 32 + 16 + 16, of stages with 64, 64 and 32 channels."""
    guide = Own(network=DigitsUnet().resolved(Shape(8, 1, 10)), stages=(0, 1, 2))
    assert guide.split(64) == (32, 16, 16) and guide.channels == (64, 64, 32)
    guide.ready(64, 10, 50)


def test_a_guide_is_the_model_of_a_run_and_its_weights_are_pinned(tmp_path):
    """The recipe of the finished run names the folder and the digest; other weights in it are refused."""
    local = SGD(lr=0.1, batch=8, steps=1)
    trained = toy_recipe(model=TOY_GUIDE, task=TOY_NOISE, rounds=1)
    run(trained, tmp_path / "guide")
    guide = build_text(f"own(from_pretrained('{tmp_path}/guide/model'), stages=[0], reduce=random)", Own, "guide")
    guide = dataclasses.replace(guide, task=TOY_NOISE)
    algorithm = FedDifRC(local=local, guide=guide, t=3)
    recipe = toy_recipe(algorithm=algorithm, rounds=1, evaluate=Evaluate(grid=0))
    first = run(recipe, tmp_path / "run", engine="loopback")
    pinned = recipe.resolved(recipe.data.load("train"))
    assert pinned.algorithm.guide.network.sha256 == run(trained, tmp_path / "again").weights_sha256
    untrained = dataclasses.replace(
        recipe, algorithm=dataclasses.replace(algorithm, guide=dataclasses.replace(guide, network=TOY_GUIDE))
    )
    assert run(untrained, tmp_path / "untrained").weights_sha256 != first.weights_sha256
    run(dataclasses.replace(trained, seed=1), tmp_path / "other")
    (tmp_path / "guide/model/model.safetensors").write_bytes((tmp_path / "other/model/model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="are not those of the recipe: their SHA-256 is"):
        run(pinned, tmp_path / "changed")


def test_a_clean_image_has_neither_noise_nor_time():
    """At step 0 of a linear schedule the image still has a = 0.99995 and s = 0.01; None has 1 and 0, and both see t = 0."""
    guide, model = ready(dataclasses.replace(GUIDE, task=Denoise()))
    clean, first = seen(guide, model), seen(guide, model, t=0)
    assert not torch.equal(clean, first) and (clean - first).abs().max() < 0.1


def test_an_encoder_knows_no_class():
    network = SMALL.resolved(SHAPE)
    encoder, model = Encoder(network=network, reduce="random"), network.initial(Stream((0,)))
    basis = encoder.basis(5, 2, Stream((0,)), None)
    client = client_with(shard_of(6))
    net = client.load(model)
    found = encoder.features(client, net, basis, torch.zeros(6, dtype=torch.int64), 3)
    x = client.data.dataset.floats(client.data.dataset.images)
    assert encoder.channels == (16,)
    torch.testing.assert_close(found, net(x, give="features") @ basis.axes[0])
