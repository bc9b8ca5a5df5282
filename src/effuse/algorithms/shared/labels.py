"""A client's histogram of labels as it discloses it: once, and the same again where the answer was lost."""

from typing import Annotated, Any

from torch import Tensor

from effuse.core.errors import WireError
from effuse.core.message import message, of_images
from effuse.core.workbench import Client
from effuse.privacy.histogram import Disclosure

TOLD = "told"  # where a client keeps what it disclosed


@message(name="fedphd.histogram")
class Histogram:
    """A client's disclosed histogram, with noise where the recipe asks for it."""

    counts: Annotated[Tensor, of_images]

    def __post_init__(self) -> None:
        if self.counts.dim() != 1 or (not self.counts.is_meta and bool((self.counts < 0).any())):
            raise WireError(f"histogram: {self.counts.tolist()} are not images of each class; counts are not negative")

    @property
    def histogram(self) -> tuple[float, ...]:
        return tuple(map(float, self.counts.tolist()))


@message(name="fedphd.told")
class ReportedHistogram:
    """The client's own copy of what it disclosed, so that its noise is drawn once."""

    counts: tuple[float, ...]


def told(client: Client, histogram: Disclosure) -> tuple[float, ...]:
    """The client's disclosed counts."""
    if TOLD not in client.state:
        # a stream of the client's, not of the round: a repeated answer discloses the same noise and costs no more epsilon
        counts = histogram.of(client, client.lasting("histogram"))
        client.state[TOLD] = ReportedHistogram(tuple(counts))
    reported: ReportedHistogram = client.state[TOLD]
    return reported.counts


def spent_on(histogram: Disclosure) -> dict[str, Any] | None:
    """The privacy budget that one disclosure costs each client; None where it is exact."""
    charge = histogram.charge
    if charge is None:
        return None
    return {"histogram": {"mechanism": str(histogram), "epsilon": charge[0], "delta": charge[1], "times": 1}}
