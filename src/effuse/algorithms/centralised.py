"""Centralised: all data in one place, the bound that federation is measured against."""

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
    """The model and, where the solver keeps one, its per-step average."""

    average: Params | None = None


@spec
class Centralised(Averages):
    """Each round is one fit on everything: as many images as a FedAvg round with all clients sees."""

    local: Solver

    def setup(self, model: Model, fed: Federation) -> Server:
        fed.pool()  # refused here, where there is no such thing, and not when all clients have come
        return CentralisedServer(model)

    def round(self, server: CentralisedServer, fed: Federation) -> Server:
        bench = fed.workbench
        net = bench.load(server.model)
        fit = bench.fit(net, self.local, fed.pool(), average=server.average)
        fed.report_loss(fit.loss, fit.images)
        return CentralisedServer(bench.unload(net), average=fit.average)

    def average(self, server: CentralisedServer) -> Params | None:
        return server.average
