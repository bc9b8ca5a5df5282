"""The moving average of a run's models, one for each round."""

from effuse.core.algorithm import Server
from effuse.core.capabilities import Averages
from effuse.core.model import Model
from effuse.core.recipe import Recipe


class MovingAverage:
    """The average by the recipe's `ema`; without one, that which the algorithm maintains itself, if any."""

    def __init__(self, recipe: Recipe) -> None:
        self.algorithm, self.decay = recipe.algorithm, recipe.ema
        self.model: Model | None = None
        self.models = 0  # in the average

    def add(self, server: Server, model: Model, new: bool) -> None:
        """Add the model of a round; one that the round has not changed is not `new`."""
        if self.decay is None:
            own = self.algorithm.average(server) if isinstance(self.algorithm, Averages) else None
            self.model = None if own is None else model.holding(own)
        elif self.model is None or self.model.arch != model.arch:
            self.models = int(new)  # an untrained model does not count
            self.model = model  # the average also restarts when the network is pruned
        elif new:  # a hierarchical algorithm changes the cloud's model in some rounds only
            self.models += 1
            # after n models the weights are proportional to decay^(n - i), for the first model too
            self.model = self.model.lerp(model, (1 - self.decay) / (1 - self.decay**self.models))
