"""FedDifRC's Theorems 1 to 3: Wang et al., 2025, for L1-smooth losses and L2-Lipschitz features. E counts steps.

They are computed as printed, although two steps of their proof do not hold: see `FLAWS`.
"""

import dataclasses
import math

from effuse.core.errors import RecipeError

FLAWS = (
    "Eq. 33 replaces -sum |grad|^2 by -E B^2, but Assumption 3 makes B an upper bound of the gradient: "
    "the loss may fall by less, down to nothing",
    "Eq. 30 lets only TDCL change at aggregation, but averaging changes the weights, so cross-entropy and NDCR change too",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theorems:
    """A problem's constants and a run's sizes."""

    L1: float = 1.0  # smoothness of the loss
    L2: float = 1.0  # Lipschitz constant of the features in the weights
    B: float = 1.0  # bound on gradients
    sigma2: float = 1.0  # variance of gradients
    classes: int = 10
    eta: float = 0.01
    E: int = 1  # local steps in a round
    xi: float = 1.0  # the mean squared gradient that Theorem 3 asks for
    start: float = 2.3  # the loss at the beginning of a round, and of the run
    least: float = 0.0  # its infimum

    def __post_init__(self) -> None:
        for name in ("L1", "B", "eta", "E", "xi"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise RecipeError(f"{name}: {value} must be a number above nought")
        for name in ("L2", "sigma2"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise RecipeError(f"{name}: {value} must be a number, nought or more")
        if self.classes < 1:
            raise RecipeError(f"classes: {self.classes} must be a number above nought")
        if not -math.inf < self.least <= self.start < math.inf:
            raise RecipeError(f"least: {self.least} must be a number that is no larger than start={self.start}")

    @property
    def pull(self) -> float:
        """(|C| - 1) L2: how fast TDCL may rise when the features move."""
        return (self.classes - 1) * self.L2

    def terms(self) -> dict[str, float]:
        """Theorem 1: what one round adds to the loss at most, term by term."""
        eta, E = self.eta, self.E
        return {
            "descent": -(eta - self.L1 * eta**2 / 2) * E * self.B**2,
            "noise": self.L1 * E * eta**2 * self.sigma2 / 2,
            "aggregation": self.pull * E * eta * self.B,
        }

    def after(self) -> float:
        """Theorem 1: the expected loss after the round, at most."""
        return self.start + sum(self.terms().values())

    def falls_below(self) -> float:
        """Theorem 2: the loss falls in every round for eta below this. The theorem is empty where it is not positive."""
        return 2 * self.B * (self.B - self.pull) / (self.L1 * (self.sigma2 + self.B**2))

    def converges_below(self) -> float:
        """Theorem 3: the eta below which its number of rounds exists. The theorem is empty where it is not positive."""
        return 2 * (self.xi - self.pull * self.B) / (self.L1 * (self.xi + self.sigma2))

    def rounds(self) -> float | None:
        """Theorem 3: more rounds than this bring the mean squared gradient below xi; None where eta is too large."""
        gain = self.xi * self.E * self.eta * (2 - self.L1 * self.eta)
        lost = self.L1 * self.E * self.eta**2 * self.sigma2 + 2 * self.pull * self.E * self.eta * self.B
        return 2 * (self.start - self.least) / (gain - lost) if self.eta < self.converges_below() else None

    def report(self) -> dict[str, object]:
        """All three, with what is wrong with them."""
        return {
            "given": dataclasses.asdict(self),
            "theorem 1": {"after": self.after(), "terms": self.terms()},
            "theorem 2": {"eta_below": self.falls_below(), "empty": self.falls_below() <= 0},
            "theorem 3": {
                "eta_below": self.converges_below(),
                "rounds": self.rounds(),
                "empty": self.converges_below() <= 0,
            },
            "flaws": list(FLAWS),
        }
