"""Another metric for each class, or for each subgroup of the images, such as one sex or one age band."""

import dataclasses
from typing import Any, Self

import torch
from torch import Tensor

from effuse.core.errors import RecipeError
from effuse.core.metric import Images, Measurement, Metric, Outlook, Subject
from effuse.core.spec import spec


@spec
class ByClass(Metric, name="by_class"):
    """Another metric on the test images of each class alone, and on the samples that were asked for as that class."""

    of: Metric
    attribute: str | None = None  # such as sex: classes are joined whose names agree in `sex=VALUE`

    def __post_init__(self) -> None:
        if getattr(self.of, "split", "test") != "test":
            raise ValueError(f"by_class compares with test images; use split=test in {self.of.name}")

    @property
    def keys(self) -> tuple[str, ...]:
        """What the names of its numbers begin with; they end with the names of classes or subgroups."""
        return tuple(f"{key}_of_{f'{self.attribute}=' if self.attribute else ''}" for key in self.of.keys)

    @property
    def samples(self) -> int:
        return self.of.samples

    @property
    def real(self) -> bool:  # type: ignore[override]
        return self.of.real

    def of_samples(self, n: int) -> Self:
        return dataclasses.replace(self, of=self.of.of_samples(n))

    def ready(self, outlook: Outlook) -> None:
        self.of.ready(outlook)
        if self.samples and not outlook.conditional:
            raise RecipeError("by_class: the samples have no labels; use a class-conditional model")

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        drawn, found = subject.samples(self.samples) if self.samples else None, {}
        for name, labels in subgroups(subject.test.classes, self.attribute).items():
            part = restricted(subject, drawn, labels)
            if not len(part.test):
                continue  # nobody has such images
            metric, n = self.of, self.samples
            if drawn is not None:
                n = len(part.samples(n))
                if n < 2:
                    raise RecipeError(f"by_class: {n} of {self.samples} samples are of {name!r}; raise n of {metric.name}")
                metric = metric.of_samples(n)
            for key, measured in metric.measure(part).items():
                protocol = measured.protocol | {"subgroup": name, "test images": len(part.test)}
                found[f"{key}_of_{name}"] = dataclasses.replace(measured, protocol=protocol)
        return found


def subgroups(classes: tuple[str, ...], attribute: str | None) -> dict[str, list[int]]:
    """The labels of each subgroup, by its name: single classes, or those that agree in an attribute."""
    if attribute is None:
        return {name: [label] for label, name in enumerate(classes)}
    found: dict[str, list[int]] = {}
    for label, name in enumerate(classes):
        word = next((word for word in name.split() if word.startswith(f"{attribute}=")), None)
        if word is not None:
            found.setdefault(word, []).append(label)
    if not found:
        raise RecipeError(
            f"by_class: no class name holds '{attribute}=VALUE'; name a column of classes_from, or leave it out"
        )
    return found


def restricted(subject: Subject, drawn: Images | None, labels: list[int]) -> Subject:
    """The same subject with the test images and samples of these labels only; encoders stay trained on all classes."""

    def among(values: Tensor) -> Tensor:
        return torch.isin(values, torch.tensor(labels, device=values.device)).nonzero()[:, 0]

    test = subject.test.rows(among(subject.test.labels).cpu())
    changes: dict[str, Any] = {}
    if drawn is not None:
        if drawn.labels is None:
            raise RecipeError("by_class: the samples have no labels; use a class-conditional model")
        changes["samples"] = drawn.rows(among(drawn.labels).to(drawn.pixels.device)).first
    return dataclasses.replace(subject, test=test, encoded={}, **changes)  # features of other samples are not these
