"""The sequence of rounds, the same for every engine, every algorithm and the rehearsal."""

from collections.abc import Iterator
from typing import NamedTuple

from effuse.core.algorithm import FEDERATE, Server
from effuse.core.capabilities import StopsEarly
from effuse.core.federation import Federation
from effuse.core.recipe import Recipe
from effuse.core.spans import span
from effuse.transport.write_guard import WriteGuard


class FinishedRound(NamedTuple):
    """A finished round."""

    server: Server
    t: int
    phase: str
    federated: int  # federated rounds up to here
    evaluate: bool  # whether the model is evaluated after this round
    over: bool  # whether this was the last round


def rounds_of(recipe: Recipe, fed: Federation, server: Server, t: int, federated: int) -> Iterator[FinishedRound]:
    """Run the rounds one after another, from round `t` on."""
    algorithm = recipe.algorithm

    def over() -> bool:
        enough = server.phase == FEDERATE and federated >= recipe.rounds
        return enough or (isinstance(algorithm, StopsEarly) and algorithm.done(server))

    while not over():
        fed.begin(t, federated)
        phase = server.phase
        watch = WriteGuard(server, f"the server program of {algorithm.name}", "the state it was handed")
        with span("aggregate"), watch:
            after = algorithm.round(server, fed)
        fed.close()
        server = after
        federated += phase == FEDERATE
        last = over()
        due = phase == FEDERATE and recipe.evaluate.every and federated % recipe.evaluate.every == 0
        yield FinishedRound(server, t, phase, federated, bool(last or due), last)
        t += 1
