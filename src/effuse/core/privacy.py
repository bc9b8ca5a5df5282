"""Differential privacy as values: how a solver trains privately, what a run may spend, and what a client released."""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from effuse.core.spec import Spec, spec

Delta = Annotated[float, Field(gt=0, lt=1)]
Accountant = Literal["pld", "rdp"]
# in fp32 the squares of much smaller gradients are zero, so that they would pass as if they had no norm
Clip = Annotated[float, Field(ge=1e-6, le=1e6)]


@dataclasses.dataclass(frozen=True)
class Release:
    """One noisy release of a client's data, as an accountant needs it.

    Neighbouring data sets differ in one unit (an image or a group), which is replaced by nothing. The number of units is
    public.
    """

    what: str  # 'fit', 'histogram': for reports
    kind: Literal["gaussian", "laplace"] = "gaussian"
    noise: float | None = None  # standard deviation or scale of the noise over the sensitivity; None: solved from the budget
    rate: float = 1.0  # the share of units in each step, drawn by Poisson sampling
    steps: int = 1


@spec
class DpSgd(Spec, name="dp_sgd"):
    """DP-SGD (Abadi et al., 2016): Poisson batches, the gradient of each unit clipped, Gaussian noise on their sum."""

    clip: Clip = 1.0  # the largest norm of one unit's gradient
    sigma: PositiveFloat | None = None  # noise over clip; None: solved from the recipe's budget
    repeats: PositiveInt = 1  # rows of a unit, averaged before clipping: noise draws of an image, or images of a group
    physical: PositiveInt | None = None  # units held in memory at a time; None: chosen from the expected batch


@spec
class Budget(Spec):
    """What everything that a client releases in one run may cost it."""

    epsilon: PositiveFloat
    delta: Delta = 1e-5
    unit: Literal["image", "group"] = "image"  # what is protected: an image, or all images of a group, such as a patient
    accountant: Accountant = "pld"  # privacy loss distributions need 5 to 8 % less noise than Renyi divergences
