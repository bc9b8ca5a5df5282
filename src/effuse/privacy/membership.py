"""Membership attacks on a network whose weights are known: one number for each image, low for images trained on.

Each function takes (net, batch, given), so that `Workbench.apply` runs it. Steps are given for a schedule of 1,000 and
scaled to others. None of the attacks trains anything, so a stronger attacker may see more than they do.
"""

import dataclasses
import math
from collections.abc import Collection

import torch
from torch import Tensor

from effuse.core.data import Shard
from effuse.core.errors import DataError, RecipeError, TrainingError
from effuse.core.model import Model, Net
from effuse.core.rng import Stream
from effuse.core.task import Batch, Feature, Given, Prediction, Task
from effuse.core.workbench import Workbench
from effuse.privacy.binomial import Estimate, root, share
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import PARAMETERS, Edm
from effuse.tasks.schedules import DESIGNED_FOR, signal_and_noise

LOSS_STEP, PIA_STEP, NORM_STEP = 100, 200, 10
SECMI_STEP, SECMI_STEPS = 10, 10  # up to step 100
FALSE_POSITIVES = 0.01
NORMAL = 1.959963984540054  # the 97.5 % quantile of the normal distribution


def fixed_loss(net: Net, batch: Batch, given: Given) -> Tensor:
    """The task's loss at one step and one noise, which is the same for all images (Matsumoto et al., 2023)."""
    t, x, task = step_at(batch, LOSS_STEP), batch.x, denoising(batch)
    a, s = (value.expand(len(x), 1, 1, 1) for value in amplitudes(batch, t))
    drawn = {"t": times(x, t), "noise": given["noise"].expand_as(x), "dropped": torch.zeros_like(batch.labels).bool()}
    fixed = dataclasses.replace(batch, drawn=drawn | {"a": a, "s": s})
    return task.error(net(*task.inputs(fixed)), fixed)


def pia(net: Net, batch: Batch, given: Given) -> Tensor:
    """Kong et al., 2024 (PIA): the noise at step 0, e, is put in, and compared with the noise that is then seen."""
    t = step_at(batch, PIA_STEP)
    e = noise_in(net, batch, batch.x, 0)
    a, s = amplitudes(batch, t)
    return torch.linalg.vector_norm((e - noise_in(net, batch, a * batch.x + s * e, t)).flatten(1), ord=4, dim=1)


def secmi(net: Net, batch: Batch, given: Given) -> Tensor:
    """Duan et al., 2023 (SecMI): DDIM up to step 100, one step on and back; the squared difference."""
    steps = [step_at(batch, i * SECMI_STEP) for i in range(SECMI_STEPS + 1)]
    x = batch.x
    for t, after in zip(steps, steps[1:]):
        x = ddim(batch, x, noise_in(net, batch, x, t), t, after)
    t = steps[-1]
    after = max(t + 1, step_at(batch, (SECMI_STEPS + 1) * SECMI_STEP))  # short schedules would stay where they are
    noise = noise_in(net, batch, x, t)
    change = noise_in(net, batch, ddim(batch, x, noise, t, after), after) - noise
    (a, s), (a_after, s_after) = amplitudes(batch, t), amplitudes(batch, after)
    # back with the second noise; subtracting x from the result would lose most digits
    return ((s - a * s_after / a_after) * change).square().flatten(1).sum(1)


def noise_norm(net: Net, batch: Batch, given: Given) -> Tensor:
    """||eps(x, t)|| at a small step: where images were memorised, the network sees little noise in them."""
    return noise_in(net, batch, batch.x, step_at(batch, NORM_STEP)).flatten(1).norm(dim=1)


