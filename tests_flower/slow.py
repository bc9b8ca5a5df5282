"""An algorithm with a slow client."""

import time

from toy import ToyStateful

from effuse.algorithms.fedavg import Update
from effuse.core.algorithm import on_client
from effuse.core.model import Model
from effuse.core.spec import spec
from effuse.core.workbench import Client


@spec
class ToySlow(ToyStateful):
    """One client is slow in some rounds."""

    who: int = 1
    seconds: float = 3.0
    rounds: tuple[int, ...] = ()  # all, if empty

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        slow = client.id == self.who and (not self.rounds or client.federated in self.rounds)
        if slow and not model.params.hollow:  # sites rehearse the rounds on shapes, which takes no time
            time.sleep(self.seconds)
        return super().train(client, model)
