"""FedDDPM and FedDDPM+: Peng et al., 2025, "Federated Learning for Diffusion Models", Algorithms 1 and 2."""

import dataclasses
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.shared.synthesis import AuxiliarySet, Fraction, Synthesising, SynthesisServer
from effuse.core.algorithm import FEDERATE, Server
from effuse.core.capabilities import StopsEarly
from effuse.core.errors import RecipeError
from effuse.core.federation import SETUP_T, Federation
from effuse.core.message import message
from effuse.core.metric import Images, Subject
from effuse.core.model import Model
from effuse.core.rng import stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import Constant, Solver
from effuse.core.spec import Spec, spec
from effuse.core.workbench import SERVER
from effuse.metrics.classifier import Classifier
from effuse.metrics.distances import Moments, frechet, moments, solved
from effuse.metrics.encoders import Encoder, Inception

CORRECTION, OVER = "correction", "over"  # phases after the federated rounds of FedDDPM+
REFERENCE = "quick test reference"  # computed once in a process


@spec
class Correcting(Synthesising):
    """What a server does with its auxiliary set A: train on it."""

    central: Solver  # E passes over A with the step eta
    part: Fraction = (
        1.0  # of A that a correction sees, drawn reset_for each time; 1: A is fixed before training, as in the listing
    )

    def corrected(self, w: Model, server: SynthesisServer, fed: Federation, told: bool = False) -> Model:
        """The model after the server's own passes over A."""
        bench, A = fed.workbench, server.auxiliary
        if self.part < 1.0:
            chosen = bench.stream("part").numpy().permutation(len(A))[: max(1, round(self.part * len(A)))]
            A = A.rows(torch.from_numpy(chosen))
        net = bench.load(w)
        fit = bench.fit(net, self.central, A.shard(w.arch.shape.classes, bench.machine.device))
        fed.note(correction={"loss": fit.loss, "images": fit.images})
        if told:
            fed.report_loss(fit.loss, fit.images)
        model = bench.unload(net)
        return model if fit.average is None else model.holding(fit.average)


