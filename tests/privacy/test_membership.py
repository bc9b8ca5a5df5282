"""Membership attacks: their formulas on networks of one line, their measures by hand, and a network that memorised."""

import math

import pytest
import torch
from memoriser import Memoriser, random_images
from toy import ToyScores

from effuse.core.data import Shard
from effuse.core.errors import DataError, TrainingError
from effuse.core.model import Net
from effuse.core.rng import Stream
from effuse.core.solvers import Adam
from effuse.core.task import Batch
from effuse.core.workbench import Workbench
from effuse.machines.eager import Eager
from effuse.privacy.binomial import share
from effuse.privacy.membership import (
    at_rate,
    attacks_on,
    auc,
    dp_bound,
    fixed_level,
    fixed_loss,
    judged,
    matched,
    noise_norm,
    pia,
    scores,
    secmi,
)
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import Edm
from effuse.tasks.schedules import Linear

TASK = Denoise()  # 1,000 steps, linear
X = torch.tensor([0.5, -1.0]).view(2, 1, 1, 1).expand(2, 1, 2, 2).contiguous()  # two images of four equal pixels
NOISE = torch.full((1, 1, 2, 2), 0.7)


def amplitudes(t: int) -> tuple[float, float]:
    """sqrt(alpha_bar_t) and sqrt(1 - alpha_bar_t) of the linear schedule, from its definition."""
    bar = math.prod(1 - (1e-4 + (0.02 - 1e-4) * i / 999) for i in range(t + 1))
    return math.sqrt(bar), math.sqrt(1 - bar)


def applied(attack, run, task=TASK, x=X):
    batch = Batch(x, torch.tensor([3, 4]), task)
    return attack(Net(torch.nn.Identity(), run=run), batch, {"noise": NOISE}).tolist()


def test_the_loss_is_taken_at_one_step_and_one_noise():
    """At step 100 a network that returns its input x_t errs by (a x + s 0.7 - 0.7)^2 in every pixel."""
    seen = []

    def run(x, t, labels):
        seen.append((t.tolist(), labels.tolist()))
        return x

    a, s = amplitudes(100)
    expected = [(a * x + s * 0.7 - 0.7) ** 2 for x in (0.5, -1.0)]  # 7e-8 and 2.2
    assert applied(fixed_loss, run) == pytest.approx(expected, rel=1e-4, abs=1e-9) and seen == [([100, 100], [3, 4])]
    dropping = Denoise(drop=0.9)
    assert applied(fixed_loss, run, dropping) == pytest.approx(expected, rel=1e-4, abs=1e-9) and seen[1] == seen[0], (
        "labels are kept"
    )


@pytest.mark.parametrize("task", [Edm(P_mean=math.log(0.5)), Edm(P_mean=math.log(0.5), augment=0.5, drop=0.9)], ids=str)
def test_the_loss_of_edm_is_taken_at_one_level_and_one_noise(task):
    """sigma = sigma_data = 1/2: c_skip = 1/2, c_out = sqrt(1/8), c_in = sqrt 2, c_noise = ln(1/2) / 4.

    x + n is x + 0.35. The target is (x - (x + 0.35) / 2) sqrt 8; an output of 0 errs by it.
    """
    seen = []

    def run(x, t, labels, *told):
        seen.append((x[:, 0, 0, 0].tolist(), t.tolist(), labels.tolist(), [value.abs().max().item() for value in told]))
        return torch.zeros_like(x)

    expected = [8 * (x - (x + 0.35) / 2) ** 2 for x in (0.5, -1.0)]
    assert applied(fixed_level, run, task) == pytest.approx(expected, rel=1e-4)
    x, t, labels, told = seen[0]
    assert x == pytest.approx([math.sqrt(2) * (x + 0.35) for x in (0.5, -1.0)]) and labels == [3, 4]
    assert t == pytest.approx([math.log(0.5) / 4] * 2) and told == [0.0] * (task.augment > 0)
    assert attacks_on(task) == {"loss": fixed_level}


