"""FedDDPM's bound: its printed constants, and a quadratic federation whose every constant is known."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from effuse.core.errors import RecipeError
from effuse.metrics.bound import Bound


def test_the_constant_of_lemma_1():
    """1/2 - 2.25/T - (N-n)/(2n(N-1)) (6.75/T^1.5 + 1.5/sqrt T) at T = 400, n = 15, N = 100: 0.492204."""
    bound = Bound(T=400, n=15, N=100, K=15, E=47, L=3.0)
    assert bound.constant() == pytest.approx(0.492204, abs=5e-7)
    for T, n, N in itertools.product((5, 400, 600), (1, 15, 30, 100), (100, 200)):
        expected = 0.5 - 2.25 / T - (N - n) / (2 * n * (N - 1)) * (6.75 / T**1.5 + 1.5 / T**0.5)
        assert Bound(T=T, n=n, N=N, K=7, L=0.3).constant() == pytest.approx(expected)


def test_the_fewest_rounds_of_lemma_2():
    """1/2 - eta L E - (eta L E)^2 >= 0 with eta = 1/(2 L E sqrt T): T >= (2 + sqrt 3) / 2 = 1.866025."""
    bound = Bound(T=400, n=15, N=100)
    assert bound.fewest_rounds["lemma 2"] == pytest.approx((2 + math.sqrt(3)) / 2) == pytest.approx(1.866025, abs=5e-7)
    # C > 0 with full participation: 2.25/T < 1/2
    assert Bound(T=400, n=100, N=100).fewest_rounds["lemma 1"] == pytest.approx(4.5)


def test_the_steps_of_the_theorem():
    """1/(2 L K sqrt T) and 1/(2 L E sqrt T) for L = 2, K = 5, E = 10, T = 100: 1/200 and 1/400."""
    assert Bound(T=100, n=5, N=10, K=5, E=10, L=2.0).steps == (pytest.approx(1 / 200), pytest.approx(1 / 400))


def test_the_terms_by_hand():
    """L = 1, K = E = 1, T = 25, so both steps are .1; n = N = 4; all sigmas 2; gap 3.

    C = .5 - 9/100 = .41, rate 2 x .1 x .41 = .082. Start 3 / (25 x .082); drift .1 x 1.5 x .01 x (4 + 24) = .042; client
    noise .1 x .1 x 4 / 8 = .005; no sampling; server noise .01 x 4 = .04, server drift .001 x 4 = .004; each over .082.
    """
    terms = Bound(T=25, n=4, N=4, sigma_l=2, sigma_g=2, sigma_s=2, gap=3).terms()
    by_hand = {"start": 3 / 25, "client drift": 0.042, "client noise": 0.005, "client sampling": 0.0}
    by_hand |= {"server noise": 0.04, "server drift": 0.004}
    assert terms == pytest.approx({name: value / 0.082 for name, value in by_hand.items()})


def test_sampling_by_hand():
    """n = 2 of 4: (N-n)/(2n(N-1)) is 1/6; .1 x .1 / 6 x (9 x .01 x 28 + 3 x 4) = .0242; C = .41 - (.054 + .3)/6 = .351."""
    bound = Bound(T=25, n=2, N=4, sigma_l=2, sigma_g=2, sigma_s=2, gap=3)
    assert bound.constant() == pytest.approx(0.351) and bound.noise()["client sampling"] == pytest.approx(0.0242)
    assert bound.terms()["client sampling"] == pytest.approx(0.0242 / (0.2 * 0.351))


def test_one_client_alone_is_no_sample():
    """n = N = 1: there is no sampling, so C = .5 - .09, and the sampling term is zero."""
    bound = Bound(T=25, n=1, N=1)
    assert bound.constant() == pytest.approx(0.41) and bound.noise()["client sampling"] == 0.0


def test_every_factor_by_hand():
    """L = 2, K = 2, E = 3, n = 2 of 4 (sampling 1/6), zeta = .025, eta = .05, sigmas 2, 3 and 4, T = 10, gap 7.

    u = .025 x 2 x 2 = .1, so C = .5 - .09 - (.054 + .3)/6 = .351. Spread 4 + 6 x 2 x 9 = 112. Client drift .05 x 1.5 x 2 x
    .025^2 x 4 x 112 = .042; client noise .05 x 2 x .025 x 4 / 4 = .0025; sampling .05 x 2 x .025 / 6 x (9 x 4 x 4 x .025^2
    x 112 + 3 x 2 x 9) = .0025 / 6 x (10.08 + 54) = .0267; server noise 2 x .0025 x 3 x 16 = .24; server drift 4 x .000125 x
    9 x 16 = .072. Descent: .05 x .351 = .01755 of the gradient before, .5 x .05 x 3 = .075 of the one after; twice the
    smaller is the rate, .0351. With a tenth of the eta the server's .0075 is smaller, the rate .015.
    """
    bound = Bound(L=2.0, K=2, E=3, n=2, N=4, T=10, zeta=0.025, eta=0.05, sigma_l=2, sigma_g=3, sigma_s=4, gap=7)
    by_hand = {"client drift": 0.042, "client noise": 0.0025, "client sampling": 0.0267}
    by_hand |= {"server noise": 0.24, "server drift": 0.072}
    assert bound.constant() == pytest.approx(0.351) and bound.noise() == pytest.approx(by_hand)
    assert (bound.descent(1.0, 0.0), bound.descent(0.0, 1.0)) == (pytest.approx(0.01755), pytest.approx(0.075))
    assert bound.terms() == pytest.approx(
        {"start": 0.7 / 0.0351} | {name: value / 0.0351 for name, value in by_hand.items()}
    )
    assert dataclasses.replace(bound, eta=0.005).terms()["start"] == pytest.approx(0.7 / 0.015)


def test_admissible_steps_by_hand():
    """L = 2, K = 5, E = 3, full participation: 9 u^2 = 1/2 at u = sqrt 2 / 6, zeta = u / 10; eta = (sqrt 3 - 1)/2 / 6.

    With 2 of 4 clients C is .5 - 9 u^2 - 9 u^3 - u/2: at .19371, .5 - .33771 - .06542 - .09686 = .00001.
    """
    bound = Bound(T=9, n=4, N=4, L=2.0, K=5, E=3)
    assert bound.admissible == pytest.approx((math.sqrt(2) / 60, (math.sqrt(3) - 1) / 12))
    assert dataclasses.replace(bound, n=2).admissible[0] == pytest.approx(0.019371, abs=1e-6)


def test_more_rounds_more_clients_and_less_noise_lower_the_bound():
    base = Bound(T=400, n=15, N=100, K=5, E=5)
    for change in ({"T": 1600}, {"n": 30}, {"sigma_l": 0.5}, {"sigma_g": 0.5}, {"sigma_s": 0.5}, {"gap": 0.5}):
        assert dataclasses.replace(base, **change).total() < base.total(), change


def test_inadmissible_steps_are_refused():
    bound = Bound(T=400, n=15, N=100, K=5)
    zeta, eta = bound.admissible
    assert dataclasses.replace(bound, zeta=zeta * 0.99, eta=eta * 0.99).total() > 0
    for change in ({"zeta": zeta * 1.01}, {"eta": eta * 1.01}, {"T": 1}):
        with pytest.raises(RecipeError, match="is above the admissible"):
            dataclasses.replace(bound, **change).total()
    with pytest.raises(RecipeError, match="n: 11 clients a round of N=10"):
        Bound(T=10, n=11, N=10)


class Quadratics:
    """FedDDPM on F_i(w) = 1/2 sum_j h_j (w_j - a_ij)^2, curvatures h up to L, Gaussian noise: all constants are known."""

    def __init__(self, bound: Bound, dim: int = 4, seed: int = 0, flattest: float = 0.2) -> None:
        self.bound, self.rng = bound, np.random.default_rng(seed)
        self.h = np.linspace(flattest * bound.L, bound.L, dim)
        a = self.rng.normal(size=(bound.N, dim))
        gradients = self.h * (a - a.mean(0))
        # clients differ by exactly sigma_g
        scale = bound.sigma_g / math.sqrt((gradients**2).sum(1).mean())
        self.a = (a - a.mean(0)) * scale + 1.0
        self.best = self.loss(self.a.mean(0))

    def loss(self, w: np.ndarray) -> np.ndarray:
        """F, of one point or of many."""
        return 0.5 * (self.h * (w[..., None, :] - self.a) ** 2).sum(-1).mean(-1)

    def gradient(self, w: np.ndarray) -> np.ndarray:
        return self.h * (w - self.a.mean(0))

    def _noise(self, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
        return sigma / math.sqrt(shape[-1]) * self.rng.normal(size=shape)

    def round(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(aggregate, next model) of many runs at a time; w is runs x dim."""
        b, (zeta, eta) = self.bound, self.bound.steps
        runs = len(w)
        chosen = np.argsort(self.rng.random((runs, b.N)), axis=1)[:, : b.n]
        local = np.repeat(w[:, None], b.n, axis=1)
        for _ in range(b.K):
            local = local - zeta * (self.h * (local - self.a[chosen]) + self._noise(b.sigma_l, local.shape))
        aggregate = w + (local - w[:, None]).mean(1)
        after = aggregate
        for _ in range(b.E):
            after = after - eta * (self.gradient(after) + self._noise(b.sigma_s, after.shape))
        return aggregate, after


