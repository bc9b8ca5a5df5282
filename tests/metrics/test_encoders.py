"""Encoders: their inputs, repeatable results, and caches."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from effuse.core import files
from effuse.core.build import build_text
from effuse.core.data import Dataset, Shape
from effuse.core.errors import DataError, RecipeError, RunError, TrainingError
from effuse.core.metric import Outlook, Subject
from effuse.core.spec import spec, text
from effuse.metrics.classifier import Classifier, Convnet
from effuse.metrics.encoders import Encoder, Inception, Network, Pixels, generated, reference, reference_rows, stored
from effuse.metrics.fidelity import FID, KID

SubjectOf = Callable[..., Subject]
CALLS: list[int] = []


@spec
class MeanColour(Encoder, name="mean_colour"):
    """Two features of an image: its mean and its spread."""

    __abstract__ = True
    preprocessing: ClassVar[str] = "none"
    has_head: ClassVar[bool] = False

    def identity(self, subject: Subject) -> str:
        return "fixed"

    def network(self, subject: Subject) -> Network:
        def run(images: torch.Tensor) -> tuple[torch.Tensor, None]:
            CALLS.append(len(images))
            flat = images.float().flatten(1)
            return torch.stack([flat.mean(dim=1), flat.std(dim=1)], dim=1), None

        return run


def test_stored_images() -> None:
    pixels = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    assert stored(pixels, clipped=False).tolist() == [0, 0, 64, 128, 191, 255, 255]
    assert stored(pixels, clipped=True).tolist() == [0, 0, 0, 0, 128, 255, 255]


def test_stored_images_survive_the_way_through_floats(digits: tuple[Dataset, Dataset]) -> None:
    _, test = digits
    assert torch.equal(stored(test.floats(test.images), clipped=False), test.images)


def test_classifier_is_good_on_held_out_digits(subject_of: SubjectOf) -> None:
    subject = subject_of()
    encoding = reference(subject, Classifier(), "test")
    assert encoding.features.shape == (359, 64)
    assert encoding.logits is not None
    assert float((encoding.logits.argmax(dim=1) == subject.test.labels).double().mean()) >= 0.97


@pytest.mark.parametrize(("side", "channels"), [(8, 1), (28, 1), (32, 3), (64, 3)])
def test_convnet_takes_any_size(side: int, channels: int) -> None:
    net = Convnet(Shape(side, channels, 7), width=4).eval()
    assert net(torch.zeros(2, channels, side, side)).shape == (2, 7)


def test_classifier_repeats_and_leaves_the_global_generator_alone(subject_of: SubjectOf) -> None:
    quick = Classifier(width=4, steps=5, epochs=1)
    before = torch.random.get_rng_state()
    with torch.inference_mode():
        first = quick.encode(subject_of().test.images[:5], subject_of(cache=None))
    torch.rand(3)
    after_draw = torch.random.get_rng_state()
    second = quick.encode(subject_of().test.images[:5], subject_of(cache=None))
    assert torch.equal(first.features, second.features)
    assert torch.equal(torch.random.get_rng_state(), after_draw)
    assert not torch.equal(before, after_draw)
    assert not torch.equal(
        Classifier(width=4, steps=5, epochs=1, seed=1).encode(subject_of().test.images[:5], subject_of(cache=None)).features,
        first.features,
    )


def test_classifier_is_trained_once(subject_of: SubjectOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Classifier(width=4, steps=2, epochs=1)
    first = generated(subject_of(cache=tmp_path), quick, 20)
    monkeypatch.setattr(Classifier, "trained", lambda *_: pytest.fail("trained again"))
    assert torch.equal(generated(subject_of(cache=tmp_path), quick, 20).features, first.features)
    assert len([*tmp_path.glob("*.safetensors")]) == 1


def test_other_training_data_means_another_classifier(subject_of: SubjectOf) -> None:
    quick = Classifier(width=4, steps=2)
    assert quick.identity(subject_of()) != quick.identity(subject_of(train=subject_of().test))
    assert quick.identity(subject_of()) != Classifier(width=4, steps=2, seed=1).identity(subject_of())


def test_a_classifier_with_other_weights_has_another_identity(subject_of: SubjectOf, tmp_path: Path) -> None:
    """Training on another device ends with one bias off by 0.5. The weights' digest is part of the protocol, and features of
    real images are computed for each of the two networks.
    """
    metric = FID(n=50, encoder=Classifier(width=4, steps=2, epochs=1))
    first = metric.measure(subject_of(cache=tmp_path))["fid_classifier"]
    assert metric.measure(subject_of(cache=tmp_path))["fid_classifier"] == first
    (file,) = tmp_path.glob("classifier-*.safetensors")
    values = load_file(file)
    save_file(values | {"features.bias": values["features.bias"] + 0.5}, file)
    other = metric.measure(subject_of(cache=tmp_path))["fid_classifier"]
    assert other.protocol["weights"] != first.protocol["weights"]
    assert len([*tmp_path.glob("features-*.safetensors")]) == 2, "the real images are encoded again"


def test_reference_features_are_computed_once(subject_of: SubjectOf, tmp_path: Path) -> None:
    CALLS.clear()
    first = FID(n=50, encoder=MeanColour()).measure(subject_of(cache=tmp_path))
    assert sum(CALLS) == 50 + 359
    again = FID(n=50, encoder=MeanColour()).measure(subject_of(cache=tmp_path))
    assert sum(CALLS) == 2 * 50 + 359
    assert first == again
    FID(n=50, encoder=MeanColour(), clipped=True).measure(subject_of(cache=tmp_path))
    assert sum(CALLS) == 3 * 50 + 2 * 359  # other pixels, other features
    assert sorted({p.name.split("-")[0] for p in tmp_path.iterdir()}) == ["features", "moments"]


def test_a_fid_needs_no_more_of_the_real_images_than_their_moments(subject_of: SubjectOf, tmp_path: Path) -> None:
    """34 MB to copy to another machine, instead of half a gigabyte of features or a minute of GPU time."""
    first = FID(n=50, encoder=MeanColour()).measure(subject_of(cache=tmp_path))
    (features,) = tmp_path.glob("features-*.safetensors")
    features.unlink()
    CALLS.clear()
    assert FID(n=50, encoder=MeanColour()).measure(subject_of(cache=tmp_path)) == first
    assert sum(CALLS) == 50 and not features.exists()


def test_metrics_of_one_evaluation_share_the_samples_features(subject_of: SubjectOf) -> None:
    CALLS.clear()
    subject = subject_of(cache=None)
    FID(n=50, encoder=MeanColour()).measure(subject)
    KID(n=30, encoder=MeanColour()).measure(subject)
    assert sum(CALLS) == 50 + 359


def test_changed_data_is_not_taken_from_the_cache(subject_of: SubjectOf, tmp_path: Path) -> None:
    train = subject_of().train
    CALLS.clear()
    reference(subject_of(cache=tmp_path), MeanColour(), "test")
    reference(subject_of(cache=tmp_path, test=train), MeanColour(), "test")
    assert sum(CALLS) == 359 + 1438


def test_features_of_another_revision_are_not_taken_from_the_cache(
    subject_of: SubjectOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference(subject_of(cache=tmp_path), MeanColour(), "test")
    monkeypatch.setattr(MeanColour, "revision", 2)
    CALLS.clear()
    reference(subject_of(cache=tmp_path), MeanColour(), "test")
    assert sum(CALLS) == 359


def test_a_damaged_cache_file_is_replaced(subject_of: SubjectOf, tmp_path: Path) -> None:
    first = reference(subject_of(cache=tmp_path), MeanColour(), "test")
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(b"half a fi")
    assert torch.equal(reference(subject_of(cache=tmp_path), MeanColour(), "test").features, first.features)
    assert file.stat().st_size > 1000


def test_a_full_disk_says_so(subject_of: SubjectOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(RunError, match="the disk is full; free some space"):
        reference(subject_of(cache=tmp_path), MeanColour(), "test")
    assert {p.suffix for p in tmp_path.iterdir()} == {".lock"}


def test_reference_rows(subject_of: SubjectOf) -> None:
    subject = subject_of()
    assert torch.equal(reference_rows(subject, "test", None), torch.arange(359))
    some = reference_rows(subject, "test", 100)
    assert torch.equal(some, reference_rows(subject, "test", 100))
    assert len(some.unique()) == 100
    assert int(some.max()) > 300  # spread over the whole set
    with pytest.raises(DataError, match="reference=400, but the test split of digits.. has 359 images"):
        reference_rows(subject, "test", 400)
    rest = reference_rows(subject, "test", None, skip=100)
    assert torch.equal(torch.cat([some, rest]).sort().values, torch.arange(359)), "the others, each once"
    assert set(reference_rows(subject, "test", 50, skip=100).tolist()) < set(rest.tolist())
    with pytest.raises(DataError, match="has 259 images beside the 100 skipped; lower either"):
        reference_rows(subject, "test", 260, skip=100)


def test_inception_says_what_is_missing(subject_of: SubjectOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFFUSE_DATA", raising=False)
    with pytest.raises(DataError, match="EFFUSE_DATA is not set"):
        Inception().identity(subject_of())
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"no file {tmp_path}/inception_fid.safetensors"):
        Inception().identity(subject_of())
    with pytest.raises(DataError, match="no file"):
        FID().ready(Outlook(classifies=False, conditional=True, classes=10, real={"train": 100, "test": 100}))


def test_samples_that_are_not_finite_are_refused(subject_of: SubjectOf) -> None:
    with pytest.raises(TrainingError, match="the model has diverged"):
        generated(subject_of(torch.full((2, 1, 8, 8), float("nan"))), MeanColour(), 2)


def test_encoders_in_the_grammar() -> None:
    metric = build_text("fid(n=100, encoder=classifier(seed=3), clipped=True)", FID, "evaluate")
    assert metric == FID(n=100, encoder=Classifier(seed=3), clipped=True)
    assert build_text(text(metric), FID, "evaluate") == metric
    with pytest.raises(RecipeError, match="no encoder 'inceptoin'; did you mean inception"):
        build_text("fid(encoder=inceptoin())", FID, "evaluate")


def test_pixels_are_averaged_over_a_grid(subject_of: SubjectOf) -> None:
    """A 4x4 image whose left half is white: cells of 1, 0, 1, 0. A side above the image's has no effect."""
    image = torch.zeros(1, 1, 4, 4, dtype=torch.uint8)
    image[..., :2] = 255
    assert Pixels(side=2).encode(image, subject_of()).features.tolist() == [[1.0, 0.0, 1.0, 0.0]]
    assert Pixels(side=99).encode(image, subject_of()).features.shape == (1, 16)
    assert FID(n=50, encoder=Pixels()).keys == ("fid_pixels",)
