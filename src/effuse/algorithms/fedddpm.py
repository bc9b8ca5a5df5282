"""FedDDPM and FedDDPM+: Peng et al., 2025, "Federated Learning for Diffusion Models", Algorithms 1 and 2."""

import dataclasses
from typing import Literal

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.shared.correcting import Correcting
from effuse.algorithms.shared.quick_test import QuickTest
from effuse.algorithms.shared.synthesis import Fraction, SynthesisServer
from effuse.core.capabilities import StopsEarly
from effuse.core.prelude import FEDERATE, Federation, Model, RecipeError, Server, message, spec
from effuse.core.solvers import Constant

CORRECTION, OVER = "correction", "over"  # phases after the federated rounds of FedDDPM+


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


@message(name="fedddpm_plus.server")
class FedDDPMPlusServer(SynthesisServer):
    """FedDDPM's state with QuickTest's running average and scores."""

    average: float | None = None
    scores: tuple[float, ...] = ()


@spec
class FedDDPMPlus(FedDDPM, StopsEarly, name="fedddpm_plus"):
    """FedAvg until QuickTest finds that it no longer improves, then one long correction on the auxiliary set."""

    early_stop = "its quick test may end the federated rounds earlier"

    test: QuickTest = QuickTest()
    # also correct after the last round; the listing corrects only if a test stops the rounds, or it is plain FedAvg
    at_end: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.central.schedule != Constant():
            raise RecipeError(
                "algorithm.central.schedule: a schedule goes by federated rounds, and the one correction comes after them, "
                "where a decay has ended; leave it out"
            )

    def setup(self, model: Model, fed: Federation) -> FedDDPMPlusServer:
        self.test.require(model.arch, fed)
        start = super().setup(model, fed)
        return FedDDPMPlusServer(start.model, phase=start.phase, pending=start.pending)

    def round(self, server: FedDDPMPlusServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        if server.phase == CORRECTION:
            return dataclasses.replace(server, model=self.corrected(server.model, server, fed, report=True), phase=OVER)
        w, stop, average, scores = self.aggregated(server, fed), False, server.average, server.scores
        if fed.federated % self.test.every == 0 and not fed.rehearsing:
            scores += (self.test.score(w, server.A, self.sampler, fed),)
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
    """FedDDPM without federated rounds: training on an auxiliary set of as many images as the clients have."""

    share: Fraction = 1.0

    def round(self, server: SynthesisServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        return dataclasses.replace(server, model=self.corrected(server.model, server, fed, report=True))
