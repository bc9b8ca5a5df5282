"""Clients that train a classifier each, and the ensemble of these at the server."""

from pydantic import PositiveInt

from effuse.core.algorithm import Trained
from effuse.core.errors import FederationError
from effuse.core.model import Arch
from effuse.core.prelude import Algorithm, Client, Federation, Model, RecipeError, Solver, message, on_client, spec
from effuse.core.recipe import Recipe
from effuse.core.solvers import Constant
from effuse.models.ensemble import Vote, ensemble_of, together


@message(name="ensemble.member")
class Member:
    """A client's classifier; none, and a weight of zero, where it has too few images to train one."""

    model: Model | None
    weight: float
    loss: float | None


@spec
class Ensembling(Algorithm):
    """Every client trains a classifier from its own first weights and sends it."""

    local: Solver  # of the clients' classifiers
    networks: tuple[Arch, ...] = ()  # client k trains the k-th of them, in turn; none: all train the run's model
    least: PositiveInt = 1  # a client with fewer images does not train

    def __post_init__(self) -> None:
        getattr(super(), "__post_init__", lambda: None)()
        if self.local.state == "kept" or self.local.schedule != Constant():
            raise RecipeError(
                "algorithm.local: a client trains once, before any round that a schedule could follow, and keeps nothing; "
                "leave out schedule and state"
            )

    def members(self, model: Arch) -> tuple[Arch, ...]:
        """The architectures that clients train, in turn."""
        return self.networks or (model,)

    def trains(self, recipe: Recipe) -> list[Trained]:
        return [Trained(arch, recipe.task, self.local) for arch in self.members(recipe.model)]

    def require_classifiers(self, model: Arch) -> None:
        """Refuse, before any client trains, networks that cannot be joined."""
        ensemble_of(self.members(model), where="algorithm.networks" if self.networks else "model")

    def ensemble(self, model: Arch, fed: Federation, vote: Vote = "logits") -> Model:
        """The ensemble of the classifiers that the clients train now."""
        archs = self.members(model)
        asked = {k: {"arch": archs[k % len(archs)]} for k in fed.clients}
        members = [member.model for _, member in fed.ask_each(self.train, asked) if member.model is not None]
        if not members:
            raise FederationError(f"no client has {self.least} images to train on; lower algorithm.least")
        fed.note(members=len(members))
        return together(members, vote)

    @on_client(covered=True)
    def train(self, client: Client, arch: Arch) -> Member:
        if client.size < self.least:
            return Member(None, 0.0, None)
        net = client.load(client.initial(arch))
        fit = client.fit(net, self.local, client.data)
        model = client.unload(net)
        return Member(model if fit.average is None else model.holding(fit.average), float(client.size), fit.loss)
