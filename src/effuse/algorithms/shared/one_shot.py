"""One-shot federation by generators: clients send one each, the server draws labelled images and trains a classifier."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from effuse.algorithms.shared.correcting import Correcting
from effuse.algorithms.shared.labels import spent_on
from effuse.algorithms.shared.synthesis import SynthesisServer, WarmUpReport
from effuse.core.algorithm import Trained
from effuse.core.capabilities import Discloses
from effuse.core.errors import FederationError
from effuse.core.model import Arch
from effuse.core.prelude import Client, Federation, Model, Server, on_client, spec
from effuse.core.recipe import Recipe
from effuse.core.task import Task
from effuse.privacy.histogram import Disclosure, Exact


@spec
class OneShotGenerators(Correcting, Discloses):
    """Clients train generators of their own; the recipe's model is the server's classifier.

    A round is one pass of `central` over the drawn images, so the recipe's rounds are the server's epochs.
    """

    generators: tuple[Arch, ...]  # client k trains the k-th of them, in turn
    task: Task  # of the generators
    share: PositiveFloat = 1.0  # images drawn for each real one; 1 draws n_c for each client
    histogram: Disclosure = Exact()  # of a client's labels
    least: PositiveInt = 1  # a client with fewer images does not train, and nothing is drawn for it

    def trains(self, recipe: Recipe) -> list[Trained]:
        local = [Trained(arch, self.task, self.warmup) for arch in self.generators]
        return [*local, Trained(recipe.model, recipe.task, self.central)]

    def preparation(self) -> Mapping[str, Any]:
        keys = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("central", "part")}
        return keys | {"name": self.name}

    def drawn_from(self, recipe: Recipe) -> list[tuple[Arch, Task]]:
        return [(arch, self.task) for arch in self.generators]

    def generator(self, client: int, model: Arch) -> Arch:
        return self.generators[client % len(self.generators)]

    def objective(self) -> Task:
        return self.task

    def trained(self, server: SynthesisServer, fed: Federation) -> Model:
        """The classifier after one more pass over the drawn images."""
        if server.auxiliary is None:
            raise FederationError(f"no client has {self.least} images to train on; lower algorithm.least")
        return self.corrected(server.model, server, fed, report=True)

    @on_client(covered=True)
    def warm_up(self, client: Client, arch: Arch) -> WarmUpReport:
        return super().warm_up(client, arch) if client.size >= self.least else WarmUpReport(0.0, None)

    def counts(self, client: Client) -> list[int]:
        return [round(n) for n in self.histogram.of(client, client.stream("histogram"))]

    def spent(self, server: Server) -> dict[str, Any] | None:
        return spent_on(self.histogram)