def fixed_level(net: Net, batch: Batch, given: Given) -> Tensor:
    """The same loss of EDM, at the median noise level and one noise, without transformations."""
    task, x = batch.task, batch.x
    assert isinstance(task, Edm)
    drawn = {"sigma": torch.full_like(x[:, :1, :1, :1], math.exp(task.P_mean)), "noise": given["noise"].expand_as(x)}
    drawn |= {"dropped": torch.zeros_like(batch.labels).bool(), "augment": torch.zeros(len(x), PARAMETERS, device=x.device)}
    fixed = dataclasses.replace(batch, drawn=drawn)
    return task.error(net(*task.inputs(fixed)), fixed)


def own_loss(net: Net, batch: Batch, given: Given) -> Tensor:
    """The loss of each image, for tasks other than denoising (Yeom et al., 2018)."""
    assert isinstance(batch.task, Prediction)
    return batch.task.error(net(*batch.task.inputs(batch)), batch)


DENOISERS: dict[str, Feature] = {"loss": fixed_loss, "pia": pia, "secmi": secmi, "norm": noise_norm}
EDM: dict[str, Feature] = {"loss": fixed_level}
OTHERS: dict[str, Feature] = {"loss": own_loss}


def attacks_on(task: Task) -> dict[str, Feature]:
    """The attacks on a network of this task, by name."""
    if isinstance(task, Denoise):
        return DENOISERS
    if isinstance(task, Edm):
        return EDM
    if isinstance(task, Prediction):
        return OTHERS
    raise RecipeError(f"task {task}: no membership attack is known; audit a denoiser or a classifier")


def noise_in(net: Net, batch: Batch, x: Tensor, t: int) -> Tensor:
    """eps(x, t): the noise that the network sees in x at step t, whatever its target."""
    output, (a, s) = net(x, times(x, t), batch.labels).float(), amplitudes(batch, t)
    match denoising(batch).target:
        case "epsilon":
            return output
        case "v":
            return a * output + s * x
        case "x0":
            return (x - a * output) / s


def ddim(batch: Batch, x: Tensor, noise: Tensor, t: int, after: int) -> Tensor:
    """x at another step, with the same noise and the same clean image (Song et al., 2021, Eq. 12 without randomness)."""
    (a, s), (a_after, s_after) = amplitudes(batch, t), amplitudes(batch, after)
    return a_after * (x - s * noise) / a + s_after * noise


def step_at(batch: Batch, step: int) -> int:
    """A step of a schedule of 1,000, in this schedule."""
    return round(step * denoising(batch).schedule.steps / DESIGNED_FOR)


def amplitudes(batch: Batch, t: int) -> tuple[Tensor, Tensor]:
    """sqrt(alpha_bar) and sqrt(1 - alpha_bar) at a step."""
    a, s = signal_and_noise(denoising(batch).schedule, batch.x.device)[t].unbind()
    return a, s


def times(x: Tensor, t: int) -> Tensor:
    return torch.full((len(x),), t, dtype=torch.int64, device=x.device)


def denoising(batch: Batch) -> Denoise:
    assert isinstance(batch.task, Denoise)
    return batch.task


@dataclasses.dataclass(frozen=True)
class Attack:
    """How well an attack tells members from others."""

    auc: Estimate  # 0.5: not at all
    tpr: Estimate  # the share of members found where at most 1 % of the others are called members
    fpr: Estimate  # the share of others that are; its upper limit is how wrong the threshold may be

    def above(self, epsilon: float, delta: float) -> bool:
        """Whether it finds more than (epsilon, delta)-DP allows, both intervals considered."""
        return self.tpr.low > dp_bound(epsilon, delta, self.fpr.high)


def scores(
    bench: Workbench, model: Model, task: Task, data: Shard, source: Stream, only: Collection[str] = ()
) -> dict[str, Tensor]:
    """The attacks' numbers for the images of a shard; the same stream gives the same noise to all shards."""
    shape, device = model.arch.shape, bench.machine.device
    image = (1, shape.channels, shape.side, shape.side)
    given = {"noise": torch.randn(image, generator=source.child("noise").torch(device), device=device)}
    net = bench.load(model)
    found = {
        name: bench.apply(net, attack, data, task=task, given=given).cpu()
        for name, attack in attacks_on(task).items()
        if not only or name in only
    }
    wrong = next((name for name, values in found.items() if not values.isfinite().all()), None)
    if wrong is not None:
        raise TrainingError(
            f"attack '{wrong}' gives numbers that are not finite: the model has diverged; lower its learning rate"
        )
    return found


