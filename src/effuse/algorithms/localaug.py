"""LocalAug: FedDDPM's auxiliary images go to the clients instead of the server (Peng et al., 2025, section V)."""

import dataclasses

import torch

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.shared.shares import SHARE, Share
from effuse.algorithms.shared.synthesis import Synthesising, SynthesisServer, joined
from effuse.core.prelude import FEDERATE, Client, Federation, Model, Server, on_client, spec

SHARING = "sharing"


@spec
class LocalAug(Synthesising, FedAvg, name="localaug"):
    """FedAvg whose clients train on their own data and an equal share of the auxiliary set, sent once."""

    @property
    def then(self) -> str:
        return SHARING

    def round(self, server: SynthesisServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        if server.phase == SHARING:
            return self.shared(server, fed)
        S = fed.sample(self.cohort)
        late = None if fed.has("share").issuperset(S) else self.split(server, fed)  # sent with the model
        w = fed.mean(self.train, S, by=self.aggregate, model=server.model, share=None, once=late).value.model
        return dataclasses.replace(server, model=w)

    def shared(self, server: SynthesisServer, fed: Federation) -> Server:
        """Send every client its share."""
        for _ in fed.ask(self.keep, fed.clients, once=self.split(server, fed)):
            pass
        return dataclasses.replace(server, phase=FEDERATE)

    def split(self, server: SynthesisServer, fed: Federation) -> dict[int, dict[str, Share]]:
        """A_i: an even split of the shuffled A, the same in every round."""
        A = server.A
        order = torch.from_numpy(fed.workbench.lasting("split").numpy().permutation(len(A)))
        labels = A.labels if server.model.arch.conditional else None
        parts = zip(fed.clients, order.tensor_split(len(fed.clients)))
        return {k: {"share": Share(A.pixels[some], None if labels is None else labels[some])} for k, some in parts}

    @on_client(covered=True)
    def keep(self, client: Client, share: Share) -> None:
        client.state[SHARE] = share

    @on_client(covered=True)
    def train(self, client: Client, model: Model, share: Share | None) -> Update:
        if share is not None:
            client.state[SHARE] = share
        net = client.load(model)
        more = client.state[SHARE]
        fit = client.fit(net, self.local, joined(client.data, more.pixels, more.labels))
        return Update(client.unload(net), self.weight(client), fit.loss)
