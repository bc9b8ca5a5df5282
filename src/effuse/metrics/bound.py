"""FedDDPM's convergence bound: Peng et al., 2025, Lemmas 1 and 2, Eq. 18 and Theorem 1, for L-smooth losses and plain SGD.

K and E count steps here. A client's gradients have variance sigma_l^2, clients differ by (1/N) sum |grad F_i - grad F|^2 <=
sigma_g^2, and the server's gradients on its auxiliary set are those of F with variance sigma_s^2: a biased set is outside
the theory.

Lemma 1 is FedAvg's descent with n of N clients drawn without replacement; its drift is (1/N) sum E|w_ik - w|^2 <= 3 K zeta^2
(sigma_l^2 + 6 K sigma_g^2) + 18 K^2 zeta^2 |grad F|^2, which needs zeta L K <= 1 / (2 sqrt 3). Lemma 2 is the descent of E
server steps, which needs eta L E + (eta L E)^2 <= 1/2. Eq. 18 adds the two; Theorem 1 sums it over T rounds.
"""

import dataclasses
import math

from effuse.core.errors import RecipeError

DRIFT = 1 / (2 * math.sqrt(3))  # the largest zeta L K of the drift
SERVER = (math.sqrt(3) - 1) / 2  # the largest eta L E of Lemma 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """A problem's constants and a run's sizes. The default steps are those of Theorem 1."""

    L: float = 1.0
    sigma_l: float = 1.0
    sigma_g: float = 1.0
    sigma_s: float = 1.0
    gap: float = 1.0  # F(w_0) - F*
    K: int = 1
    E: int = 1
    T: int
    n: int
    N: int
    zeta: float | None = None
    eta: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.N:
            raise RecipeError(f"n: {self.n} clients a round of N={self.N}; choose n from 1 to N")
        for name in ("L", "K", "E", "T", "zeta", "eta"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise RecipeError(f"{name}: {value} must be a number above nought")
        for name in ("sigma_l", "sigma_g", "sigma_s", "gap"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise RecipeError(f"{name}: {value} must be a number, nought or more")

    @property
    def steps(self) -> tuple[float, float]:
        """(zeta, eta), by default 1 / (2 L K sqrt T) and 1 / (2 L E sqrt T)."""
        root = 2 * self.L * math.sqrt(self.T)
        zeta = 1 / (root * self.K) if self.zeta is None else self.zeta
        return zeta, 1 / (root * self.E) if self.eta is None else self.eta

    @property
    def sampling(self) -> float:
        """(N - n) / (2 n (N - 1)): the cost of sampling n of N clients."""
        return (self.N - self.n) / (2 * self.n * (self.N - 1)) if self.N > 1 else 0.0

    def constant(self, u: float | None = None) -> float:
        """C of Lemma 1 at u = zeta L K: 1/2 - 9 u^2 - (N-n) / (2n(N-1)) (54 u^3 + 3 u)."""
        u = self.steps[0] * self.L * self.K if u is None else u
        return 0.5 - 9 * u**2 - self.sampling * (54 * u**3 + 3 * u)

    @property
    def admissible(self) -> tuple[float, float]:
        """The largest (zeta, eta) for which Lemma 1, with C > 0, and Lemma 2 hold."""
        low, high = 0.0, DRIFT
        if self.constant(high) <= 0:
            for _ in range(100):  # C falls as u grows
                middle = (low + high) / 2
                low, high = (middle, high) if self.constant(middle) > 0 else (low, middle)
            high = low
        return high / (self.L * self.K), SERVER / (self.L * self.E)

    @property
    def fewest_rounds(self) -> dict[str, float]:
        """The T from which on Theorem 1's steps are admissible, for each lemma."""
        u = self.admissible[0] * self.L * self.K
        return {"lemma 1": 1 / (4 * u**2), "lemma 2": 1 / (4 * SERVER**2)}

    def refuse(self) -> None:
        """Refuse steps for which the lemmas do not hold."""
        for name, step, most in zip(("zeta", "eta"), self.steps, self.admissible):
            if step > most:
                raise RecipeError(f"{name}: a step of {step:.6g} is above the admissible {most:.6g}; lower it, or raise T")

    def noise(self) -> dict[str, float]:
        """An upper bound on what one round adds to F, term by term: Eq. 18's right side without gradients."""
        (zeta, eta), L, K, E = self.steps, self.L, self.K, self.E
        spread = self.sigma_l**2 + 6 * K * self.sigma_g**2
        drawn = 9 * K**2 * L**2 * zeta**2 * spread + 3 * K * self.sigma_g**2
        return {
            "client drift": zeta * K * 1.5 * K * zeta**2 * L**2 * spread,
            "client noise": zeta * K * L * zeta * self.sigma_l**2 / (2 * self.n),
            "client sampling": zeta * K * L * zeta * self.sampling * drawn,
            "server noise": L * eta**2 * E * self.sigma_s**2,
            "server drift": L**2 * eta**3 * E**2 * self.sigma_s**2,
        }

    def descent(self, before: float, after: float) -> float:
        """A lower bound on what one round removes from F: Eq. 18's terms with E|grad F|^2 at w_t and at the aggregate."""
        zeta, eta = self.steps
        return zeta * self.K * self.constant() * before + 0.5 * eta * self.E * after

    def terms(self) -> dict[str, float]:
        """Theorem 1: the mean of |grad F|^2 over the T models and the T aggregates is at most the sum of these."""
        self.refuse()
        zeta, eta = self.steps
        rate = 2 * min(zeta * self.K * self.constant(), 0.5 * eta * self.E)
        if not 0 < rate < math.inf:
            raise RecipeError(
                f"L: with {self.L:g} the steps of {zeta:g} and {eta:g} leave no number; choose constants nearer to 1"
            )
        return {"start": self.gap / (self.T * rate)} | {name: value / rate for name, value in self.noise().items()}

    def total(self) -> float:
        return sum(self.terms().values())