@spec
class FedDDPM(Correcting, FedAvg, name="fedddpm"):
    """FedAvg whose server, after every aggregation, trains on images that it drew from the clients' warm-up models."""

    weights: Literal["size", "uniform"] = "uniform"  # Eq. 9 averages uniformly; its objective weighs by size

    def round(self, server: SynthesisServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        w_hat = self.aggregated(server, fed)
        return dataclasses.replace(server, model=self.corrected(w_hat, server, fed))

    def aggregated(self, server: Server, fed: Federation) -> Model:
        """Eq. 9."""
        S = fed.sample(self.cohort)
        w_hat: Model = fed.mean(self.train, S, by=self.aggregate, model=server.model).value.model
        return w_hat


@spec
class QuickTest(Spec):
    """Whether the global model has stopped to improve, by a running average of a distance of a few samples."""

    every: PositiveInt = 10  # rounds; the test in round 0 only stores its score
    size: Annotated[int, Field(ge=2)] = 500  # TestSize
    gamma: Fraction = 0.4
    threshold: PositiveFloat = 0.2
    # a server owns no real images and can compare with A; statistics of the training set are there in a simulation only
    reference: Literal["aux", "oracle"] = "aux"
    encoder: Encoder = Inception()
    # 500 samples leave a 2048-dimensional covariance of rank 499: leading components of the reference make a calmer score
    components: PositiveInt | None = None  # None: all dimensions, as printed
    sampler: Sampler | None = None  # None: the one that drew the auxiliary set

    def judge(self, average: float | None, score: float) -> tuple[bool, float]:
        """(whether to stop, the running average after this score)."""
        if average is None:
            return False, score
        if abs(average - score) <= self.threshold:
            return True, average
        return False, self.gamma * score + (1 - self.gamma) * average

    def score(self, model: Model, A: AuxiliarySet, sampler: Sampler, fed: Federation) -> float:
        """The Fréchet distance of some samples of the model, drawn from the same noise at every test, to the reference."""
        bench, noise = fed.workbench, stream(fed.seed, SETUP_T, "quick test", 0, SERVER, "samples")
        images = bench.generate(model, self.size, self.sampler or sampler, stream=noise)
        known = fed.pool() if self.reference == "oracle" else A.shard(model.arch.shape.classes, bench.machine.device)
        pool = known.gathered()
        subject = Subject(
            train=pool,
            test=pool,
            data=f"quick test, {self.reference}",
            device=bench.machine.device,
            samples=images.first,
            memo=fed.memo,
        )
        if REFERENCE not in fed.memo:
            real = Images(pool.floats(pool.images)).bytes()
            fed.memo[REFERENCE] = leading(self.encoder.encode(real, subject).features.to(subject.device), self.components)
        basis, reference = fed.memo[REFERENCE]
        made = self.encoder.encode(images.bytes(), subject).features.to(subject.device)
        return frechet(moments(made.double() @ basis), reference)


def leading(features: Tensor, components: int | None) -> tuple[Tensor, Moments]:
    """The leading principal directions of some features, and their moments in them."""
    found = moments(features)
    basis = solved(torch.linalg.eigh, found.covariance)[1][:, -(components or features.shape[1]) :]
    return basis, Moments(found.mean @ basis, basis.T @ found.covariance @ basis)


@message(name="fedddpm_plus.server")
class FedDDPMPlusServer(SynthesisServer):
    """What FedDDPM+ remembers besides: the running average of its test, and every score."""

    average: float | None = None
    scores: tuple[float, ...] = ()


@spec
class FedDDPMPlus(FedDDPM, StopsEarly, name="fedddpm_plus"):
    """FedAvg until a quick test finds that it no longer improves, then one long correction on the auxiliary set."""

    early_stop = "its quick test may end the federated rounds earlier"

    test: QuickTest = QuickTest()
    # the listing corrects after a test that says stop; a run whose test never does would end as plain FedAvg
    at_end: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.central.schedule != Constant():
            raise RecipeError(
                "algorithm.central.schedule: a schedule goes by federated rounds, and the one correction comes after them, where a "
                "decay has ended; leave it out"
            )

    def setup(self, model: Model, fed: Federation) -> Server:
        self.test.encoder.ready()
        if self.test.reference == "oracle":
            fed.pool()  # refused here, where there is no such thing, and not when all clients have come
        if self.test.reference == "aux" and isinstance(self.test.encoder, Classifier) and not model.arch.conditional:
            raise RecipeError(
                "algorithm.test.encoder: a classifier needs labels, and what an unconditional model draws has none; "
                "use inception() or pixels(), or reference=oracle"
            )
        begun = super().setup(model, fed)
        return FedDDPMPlusServer(begun.model, phase=begun.phase, pending=begun.pending)

    def round(self, server: FedDDPMPlusServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        if server.phase == CORRECTION:
            return dataclasses.replace(server, model=self.corrected(server.model, server, fed, told=True), phase=OVER)
        w, stop, average, scores = self.aggregated(server, fed), False, server.average, server.scores
        if fed.federated % self.test.every == 0 and not fed.rehearsing:
            scores += (self.test.score(w, server.auxiliary, self.sampler, fed),)
            stop, average = self.test.judge(average, scores[-1])
            fed.note(quick_test={"score": scores[-1], "average": average, "stop": stop})
        if fed.federated + 1 == fed.rounds:
            stop = stop or self.at_end
        phase = CORRECTION if stop else FEDERATE
        return dataclasses.replace(server, model=w, phase=phase, average=average, scores=scores)

    def done(self, server: Server) -> bool:
        return server.phase == OVER


@spec
class AuxOnly(Correcting, name="aux_only"):
    """The auxiliary set alone, as many images as there are real ones: is a federated round needed at all?"""

    share: Fraction = 1.0

    def round(self, server: SynthesisServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        return dataclasses.replace(server, model=self.corrected(server.model, server, fed, told=True))