def test_pia_compares_two_noises_in_the_fourth_norm():
    """eps(x, t) = x, and 0 at step 0: e = 0, and the 4-norm of four pixels a x is (4 (a x)^4)^(1/4) = sqrt(2) a |x|."""
    a, s = amplitudes(200)
    assert applied(pia, lambda x, t, labels: x * (t > 0)[:, None, None, None]) == pytest.approx(
        [math.sqrt(2) * a * v for v in (0.5, 1.0)], rel=1e-4
    )
    # eps(x, t) = x throughout: e = x, then a x + s x; the difference is (1 - a - s) x
    assert applied(pia, lambda x, t, labels: x) == pytest.approx(
        [math.sqrt(2) * abs(1 - a - s) * v for v in (0.5, 1.0)], rel=1e-4
    )


def test_secmi_goes_one_step_on_and_back():
    """eps(x, t) = x: every step multiplies by a'(1 - s)/a + s', so the result follows in plain arithmetic; 12 calls."""
    calls = []

    def run(x, t, labels):
        calls.append(int(t[0]))
        return x

    def factor(t, after):
        (a, s), (a_after, s_after) = amplitudes(t), amplitudes(after)
        return a_after * (1 - s) / a + s_after

    at_100 = math.prod(factor(t, t + 10) for t in range(0, 100, 10))
    back = factor(100, 110) * factor(110, 100)
    expected = [4 * (at_100 * (back - 1) * x) ** 2 for x in (0.5, -1.0)]
    assert applied(secmi, run) == pytest.approx(expected, rel=1e-3)
    assert calls == [*range(0, 110, 10), 110]
    assert applied(secmi, lambda x, t, labels: torch.ones_like(x)) == pytest.approx([0, 0], abs=1e-10), "DDIM's own path"


def test_the_norm_of_the_noise_at_a_small_step():
    """Four pixels: the norm of x is 2 |x|."""
    assert applied(noise_norm, lambda x, t, labels: x * (t == 10)[:, None, None, None]) == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("attack", [pia, secmi, noise_norm])
def test_the_target_makes_no_difference(attack):
    """Networks for velocity or clean image that see the same noise: v = a eps - s x0 and x0 = (x - s eps) / a."""

    def eps(x, t, labels):
        return torch.tanh(x + t[:, None, None, None] / 500)

    def other(target):
        def run(x, t, labels):
            a, s = amplitudes(int(t[0]))
            noise = eps(x, t, labels)
            clean = (x - s * noise) / a
            return a * noise - s * clean if target == "v" else clean

        return run

    expected = applied(attack, eps)
    for target in ("v", "x0"):
        assert applied(attack, other(target), Denoise(target=target)) == pytest.approx(expected, rel=2e-2)


def test_short_schedules_have_the_same_steps_scaled():
    """Of 25 steps, 100, 200 and 110 of 1,000 are 2, 5 and 3."""
    calls = []

    def run(x, t, labels):
        calls.append(int(t[0]))
        return x

    task = Denoise(schedule=Linear(steps=25))
    for attack, steps in (
        (fixed_loss, [2]),
        (pia, [0, 5]),
        (secmi, [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3]),
        (noise_norm, [0]),
    ):
        calls.clear()
        applied(attack, run, task)
        assert calls == steps


def test_the_area_by_hand():
    """Members 1, 2, 3, others 2, 4: 1 < both, 2 = 2 and < 4, 3 < 4 only: (2 + 1.5 + 1) / 6 = 0.75."""
    found = auc(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0]))
    assert found.value == pytest.approx(0.75) and 0 < found.low < 0.5 < found.high < 1
    same = auc(torch.ones(50), torch.ones(50))
    assert same.value == 0.5 and same.low == pytest.approx(1 - same.high, abs=1e-9)


