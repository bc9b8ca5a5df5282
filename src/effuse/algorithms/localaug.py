"""LocalAug: FedDDPM's auxiliary images sent to the clients instead of kept at the server (Peng et al., 2025, section V)."""

import dataclasses

import torch

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.algorithm import FEDERATE, Server, on_client
from effuse.core.federation import Federation
from effuse.core.model import Model
from effuse.core.params import mean
from effuse.core.spec import spec
from effuse.core.workbench import Client
from effuse.diffusion.synthesis import Gathering, Synthesising, Synthetic, joined

SHARING = "sharing"
SHARE = "share"  # its place in a client's state


@spec
class LocalAug(Synthesising, FedAvg, name="localaug"):
    """FedAvg whose clients train on their own data and an equal share each of the auxiliary set, sent to them once."""

    def round(self, server: Gathering, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed, then=SHARING)
        if server.phase == SHARING:
            return self.shared(server, fed)
        updates = fed.ask(self.train, fed.sample(self.cohort), model=server.model)
        return dataclasses.replace(server, model=mean((u.model, u.weight) for _, u in updates))

    def shared(self, server: Gathering, fed: Federation) -> Server:
        """A_i: an even split of A, shuffled, so that a client's share comes from all."""
        A = server.auxiliary
        order = torch.from_numpy(fed.workbench.stream("split").numpy().permutation(len(A)))
        shares = {k: {"share": A.rows(some)} for k, some in zip(fed.clients, order.tensor_split(len(fed.clients)))}
        for _ in fed.ask_each(self.keep, shares):
            pass
        return dataclasses.replace(server, phase=FEDERATE)

    @on_client
    def keep(self, client: Client, share: Synthetic) -> None:
        client.state[SHARE] = share

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, joined(client.data, client.state[SHARE]))
        return Update(client.unload(net), self.weight(client), fit.loss)
