"""LocalOnly: every site trains alone with the same total of steps, to show what a federation gains."""

from collections.abc import Sequence

from effuse.core.capabilities import Personal
from effuse.core.prelude import Client, Federation, Model, Server, Solver, message, on_client, spec


@message(name="localonly.progress")
class Progress:
    """All that a site reports: its loss and size."""

    weight: float
    loss: float | None


@spec
class LocalOnly(Personal):
    """The initial model is sent once; after that every client trains a model of its own."""

    local: Solver

    def round(self, server: Server, fed: Federation) -> Server:
        for _ in fed.ask(self.train, fed.clients, model=None, once={"model": server.model}):
            pass  # replies hold nothing to aggregate
        return server

    @on_client(covered=True)
    def train(self, client: Client, model: Model | None) -> Progress:
        net = client.load(self.own(client, model))
        fit = client.fit(net, self.local, client.data, average=client.state.get("average"))
        client.state["model"] = client.unload(net)
        if fit.average is not None:
            client.state["average"] = fit.average
        return Progress(float(client.size), fit.loss)

    def owners(self, server: Server, fed: Federation) -> Sequence[int]:
        return sorted(fed.has("model"))

    @property
    def averages(self) -> bool:
        return self.local.ema is not None

    def own_average(self, client: Client, model: Model) -> Model:
        return self.own(client, model).holding(client.state["average"])

    def own(self, client: Client, model: Model | None) -> Model:
        own: Model | None = client.state.get("model", model)
        assert own is not None  # the first message brings one
        return own