def judged(members: Tensor, others: Tensor) -> Attack:
    """The AUC and the true positives at 1 % false positives of numbers that are low for members."""
    return Attack(auc(members, others), *at_rate(members, others))


def auc(members: Tensor, others: Tensor) -> Estimate:
    """The probability that a member's number is below another's, ties half; with Newcombe's interval (2006, method 5).

    Its limits are the values at which Hanley and McNeil's variance puts the estimate 1.96 deviations away.
    """
    ordered = others.cpu().double().sort().values
    own = members.cpu().double()
    above = len(ordered) - torch.searchsorted(ordered, own, right=True)
    equal = torch.searchsorted(ordered, own, right=True) - torch.searchsorted(ordered, own, right=False)
    value = float((above + 0.5 * equal).sum()) / (len(own) * len(ordered))

    def distance(limit: float) -> float:
        return abs(value - limit) - NORMAL * hanley_mcneil(limit, len(own), len(ordered))

    low = 0.0 if value == 0 else root(lambda x: -distance(x), 0.0, value)
    high = 1.0 if value == 1 else root(distance, value, 1.0)
    return Estimate(value, low, high)


def hanley_mcneil(area: float, members: int, others: int) -> float:
    """The standard error of an AUC (Hanley and McNeil, 1982), the two sizes replaced by their mean as in Newcombe."""
    mean = (members + others) / 2 - 1
    return math.sqrt(
        area * (1 - area) * (1 + mean * (1 - area) / (2 - area) + mean * area / (1 + area)) / (members * others)
    )


def at_rate(members: Tensor, others: Tensor, rate: float = FALSE_POSITIVES) -> tuple[Estimate, Estimate]:
    """The shares of members and of others below the threshold that this share of the others at most is below.

    Intervals are Clopper and Pearson's. The one of the others holds although the threshold is one of them.
    """
    below = int(rate * len(others) + 1e-9)
    threshold = others.cpu().double().sort().values[below]
    found, wrong = (int((x.cpu().double() < threshold).sum()) for x in (members, others))
    tpr, fpr = share(found, len(members)), share(below, len(others))
    return tpr, fpr._replace(value=wrong / len(others))


def dp_bound(epsilon: float, delta: float, rate: float = FALSE_POSITIVES) -> float:
    """The most true positives that (epsilon, delta)-DP allows at this rate of false positives."""
    return min(1.0, math.exp(min(epsilon, 100.0)) * rate + delta)


def matched(members: Tensor, others: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of others, drawn so that their labels are those of the members in the members' proportions.

    Under label skew an attack would otherwise recognise classes. As many are drawn as there are, and no more than members.
    """
    classes = int(max(members.max(), others.max())) + 1
    wanted, there = (torch.bincount(labels.cpu(), minlength=classes) for labels in (members, others))
    missing = ((wanted > 0) & (there == 0)).nonzero().flatten().tolist()
    if missing:
        raise DataError(f"no held-out image has label {missing[0]}, which members have; leave those members out")
    total = len(members)
    # of each class the share that the scarcest class has; at least one
    n = min([total, *(int(there[c]) * total // int(wanted[c]) for c in wanted.nonzero().flatten().tolist())])
    counts = [min(int(there[c]), max(1, round(n * int(w) / total))) if w else 0 for c, w in enumerate(wanted.tolist())]
    order = torch.randperm(len(others), generator=generator)
    shuffled = others.cpu()[order]
    return torch.cat([order[shuffled == c][:k] for c, k in enumerate(counts)]).sort().values