def squared(g: np.ndarray) -> np.ndarray:
    return (g**2).sum(-1)


@pytest.mark.parametrize(("T", "n", "K", "E"), [(25, 3, 4, 3), (100, 10, 2, 5), (64, 1, 5, 1)])
def test_the_mean_squared_gradient_stays_below_the_bound(T, n, K, E):
    """200 runs of T rounds from w = 0."""
    bound = Bound(T=T, n=n, N=10, K=K, E=E, L=2.0, sigma_l=0.7, sigma_g=0.9, sigma_s=0.5)
    problem = Quadratics(bound)
    w = np.zeros((200, 4))
    bound = dataclasses.replace(bound, gap=float(problem.loss(w[0]) - problem.best))
    seen = []
    for _ in range(T):
        aggregate, after = problem.round(w)
        seen += [squared(problem.gradient(w)).mean(), squared(problem.gradient(aggregate)).mean()]
        w = after
    assert 0 < np.mean(seen) <= bound.total()


CORNERS = {
    "no client noise": {"sigma_l": 0.0},
    "everybody takes part": {"n": 10},
    "one step each": {"K": 1, "E": 1},
    "nothing random": {"sigma_l": 0.0, "sigma_s": 0.0, "n": 10},
    "nothing random, one step, alike": {"sigma_l": 0.0, "sigma_s": 0.0, "sigma_g": 0.0, "n": 10, "K": 1, "E": 1},
    "no corner": {},
}


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("distance", [0.1, 3.0])
def test_eq_18_by_monte_carlo(corner, distance):
    """20,000 rounds from one point, near the optimum and far: E F(w') <= F(w) - descent + noise, 3 standard errors."""
    base = {"T": 16, "n": 3, "N": 10, "K": 4, "E": 3, "L": 2.0, "sigma_l": 0.7, "sigma_g": 0.9, "sigma_s": 0.5}
    bound = Bound(**base | CORNERS[corner])
    problem = Quadratics(bound)
    w = np.repeat((problem.a.mean(0) + distance)[None], 20_000, axis=0)
    aggregate, after = problem.round(w)
    losses = problem.loss(after)
    descent = bound.descent(float(squared(problem.gradient(w[0]))), float(squared(problem.gradient(aggregate)).mean()))
    most = float(problem.loss(w[0])) - descent + sum(bound.noise().values())
    assert losses.mean() <= most + 3 * losses.std() / math.sqrt(len(losses))


