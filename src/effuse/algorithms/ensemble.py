"""One-shot ensemble: the classifiers of all clients answer together, as in DENSE (Zhang et al., 2022) and FedCVAE."""

from effuse.algorithms.shared.ensembling import Ensembling
from effuse.core.prelude import Federation, Model, Server, spec
from effuse.models.ensemble import Ensemble, Vote


@spec
class OneShotEnsemble(Ensembling, name="ensemble"):
    """Clients train a classifier each and send it once; what is delivered is their ensemble."""

    vote: Vote = "logits"  # the mean of the logits (DENSE), or the majority (FedCVAE)

    def setup(self, model: Model, fed: Federation) -> Server:
        self.require_classifiers(model.arch)
        return Server(model)

    def round(self, server: Server, fed: Federation) -> Server:
        if isinstance(server.model.arch, Ensemble):  # all was done in the first round
            return server
        return Server(self.ensemble(server.model.arch, fed, self.vote))

    def warnings(self, rounds: int) -> list[str]:
        return [f"rounds={rounds}: nothing changes after the first round of an ensemble; set rounds=1"] if rounds > 1 else []
