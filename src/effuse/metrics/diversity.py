"""Diversity: whether samples of one class differ among themselves as much as real images do."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from effuse.core.data import Split
from effuse.core.errors import RecipeError
from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.accuracy import require_labels
from effuse.metrics.distances import mean_pairwise
from effuse.metrics.encoders import stored


@spec
class Diversity(Metric):
    """The mean pairwise pixel distance within a class, generated over real, averaged over the classes."""

    n: Annotated[int, Field(ge=2)] = 500
    split: Split = "test"

    def ready(self, outlook: Outlook) -> None:
        require_labels(self, outlook.conditional)
        if self.n <= outlook.classes:  # labels cycle through the classes
            raise RecipeError(f"diversity: {self.n} samples of {outlook.classes} classes have no two of one class; raise n")

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        drawn, real = subject.samples(self.n), subject.real(self.split)
        require_labels(self, drawn.labels is not None)
        assert drawn.labels is not None
        drawn_flat = stored(drawn.pixels, clipped=False).flatten(1)
        real_flat = stored(real.floats(real.images.cpu()), clipped=False).flatten(1)
        ratios: list[float] = []
        for label in range(len(real.classes)):
            spread, real_spread = _spread(drawn_flat, drawn.labels, label), _spread(real_flat, real.labels, label)
            if spread is not None and real_spread:  # identical real images have no spread to compare with
                ratios.append(spread / real_spread)
        if not ratios:
            raise RecipeError(f"diversity: no class has two generated and two real images; raise n ({self.n})")
        protocol: Protocol = {
            "distance": "pixel L2",
            "classes": len(ratios),
            "generated": self.n,
            "reference": len(real),
            "split": self.split,
            "data": subject.data,
        }
        left_out, warning = len(real.classes) - len(ratios), None
        if left_out:
            warning = f"{left_out} of {len(real.classes)} classes have no two different images and are left out"
        return {"diversity": Measurement(sum(ratios) / len(ratios), protocol, warning)}


def _spread(flat: Tensor, labels: Tensor, label: int) -> float | None:
    some = flat[labels.cpu() == label]
    return mean_pairwise(some) if len(some) >= 2 else None
