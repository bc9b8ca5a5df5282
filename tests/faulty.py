"""An algorithm with an error, in a user's own file."""

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.algorithm import on_client
from effuse.core.model import Model
from effuse.core.spec import spec
from effuse.core.workbench import Client


@spec
class Faulty(FedAvg):
    """Divides by zero when it trains."""

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        return Update(model, 1 / 0, 0.0)
