"""What releases compose to, against published and recomputed numbers, and the noise that a budget asks for."""

import math

import pytest

from effuse.core.errors import RecipeError
from effuse.core.files import cache_folder
from effuse.core.privacy import Budget, Release
from effuse.privacy import accountant
from effuse.privacy.accountant import epsilon_of, merged, solve

DELTA = 1e-5
ASKED = Release("fit", rate=1 / 40, steps=8000)  # n = 5000 in batches of 128: ceil(5000 / 128) = 40 an epoch, 200 epochs
LARGE = pytest.mark.slow("large losses take long; only another dp-accounting, or a change to the search, can break it alone")
HISTOGRAM, MAGNITUDE = Release("histogram", noise=20.0), Release("magnitude", noise=10.0)


def fit(sigma: float, rate: float = 1 / 40, steps: int = 8000) -> Release:
    return Release("fit", noise=sigma, rate=rate, steps=steps)


@pytest.mark.parametrize(
    "sigma, rate, steps, rdp, pld",
    [
        (1.0, 128 / 5000, 7812, 17.877, 16.628),
        (2.0, 128 / 5000, 7812, 5.942, 5.499),
        (0.5, 128 / 5000, 7812, 117.44, 110.22),
        (1.0, 1 / 40, 8000, 17.619, 16.381),
        (1.0, 0.01, 1000, 2.101, 1.828),
        (7.07, 1.0, 200, 10.728, 9.999),
    ],
)
def test_the_accountants_give_the_known_values(sigma, rate, steps, rdp, pld):
    """Opacus' Renyi accountant, and privacy loss distributions with a grid of 1e-4; to the digits that were noted."""
    assert epsilon_of([fit(sigma, rate, steps)], DELTA, "rdp") == pytest.approx(rdp, rel=2.5e-4)
    assert epsilon_of([fit(sigma, rate, steps)], DELTA) == pytest.approx(pld, rel=1.5e-4)


@pytest.mark.parametrize("noise, exact", [(20.0, 0.160042), (10.0, 0.340669), (5.0, 0.725522)])
def test_one_gaussian_release_costs_what_its_closed_form_says(noise, exact):
    """The grid rounds up, by less than 1e-5; Renyi divergences ask for about a tenth more."""
    release = [Release("magnitude", noise=noise)]
    assert exact - 1e-6 <= epsilon_of(release, DELTA) <= exact + 1e-5
    assert 1.05 * exact < epsilon_of(release, DELTA, "rdp") < 1.15 * exact


def test_one_laplace_release_costs_what_its_closed_form_says():
    """delta(epsilon) = 1 - exp((epsilon - 1/2) / 2) at scale 2: epsilon is 1/2 + 2 log(0.9) = 0.289279 at delta 0.1."""
    assert epsilon_of([Release("histogram", "laplace", 2.0)], 0.1) == pytest.approx(0.289279, abs=1e-4)
    assert epsilon_of([Release("histogram", "laplace", 2.0)], 1e-9) == pytest.approx(0.5, abs=1e-4)


def test_a_thousand_small_laplace_releases_cost_a_tenth_of_their_sum():
    """Noise of scale 1000 on each of 1,024 coefficients: 1.024 by addition."""
    spectrum = [Release("spectrum", "laplace", 1000.0, steps=1024)]
    assert epsilon_of(spectrum, DELTA) == pytest.approx(0.098, abs=3e-4)
    assert epsilon_of(spectrum, DELTA, "rdp") == pytest.approx(0.110, abs=3e-4)


def test_releases_compose_and_do_not_add():
    """Beside a training of epsilon 10, a histogram (0.160) and a magnitude (0.341) cost 0.02 and not 0.5."""
    alone, together = epsilon_of([fit(1.3154)], DELTA), epsilon_of([fit(1.3154), HISTOGRAM, MAGNITUDE], DELTA)
    assert alone == pytest.approx(10, abs=0.002) and 0.01 < together - alone < 0.03


def test_names_and_order_do_not_count_and_steps_add_up():
    """Noise 9 twice is noise 9 / sqrt(2) once."""
    parts = [fit(2.0, steps=30), Release("a", noise=9.0), fit(2.0, steps=70), Release("b", noise=9.0)]
    assert merged(parts) == merged(parts[::-1]) and {(r.noise, r.steps) for r in merged(parts)} == {(2.0, 100), (9.0, 2)}
    assert epsilon_of(parts, DELTA) == epsilon_of(parts[::-1], DELTA) > epsilon_of(parts[:3], DELTA) > 0
    once = epsilon_of([Release("a", noise=9.0 / math.sqrt(2))], DELTA)
    assert epsilon_of(parts[1::2], DELTA) == pytest.approx(once, abs=1e-5)
    assert epsilon_of([], DELTA) == 0.0


def test_more_noise_costs_less_also_where_a_grid_is_too_coarse_or_too_large():
    """The loss distribution stops below epsilon 500; with tiny losses its grid costs more than Renyi divergences do."""
    costs = [epsilon_of([fit(sigma)], DELTA) for sigma in (0.05, 0.2, 0.5, 2.0, 30.0, 1000.0, 1e5)]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[1] > 500 > costs[2] and 0 < costs[-1] < 1e-3
    assert all(epsilon_of([fit(sigma)], DELTA, "rdp") >= cost for sigma, cost in zip((0.5, 2.0, 30.0), costs[2:]))
    assert epsilon_of([fit(2.0)], 1e-12) == epsilon_of([fit(2.0)], 1e-12, "rdp") > epsilon_of([fit(2.0)], 1e-9)


