"""A stand-in for FedLID (ICCV workshops, 2023), of which only a temperature is known: federated SimCLR at T 0.04."""

from typing import Any

from pydantic import PositiveFloat
from torch import Tensor

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.model import Net
from effuse.core.prelude import Client, Federation, Given, Model, Server, on_client, spec
from effuse.core.task import Batch
from effuse.tasks.views import require_views, told_apart


def contrasted(net: Net, batch: Batch, given: Given) -> Tensor:
    """SimCLR's loss of the batch's views, at the temperature T."""
    views: Any = batch.task
    return batch.mean(told_apart(net(views.seen(batch)), batch.weight, given["T"]))


@spec
class FedLID(FedAvg, name="fedlid"):
    """A stand-in for FedLID, whose text and code are not public: FedAvg of SimCLR at the temperature that is known of it."""

    T: PositiveFloat = 0.04  # as FedDifRC reports

    def setup(self, model: Model, fed: Federation) -> Server:
        require_views(self, fed.workbench.task)
        return Server(model)

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data, loss=contrasted, given={"T": self.T})
        return Update(client.unload(net), self.weight(client), fit.loss)