def test_the_interval_of_the_area():
    """50 and 50, area 0.5: mean 49, variance 0.25 (1 + 49/3 + 49/3) / 2500 at 0.5, so its deviation is 0.058.

    A perfect attack still has a lower limit below 1, where the limit is 1.96 of its own deviations away.
    """
    low = auc(torch.ones(50), torch.ones(50)).low
    variance = low * (1 - low) * (1 + 49 * (1 - low) / (2 - low) + 49 * low / (1 + low)) / 2500
    assert 0.5 - low == pytest.approx(1.96 * math.sqrt(variance), rel=1e-4) and 0.5 - low == pytest.approx(0.113, abs=0.005)
    perfect = auc(torch.zeros(50), torch.ones(50))
    assert (perfect.value, perfect.high) == (1, 1) and 0.9 < perfect.low < 1
    worst = auc(torch.ones(50), torch.zeros(50))
    assert (worst.value, worst.low) == (0, 0) and worst.high == pytest.approx(1 - perfect.low, abs=1e-9)


def test_the_interval_covers_the_truth():
    """Members are normal at -1, others at 0: the area is Phi(1 / sqrt(2)) = 0.7602. Of 200 intervals 5 % may miss it."""
    truth = 0.5 * (1 + math.erf(0.5))
    missed = 0
    for seed in range(200):
        rng = Stream(("normal", seed)).torch()
        found = auc(torch.randn(40, generator=rng) - 1, torch.randn(60, generator=rng))
        missed += not found.low <= truth <= found.high
    assert 2 <= missed <= 20


def test_true_positives_at_one_percent():
    """Of 200 others two lie below 2.0, the third smallest: 1 %. Members below 2.0: three of four; a tie is no find."""
    tpr, fpr = at_rate(torch.tensor([-1.0, 0.5, 1.9, 2.0]), torch.arange(200.0))
    assert tpr.value == 0.75 and tpr == share(3, 4) and fpr == share(2, 200)
    tpr, fpr = at_rate(torch.tensor([-1.0, 0.5]), torch.arange(99.0))
    assert tpr.value == 0.5 and fpr.value == 0.0 < fpr.high, "under 100 others none may be called"
    assert at_rate(torch.zeros(5), torch.zeros(200))[1].value == 0.0, "ties call nobody"


def test_the_false_positives_interval_holds_for_a_threshold_among_the_others():
    """Uniform others: the true rate is the threshold itself. Of 400 intervals about 5 % may miss it."""
    missed = 0
    for seed in range(400):
        others = torch.rand(150, generator=Stream(("uniform", seed)).torch())
        fpr = at_rate(torch.zeros(1), others)[1]
        missed += float(others.sort().values[1]) > fpr.high
    assert 1 <= missed <= 24  # above the upper limit 2.5 %, 10


def test_the_bound_of_differential_privacy():
    assert dp_bound(1.0, 1e-5) == pytest.approx(0.0271928, abs=1e-6)
    assert dp_bound(0.0, 0.0) == 0.01 and dp_bound(10.0, 1e-5) == dp_bound(1e4, 1e-5) == 1.0


def test_a_find_above_the_bound_counts_where_chance_cannot_explain_it():
    """All of 100 members below all of 1,000 others: at epsilon 1 e * 1.8 % are allowed, at 6 everything is."""
    perfect = judged(torch.zeros(100), torch.ones(1000) + torch.arange(1000))
    assert perfect.above(1.0, 1e-5) and not perfect.above(6.0, 1e-5)
    few = judged(torch.arange(10.0), torch.arange(100.0) + 0.5)
    assert few.tpr.value == 0.2 > dp_bound(1.0, 1e-5) and not few.above(1.0, 1e-5), "two of ten may be chance"


def test_others_are_matched_to_the_members_labels():
    """Members 60, 30, 0, 10 of four classes; 30 others of the second: 100 are possible. With 6 of them, 20: 12, 6, 0, 2."""
    members = torch.repeat_interleave(torch.tensor([60, 30, 0, 10]))
    for second, expected in ((30, [60, 30, 0, 10]), (6, [12, 6, 0, 2])):
        others = torch.repeat_interleave(torch.tensor([100, second, 100, 100]))
        rows = matched(members, others, Stream(("match",)).torch())
        assert torch.bincount(others[rows], minlength=4).tolist() == expected and len(set(rows.tolist())) == len(rows)
        assert rows.tolist() == matched(members, others, Stream(("match",)).torch()).tolist()
        assert rows.tolist() != matched(members, others, Stream(("other",)).torch()).tolist()
    with pytest.raises(DataError, match="no held-out image has label 1"):
        matched(members, torch.zeros(9, dtype=torch.int64), Stream(("match",)).torch())


