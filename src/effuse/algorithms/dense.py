"""DENSE: Zhang et al., 2022, Algorithm 1: a student learns from the clients' ensemble on images that the server invents."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from effuse.algorithms.shared.ensembling import Ensembling
from effuse.algorithms.shared.synthesis import NOBODY, AuxiliarySet, as_bytes, together
from effuse.core.algorithm import Trained
from effuse.core.capabilities import Draws
from effuse.core.metric import Images
from effuse.core.model import Arch, Net
from effuse.core.prelude import FEDERATE, Federation, Given, Model, RecipeError, Server, Solver, message, spec
from effuse.core.recipe import Recipe
from effuse.core.solvers import Adam
from effuse.core.task import Batch, Task
from effuse.models.dense import DenseGenerator
from effuse.tasks.invert import Invert

LOCAL = "local"  # the phase in which the clients train


@message(name="dense.server")
class DenseServer(Server):
    """The student, the teacher, and the pool of images that the server invented."""

    teacher: Model | None = None  # the ensemble of the clients' classifiers
    pool: AuxiliarySet | None = None
    logits: Tensor | None = None  # of the teacher on the pool, float32, N x classes


def divergence(teacher: Tensor, student: Tensor, T: float | Tensor) -> Tensor:
    """KL(student, teacher) of each image at temperature T: T^2 sum p_teacher (log p_teacher - log p_student)."""
    of_teacher, of_student = (F.log_softmax(logits / T, 1) for logits in (teacher, student))
    return T * T * F.kl_div(of_student, of_teacher, reduction="none", log_target=True).sum(1)


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    """L_adv: minus the divergence of images on which both disagree, as a mean over all images."""
    apart = teacher.argmax(1) != student.argmax(1)
    return -(divergence(teacher, student, 1.0) * apart).mean()


def statistics(layer: _BatchNorm, x: Tensor) -> Tensor:
    """How far a batch's variance and mean are from those that a BatchNorm layer has kept."""
    assert layer.running_var is not None and layer.running_mean is not None
    variance, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    return (layer.running_var - variance).norm() + (layer.running_mean - mean).norm()