def test_eq_18_is_tight_up_to_two():
    """Nothing random, one tiny step each: F falls by zeta |grad F|^2; the lemmas guarantee a half (C near 1/2)."""
    bound = Bound(T=10**8, n=10, N=10, L=2.0, sigma_l=0.0, sigma_g=0.0, sigma_s=0.0)
    problem = Quadratics(bound)
    w = (problem.a.mean(0) + 1.0)[None]
    aggregate, after = problem.round(w)
    decrease = float(problem.loss(w[0]) - problem.loss(after[0]))
    guaranteed = bound.descent(float(squared(problem.gradient(w[0]))), float(squared(problem.gradient(aggregate[0]))))
    assert guaranteed <= decrease <= 2.01 * guaranteed


@pytest.mark.parametrize(("noisy", "slack"), [({"sigma_l": 0.7}, 1), ({"sigma_g": 0.9}, 3), ({"sigma_s": 0.5}, 2)])
def test_the_slack_of_a_term_is_known(noisy, slack):
    """From the optimum, tiny steps, one kind of randomness at a time, curvature L: F grows by L/2 of a squared distance.

    For the K noises of n clients it is zeta^2 K sigma_l^2 / n, for client sampling (zeta K sigma_g)^2 (N-n) / (n(N-1)), for
    the server's E noises eta^2 E sigma_s^2. The lemmas have the first exactly, three times the second and twice the third.
    """
    quiet = {"sigma_l": 0.0, "sigma_g": 0.0, "sigma_s": 0.0, "zeta": 1e-5, "eta": 1e-5}
    negligible = {"zeta": 1e-12} if "sigma_s" in noisy else {"eta": 1e-12}
    bound = Bound(**{"T": 16, "n": 3, "N": 10, "K": 4, "E": 3, "L": 2.0} | quiet | negligible | noisy)
    problem = Quadratics(bound, flattest=1.0)
    aggregate, after = problem.round(np.repeat(problem.a.mean(0)[None], 20_000, axis=0))
    growth = float(problem.loss(after).mean() - problem.best)
    allowed = sum(bound.noise().values()) - bound.descent(0.0, float(squared(problem.gradient(aggregate)).mean()))
    assert allowed / growth == pytest.approx(slack, rel=0.03)  # the error of 20,000 rounds is half a per cent