@pytest.mark.parametrize(
    "kind, epsilon, known",
    [pytest.param("pld", 50.0, 0.638, marks=LARGE), ("pld", 25.0, 0.825), ("pld", 10.0, 1.3154), ("pld", 1.0, 8.391)]
    + [("rdp", 50.0, 0.653), ("rdp", 25.0, 0.850), ("rdp", 10.0, 1.378), ("rdp", 1.0, 9.095)],
)
def test_the_solved_noise_is_the_known_one_and_the_least_that_is_safe(kind, epsilon, known):
    sigma = solve([ASKED], Budget(epsilon=epsilon, accountant=kind))
    assert sigma == pytest.approx(known, abs=0.6 * 10.0 ** -len(str(known).partition(".")[2]))
    assert epsilon_of([fit(sigma)], DELTA, kind) <= epsilon < epsilon_of([fit(sigma * (1 - 1e-4))], DELTA, kind)


@pytest.mark.parametrize(
    "delta, known", [(1e-5, (0.656, 0.856, 1.391, 9.219)), (1e-4, (0.638, 0.823, 1.300, 8.047))], ids=["1e-5", "1e-4"]
)
def test_the_fact_sheets_sigmas_by_renyi_divergences(delta, known):
    """Rate 128 / 5000 and 39 batches an epoch; the sheet's tolerance between accountants is 2 %."""
    asked = Release("fit", rate=128 / 5000, steps=200 * 39)
    found = [solve([asked], Budget(epsilon=e, delta=delta, accountant="rdp")) for e in (50.0, 25.0, 10.0, 1.0)]
    assert found == pytest.approx(known, rel=0.02)


def test_what_else_is_released_is_paid_for_with_more_noise():
    """Two fits of one client share one sigma."""
    budget = Budget(epsilon=10.0, accountant="rdp")
    alone, beside = solve([ASKED], budget), solve([ASKED, HISTOGRAM, MAGNITUDE], budget)
    assert alone < beside < 1.01 * alone
    sigma = solve([ASKED, HISTOGRAM, Release("warm-up", rate=0.1, steps=100)], budget)
    spent = [fit(sigma), HISTOGRAM, Release("warm-up", noise=sigma, rate=0.1, steps=100)]
    assert sigma > beside and 9.99 < epsilon_of(spent, DELTA, "rdp") <= 10
    assert solve([HISTOGRAM, MAGNITUDE], budget) == 0.0


def test_a_budget_that_other_releases_use_up_is_refused():
    """The histogram of noise 5 costs 0.7255 by loss distributions and 0.7945 by Renyi divergences."""
    costly = Release("histogram", noise=5.0)
    with pytest.raises(
        RecipeError, match=r"histogram: these releases alone cost epsilon 0.7255, and the budget is 0.5; give"
    ):
        solve([ASKED, costly], Budget(epsilon=0.5))
    with pytest.raises(RecipeError, match=r"histogram: these releases alone cost epsilon 0.7945"):
        solve([costly], Budget(epsilon=0.75, accountant="rdp"))
    sigma = solve([ASKED, costly], Budget(epsilon=0.75))
    assert 0.7499 < epsilon_of([fit(sigma), costly], DELTA) <= 0.75
    exactly = Budget(epsilon=epsilon_of([costly], DELTA))
    assert solve([costly], exactly) == 0.0
    with pytest.raises(
        RecipeError, match="no noise keeps epsilon 0.7255.* at delta 1e-05: the other releases leave next to"
    ):
        solve([ASKED, costly], exactly)


@pytest.mark.parametrize(
    "release, words",
    [
        (Release("fit", noise=math.nan), "fit: the noise of a release is nan; it must be a positive number"),
        (Release("fit", noise=0.0), "fit: the noise of a release is 0.0"),
        (Release("fit", noise=math.inf), "fit: the noise of a release is inf"),
        (Release("fit", noise=1.0, rate=math.nan), "fit: the rate of a release is nan"),
        (Release("fit", noise=1.0, rate=1.5), "fit: the rate of a release is 1.5"),
        (Release("fit", noise=1.0, steps=0), "fit: a release has 0 steps"),
        (Release("counts", "laplace", 1.0, rate=0.5), "counts: Laplace noise is accounted on all data"),
        (Release("counts", "laplace"), "counts: Laplace noise is accounted on all data"),
        (Release("fit"), "the noise of a release is not known yet; solve it from a budget"),
    ],
)
def test_a_release_that_cannot_be_judged_is_refused(release, words):
    with pytest.raises(RecipeError, match=words):
        epsilon_of([HISTOGRAM, release], DELTA)


def test_a_delta_outside_its_range_is_refused():
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(RecipeError, match="delta is .*; it must lie between 0 and 1"):
            epsilon_of([HISTOGRAM], delta)


def test_a_solved_sigma_is_cached_on_disk_and_a_damaged_or_foreign_file_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFUSE_CACHE", str(tmp_path))
    computed, budget = [], Budget(epsilon=3.0, accountant="rdp")
    original = accountant._computed
    monkeypatch.setattr(accountant, "_computed", lambda *of: computed.append(of) or original(*of))

    def again() -> float:
        accountant._solved.cache_clear()  # as in another process
        return solve([ASKED], budget)

    sigma = again()
    (file,) = (cache_folder() / "sigma").glob("*.json")
    assert again() == sigma and solve([ASKED], budget) == sigma and len(computed) == 1
    saved = file.read_text()
    for content in ("", "[1]", '{"of": "another", "sigma": 0.1}', saved.replace(repr(sigma), "-1.0"), saved[:-9]):
        file.write_text(content)
        assert again() == sigma and file.read_text() == saved
    assert len(computed) == 6
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a folder cannot be made here")
    assert again() == sigma and len(computed) == 7