def test_matching_removes_what_only_tells_classes():
    """An attack that scores classes 0 and 1 by 0 and 1; all members are of class 0."""
    members, others = torch.zeros(50, dtype=torch.int64), torch.arange(100) % 2
    assert auc(members, others).value == 0.75
    rows = matched(members, others, Stream(("match",)).torch())
    assert len(rows) == 50 and auc(members, others[rows]).value == 0.5


def attacked(task, arch, steps):
    """The attacks on a network that has fitted 24 random images for so many steps; 200 others are like them."""
    bench = Workbench(Eager(torch.device("cpu")), task, 1)
    bench.begin(Stream((0, "membership")), 0)
    members, others = (Shard.whole(random_images(n, name)) for n, name in ((24, "train"), (200, "test")))
    net = bench.load(bench.initial(arch.resolved(members.dataset.shape)))
    if steps:
        bench.fit(net, Adam(lr=1e-2, batch=24, steps=steps), members)
    model, source = bench.unload(net), Stream(("attacks",))
    own, other = (scores(bench, model, task, shard, source) for shard in (members, others))
    assert own.keys() == other.keys() and all(len(own[k]) == 24 and len(other[k]) == 200 for k in own)
    return {name: judged(own[name], other[name]) for name in own}


def test_a_denoiser_that_memorised_is_caught_and_a_fresh_one_is_not():
    task = Denoise(schedule=Linear(steps=100))
    fitted, fresh = (attacked(task, Memoriser(), steps) for steps in (300, 0))
    assert fitted.keys() == {"loss", "pia", "secmi", "norm"}
    for name in fitted:
        assert fitted[name].auc.low > 0.75 and fitted[name].tpr.low > 0.1, name
        assert fresh[name].auc.low < 0.5 < fresh[name].auc.high and fresh[name].tpr.low < 0.01, name


def test_a_classifier_that_memorised_is_caught_by_its_loss():
    fitted, fresh = (attacked(Classify(), ToyScores(), steps) for steps in (300, 0))
    assert fitted.keys() == {"loss"} and fitted["loss"].auc.low > 0.55
    assert fresh["loss"].auc.low < 0.5 < fresh["loss"].auc.high


def test_scores_repeat_and_depend_on_their_stream_alone():
    """The same image has the same number in another shard, as the noise is one for all."""
    task = Denoise(schedule=Linear(steps=100))
    bench = Workbench(Eager(torch.device("cpu")), task, 1)
    shard = Shard.whole(random_images(10, "train"))
    bench.begin(Stream((0,)), 0)
    model = bench.initial(Memoriser().resolved(shard.dataset.shape))
    some = Shard(shard.dataset, torch.tensor([7, 2]))
    first, part, other = (
        scores(bench, model, task, data, Stream((seed,))) for data, seed in ((shard, 1), (some, 1), (shard, 2))
    )
    for name in first:
        assert part[name].tolist() == pytest.approx(first[name][[7, 2]].tolist(), rel=1e-4)
    assert not torch.equal(first["loss"], other["loss"]) and torch.equal(first["pia"], other["pia"])


def test_a_model_that_diverged_cannot_be_attacked():
    task = Denoise(schedule=Linear(steps=100))
    bench = Workbench(Eager(torch.device("cpu")), task, 1)
    bench.begin(Stream((0,)), 0)
    shard = Shard.whole(random_images(4, "train"))
    model = bench.initial(Memoriser().resolved(shard.dataset.shape))
    with pytest.raises(TrainingError, match="attack 'loss' gives numbers that are not finite"):
        scores(bench, model.holding(model.params * math.nan), task, shard, Stream((0,)))