@pytest.mark.parametrize("which", ["zeta", "eta"])
def test_ten_times_the_admissible_step_breaks_it(which):
    """zeta L is then 2.36, and eta L 3.66, beyond 2: F grows in every round, which C > 0 excludes if nothing is random."""
    bound = Bound(T=25, n=10, N=10, L=2.0, sigma_l=0.0, sigma_g=0.5, sigma_s=0.0)
    most = dict(zip(("zeta", "eta"), bound.admissible))[which]
    for factor in (1.0, 10.0):
        steps = {"zeta": 1e-9, "eta": 1e-9} | {which: 0.999 * factor * most}
        problem = Quadratics(dataclasses.replace(bound, **steps))
        w = (problem.a.mean(0) + 1.0)[None]
        problem.h[:] = bound.L  # the steepest curvature in every direction
        losses = [float(problem.loss(w[0]))]
        for _ in range(5):
            w = problem.round(w)[1]
            losses.append(float(problem.loss(w[0])))
        falls = [b < a for a, b in itertools.pairwise(losses)]
        assert falls == [factor == 1.0] * 5
    wild = dataclasses.replace(bound, **{which: 10 * most})
    assert which == "eta" or wild.constant() < 0
    with pytest.raises(RecipeError, match=f"{which}: a step of .* is above the admissible"):
        wild.total()