def compared(teacher: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's logits, and L_BN: the sum over all BatchNorm layers of all clients; zero where there are none."""
    apart = [torch.zeros((), device=x.device)]

    def look(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        apart.append(statistics(layer, inputs[0]))

    hooks = [m.register_forward_pre_hook(look) for m in teacher.module.modules() if isinstance(m, _BatchNorm)]
    try:
        logits = teacher.module(x)  # the module itself: a compiled one would not call the hooks
        return logits.float(), torch.stack(apart).sum()
    finally:
        for hook in hooks:
            hook.remove()


def inverted(net: Net, batch: Batch, given: Given) -> Tensor:
    """L_gen = L_OH + L_BN + L_adv, weighted. The network remembers the images of its lowest loss."""
    task: Any = batch.task  # Invert
    images = net(batch.drawn["row"])
    x = task.seen(images, batch)
    teacher, L_BN = compared(given["teacher"], x)
    L_OH = F.cross_entropy(teacher, given["labels"])
    L_adv = disagreement(teacher, given["student"](x).float())
    loss: Tensor = given["oh"] * L_OH + given["bn"] * L_BN + given["adv"] * L_adv
    module: Any = net.module
    module.remember(images, loss)
    return loss


def distilled(net: Net, batch: Batch, given: Given) -> Tensor:
    """The divergence from the teacher's logits."""
    return batch.mean(divergence(batch.columns["logits"], net(batch.x).float(), given["T"]))


def logits_of(net: Net, batch: Batch, given: Given) -> Tensor:
    return net(batch.x)


@spec
class Dense(Ensembling, Draws, name="dense"):
    """Clients train a classifier each and send it once. The server distils their ensemble into one network.

    A round is an epoch: a new batch of images joins the pool, and the student learns from the whole pool.
    """

    central: Solver  # of the student, for one epoch over the pool
    generator: DenseGenerator = DenseGenerator()
    synthesis: Solver = Adam(lr=1e-3, batch=256, steps=30, betas=(0.5, 0.999))  # of the generator and its inputs z
    inversion: Invert = Invert()
    T: PositiveFloat = 20.0  # the temperature of the distillation
    # weights of the generator's losses; the paper prints 1, 1, 0.5, and its code has 1, 1, 1
    oh: NonNegativeFloat = 1.0  # the teacher's cross-entropy at the drawn labels
    bn: NonNegativeFloat = 1.0  # the distance to the statistics of the clients' BatchNorm layers
    adv: NonNegativeFloat = 1.0  # the disagreement of teacher and student

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.synthesis.batch != self.generator.batch or self.synthesis.steps is None or self.synthesis.state == "kept":
            raise RecipeError(
                f"algorithm.synthesis: the generator draws one batch of {self.generator.batch} images, anew in every round; "
                "set batch to that, steps instead of epochs, and leave out state"
            )

    def trains(self, recipe: Recipe) -> list[Trained]:
        synthesis = Trained(self.generator, self.inversion, self.synthesis)
        return [*super().trains(recipe), synthesis, Trained(recipe.model, recipe.task, self.central)]

    def drawn_from(self, recipe: Recipe) -> list[tuple[Arch, Task]]:
        return [(self.generator, self.inversion)]

    def setup(self, model: Model, fed: Federation) -> DenseServer:
        self.require_classifiers(model.arch)
        return DenseServer(model, phase=LOCAL)

    def round(self, server: DenseServer, fed: Federation) -> Server:
        if server.phase == LOCAL:
            teacher = self.ensemble(server.model.arch, fed)
            return dataclasses.replace(server, teacher=teacher, phase=FEDERATE)
        assert server.teacher is not None
        batch = self.synthesised(server.model, server.teacher, fed)
        logits = self.told(server.teacher, batch, fed)
        if server.pool is not None and server.logits is not None:
            batch, logits = together([server.pool, batch]), torch.cat([server.logits, logits])
        return dataclasses.replace(server, model=self.taught(server.model, batch, logits, fed), pool=batch, logits=logits)

    def synthesised(self, student: Model, teacher: Model, fed: Federation) -> AuxiliarySet:
        """A batch of images for drawn labels, from a fresh generator and fresh z."""
        bench, n, (side, channels, classes) = fed.workbench, self.generator.batch, student.arch.shape
        y = torch.from_numpy(bench.stream("labels").numpy().integers(classes, size=n)).sort().values
        nobody = torch.full((n,), NOBODY)
        # a fit needs data, of which the generator sees nothing
        black = AuxiliarySet(torch.zeros((n, channels, side, side), dtype=torch.uint8), y, nobody)
        net, data = bench.load(bench.initial(self.generator)), black.shard(classes, bench.machine.device)
        weights = {"oh": self.oh, "bn": self.bn, "adv": self.adv}
        given = {"teacher": teacher, "student": student, "labels": y, **weights}
        fit = bench.fit(net, self.synthesis, data, task=self.inversion, loss=inverted, given=given)
        fed.note(synthesis={"loss": fit.loss})
        return AuxiliarySet(as_bytes(Images(bench.unload(net).buffers["best"])), y, nobody)

    def told(self, teacher: Model, images: AuxiliarySet, fed: Federation) -> Tensor:
        """The teacher's logits for these images."""
        bench = fed.workbench
        data = images.shard(teacher.arch.shape.classes, bench.machine.device)
        return bench.apply(bench.load(teacher), logits_of, data)

    def taught(self, student: Model, pool: AuxiliarySet, logits: Tensor, fed: Federation) -> Model:
        """The student after the solver's work on the pool."""
        bench = fed.workbench
        data = pool.shard(student.arch.shape.classes, bench.machine.device).with_columns(logits=logits)
        net = bench.load(student)
        fit = bench.fit(net, self.central, data, loss=distilled, given={"T": self.T})
        fed.report_loss(fit.loss, fit.images)
        model = bench.unload(net)
        return model if fit.average is None else model.holding(fit.average)

    def images(self, server: DenseServer) -> Images | None:
        return None if server.pool is None else server.pool.images(labelled=True)
