"""Centralised training: all data in one place, the reference for every federated method."""

from effuse.core.algorithm import Server
from effuse.core.capabilities import Averages
from effuse.core.federation import Federation
from effuse.core.message import message
from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.solvers import Solver
from effuse.core.spec import spec


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
