"""Centralised training: all data in one place, the reference for every federated method."""

from effuse.core.capabilities import Averages
from effuse.core.prelude import Federation, Model, Params, Server, Solver, message, spec


@message(name="centralised.server")
class CentralisedServer(Server):
    """The model and, where the solver asks for one, its per-step average."""

    average: Params | None = None


@spec
class Centralised(Averages):
    """Each round is one fit on all data: as many images as in a FedAvg round with all clients."""

    local: Solver

    def setup(self, model: Model, fed: Federation) -> Server:
        fed.pool()  # a real federation has none: refuse before any client trains
        return CentralisedServer(model)

    def round(self, server: CentralisedServer, fed: Federation) -> Server:
        bench = fed.workbench
        net = bench.load(server.model)
        fit = bench.fit(net, self.local, fed.pool(), average=server.average)
        fed.report_loss(fit.loss, fit.images)
        return CentralisedServer(bench.unload(net), average=fit.average)

    def average(self, server: CentralisedServer) -> Params | None:
        return server.average
