"""FedDiffuse: de Goede et al., 2024, "Training Diffusion Models with Federated Learning": FULL, USPLIT, ULATDEC, UDEC."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np

from effuse.algorithms.fedavg import FedAvg
from effuse.core.aggregate import by_weight
from effuse.core.capabilities import Personal
from effuse.core.prelude import Client, Federation, Model, Params, RecipeError, Server, message, on_client, spec

PARTS = ("encoder", "bottleneck", "decoder")


@message(name="feddiffuse.update")
class PartsUpdate:
    """The requested parts of a client's model after local training."""

    parts: Annotated[dict[str, Params], by_weight]
    weight: float
    loss: float | None


@spec
class Full(FedAvg, name="feddiffuse_full"):
    """FULL: all of theta travels in both directions."""

    shared: ClassVar[tuple[str, ...]] = PARTS  # exchanged with the server; the rest never leaves its client

    def __post_init__(self) -> None:
        if self.local.ema is not None and self.cohort is not None:
            raise RecipeError(
                "algorithm.local.ema: clients keep their averages from round to round, so all must take part in all; "
                "leave cohort out, or use the recipe's `ema`"
            )

    def setup(self, model: Model, fed: Federation) -> Server:
        model.part(*PARTS)  # refuses a network without these parts
        if model.buffers:
            raise RecipeError(
                f"model: {model.arch.name} keeps values it does not train, which belong to no part; use a U-Net"
            )
        return Server(model)

    def round(self, server: Server, fed: Federation) -> Server:
        theta, cohort = server.model, fed.sample(self.cohort)
        reported = self.reported_parts(cohort, fed.workbench.stream("asked").numpy())
        reports = fed.mean(
            self.train,
            {k: {"report": reported[k]} for k in cohort},
            by=self.aggregate,
            theta=only(theta, self.shared),
            # at its first contact a client gets all of theta, whatever the method: the published traffic counts it
            once={"theta": theta},
        )
        parts = reports.value.parts.values()  # each a mean over its reporters; a part without any stays
        return Server(theta.holding(Params({name: t for part in parts for name, t in part.items()})))

    def reported_parts(self, cohort: Sequence[int], rng: np.random.Generator) -> dict[int, tuple[str, ...]]:
        """The parts that each client of the cohort reports in this round."""
        return dict.fromkeys(cohort, self.shared)

    @on_client(covered=True)
    def train(self, client: Client, theta: Model, report: tuple[str, ...]) -> PartsUpdate:
        net = client.load(self.own(client, theta))
        # all parts are trained, whichever are reported
        fit = client.fit(net, self.local, client.data, average=client.state.get("average"))
        theta_k = client.unload(net)
        if fit.average is not None:
            client.state["average"] = fit.average
            if client.federated == client.rounds - 1:
                # after equal steps, the mean of moving averages is the average of the means; sent now, it costs no bytes
                theta_k = theta_k.holding(fit.average)
        client.state |= {part: theta_k.part(part) for part in PARTS if part not in self.shared}
        return PartsUpdate({part: theta_k.part(part) for part in report}, self.weight(client), fit.loss)

    def owners(self, server: Server, fed: Federation) -> Sequence[int]:
        return sorted(fed.has("theta"))

    def own(self, client: Client, model: Model) -> Model:
        own = {k: t for part in PARTS if part in client.state for k, t in client.state[part].items()}
        return dataclasses.replace(model, params=Params({**model.params, **own}))


@spec
class USplit(Full, name="feddiffuse_usplit"):
    """USPLIT: clients receive all of theta; of every two, one reports the encoder and the other the decoder."""

    def ready(self, clients: int) -> None:
        super().ready(clients)
        if self.aggregate.holds:
            raise RecipeError(
                f"algorithm.aggregate: {self.aggregate} needs equal parts of all clients, and those of {self.name} report "
                "different ones; use mean() or clipped(...)"
            )

    def reported_parts(self, cohort: Sequence[int], rng: np.random.Generator) -> dict[int, tuple[str, ...]]:
        if len(cohort) == 1:
            return {cohort[0]: PARTS}
        order = rng.permutation(cohort).tolist()
        reports: dict[int, tuple[str, ...]] = {}
        for one, other in zip(order[::2], order[1::2]):
            reports |= {one: ("encoder",), other: ("decoder",)}
            reports[int(rng.choice((one, other)))] += ("bottleneck",)
        if len(order) % 2:
            reports[order[-1]] = (str(rng.choice(("encoder", "decoder"))), "bottleneck")
        return {k: reports[k] for k in cohort}  # cohort order, so that float sums repeat


@spec
class ULatDec(Full, Personal, name="feddiffuse_ulatdec"):
    """ULATDEC: bottleneck and decoder travel; every client keeps an encoder of its own."""

    shared: ClassVar[tuple[str, ...]] = ("bottleneck", "decoder")


@spec
class UDec(Full, Personal, name="feddiffuse_udec"):
    """UDEC: only the decoder travels; every client keeps an encoder and a bottleneck of its own."""

    shared: ClassVar[tuple[str, ...]] = ("decoder",)


def only(theta: Model, parts: tuple[str, ...]) -> Model:
    """The model with these parts only."""
    return dataclasses.replace(theta, params=theta.part(*parts))
