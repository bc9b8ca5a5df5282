"""FedAvg whose job has a step that may be impossible on shapes."""

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.core.algorithm import on_client
from effuse.core.errors import FederationError
from effuse.core.model import Model
from effuse.core.spec import spec
from effuse.core.workbench import Client


@spec
class ToyOddJob(FedAvg):
    """FedAvg with one more step in its job, which may be impossible on shapes."""

    how: str = "item"

    @on_client
    def train(self, client: Client, model: Model) -> Update:
        if self.how == "forgotten" and "past" not in client.state:
            client.state["past"] = model.params
        ODD[self.how](client, model)
        return Update(client.unload(client.load(model)), 1.0, 0.0)


def refuse(client, model):
    raise FederationError("too few images")


ODD = {
    "item": lambda client, model: float(next(iter(model.params.tensors)).sum()),
    "numpy": lambda client, model: next(iter(model.params.tensors)).numpy(),
    "where": lambda client, model: next(iter(model.params.tensors)).nonzero(),
    "state": lambda client, model: client.state["past"],
    "popped": lambda client, model: client.state.pop("past"),
    "refusal": refuse,
    "attribute": lambda client, model: model.parameters_of_it,
    "key": lambda client, model: {}["past"],
    "value": lambda client, model: int("many"),
    "none": lambda client, model: client.state.get("past").tensors,
    "forgotten": lambda client, model: client.state["past"].of_it,
}
