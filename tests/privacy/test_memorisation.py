"""The memorisation score: the published examples, copies, scale, and blocks against a plain computation."""

import pytest
import torch

from effuse.core.rng import Stream
from effuse.privacy import memorisation
from effuse.privacy.memorisation import adaptive_distance


def at(*distances: float) -> torch.Tensor:
    """Training images at these distances from a black image: two pixels, one of which is white by so much."""
    images = torch.zeros(len(distances), 1, 1, 2)
    images[:, 0, 0, 1] = torch.tensor(distances)
    return images


BLACK = torch.zeros(1, 1, 1, 2)


@pytest.mark.parametrize(
    "first, score",
    [
        (1.0, 1.0 / (0.5 * (1.0 + 49 * 2.0) / 50)),  # 1.010101
        (0.9, 0.9 / (0.5 * (0.9 + 49 * 2.0) / 50)),  # 0.910010: flagged
        (2.0, 2.0),  # all equally far
        (0.0, 0.0),  # a copy
    ],
)
def test_published_scores(first, score):
    """The nearest and 49 at 2.0, in any scale; images further away do not count."""
    for scale in (1.0, 1e-3, 255.0):
        train = scale * at(*[2.0] * 20, first, *[2.0] * 29, *[3.0] * 30)
        found = adaptive_distance(BLACK, train)
        assert found.scores.tolist() == pytest.approx([score], abs=1e-6)
        assert found.share == (score < 1) and (first == 2.0 or found.nearest.tolist() == [20])


def test_few_training_images_are_all_neighbours():
    """Three images at 1, 2 and 3: 1 / (0.5 * 2) = 1; alpha 0.25 doubles it; copies of one image score 0."""
    assert adaptive_distance(BLACK, at(2.0, 1.0, 3.0)).scores.tolist() == pytest.approx([1.0])
    assert adaptive_distance(BLACK, at(2.0, 1.0, 3.0), alpha=0.25).scores.tolist() == pytest.approx([2.0])
    assert adaptive_distance(BLACK, at(2.0, 1.0, 3.0), neighbours=2).scores.tolist() == pytest.approx([1 / 0.75])
    assert adaptive_distance(BLACK, at(0.0, 0.0, 0.0)).scores.tolist() == [0.0]


def test_copies_score_zero_among_images_that_differ_by_little():
    """Bright images that differ by one grey level in one pixel: a distance of squares would lose this in rounding."""
    train = torch.full((200, 3, 32, 32), 250, dtype=torch.uint8)
    train.view(200, -1)[torch.arange(200), torch.arange(200)] = 251
    found = adaptive_distance(train[40:60], train)
    assert found.scores.tolist() == [0.0] * 20 and found.nearest.tolist() == list(range(40, 60))
    assert found.share == 1.0


def test_blocks_give_what_all_pairs_give(monkeypatch):
    """90 images against 700 in blocks of 32 and 64, with few neighbours in memory at a time."""
    rng = Stream(("images",)).torch()
    images, train = (torch.randint(256, (n, 3, 4, 4), generator=rng, dtype=torch.uint8) for n in (90, 700))
    images[7] = train[650]
    distances = torch.cdist(images.flatten(1).double(), train.flatten(1).double())
    nearest = distances.sort(dim=1)
    expected = nearest.values[:, 0] / (0.5 * nearest.values[:, :50].mean(1))
    for sizes in ({}, {"BLOCK": 32, "TRAIN_BLOCK": 64, "NUMBERS": 5000}):
        for name, value in sizes.items():
            monkeypatch.setattr(memorisation, name, value)
        found = adaptive_distance(images, train)
        assert found.scores.double().numpy() == pytest.approx(expected.numpy(), rel=1e-5)
        assert found.nearest.tolist() == nearest.indices[:, 0].tolist()
        assert found.scores[7] == 0.0 and found.lowest(1).tolist() == [7]
