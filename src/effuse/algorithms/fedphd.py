"""FedPhD: Long et al., 2025, Algorithm 1: clients choose edges, edges and cloud weigh by homogeneity, the network is pruned."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from effuse.core.aggregate import Reduced, by_weight
from effuse.core.algorithm import FEDERATE, Server, on_client
from effuse.core.capabilities import Discloses, Hierarchical
from effuse.core.errors import RecipeError, WireError
from effuse.core.federation import Federation
from effuse.core.message import message
from effuse.core.model import Model
from effuse.core.params import mean
from effuse.core.solvers import Solver
from effuse.core.spec import spec
from effuse.core.task import Given
from effuse.core.workbench import Client
from effuse.privacy.histogram import Disclosure, Exact
from effuse.pruning.prune import cut, group_weights, prune

ENROL = "enrol"  # the phase in which every client tells its histogram, once


@message(name="fedphd.edge")
class Edge:
    """What an edge holds within a cycle, from one aggregation in the cloud to the next."""

    counts: tuple[float, ...]  # n_e q_e: images of each class behind its model
    theta: Model | None = None  # None until it is sent the cycle's model
    trained: bool = (
        False  # whether theta holds clients' work of this cycle; told histograms may be nought although they came
    )
    waiting: Model | None = None  # the mean of what came in since it last aggregated
    weight: float = 0.0  # of that
    waiting_counts: tuple[float, ...] = ()


@message(name="fedphd.server")
class FedPhDServer(Server):
    """The cloud's model, the edges, and what clients told of their data."""

    edges: tuple[Edge, ...] = ()
    told: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    pruned: bool = False


@message(name="fedphd.histogram")
class Histogram:
    """A client's histogram as it leaves the client: all that anybody learns of its labels."""

    counts: Tensor

    def __post_init__(self) -> None:
        if self.counts.dim() != 1 or (not self.counts.is_meta and bool((self.counts < 0).any())):
            raise WireError(f"told: {self.counts.tolist()} are not images of each class; counts are not negative")

    @property
    def histogram(self) -> tuple[float, ...]:
        return tuple(map(float, self.counts.tolist()))


@message(name="fedphd.told")
class ReportedHistogram:
    """The same at the client, so that its noise is drawn once."""

    counts: tuple[float, ...]


@message(name="fedphd.choice")
class EdgeChoice:
    """The edges in the order in which a client would go to them."""

    edges: tuple[int, ...]
    told: Histogram | None = None  # its histogram, where the answer that told it was lost

    def __post_init__(self) -> None:
        if sorted(self.edges) != list(range(len(self.edges))) or not self.edges:
            raise WireError(f"edges: {list(self.edges)[:20]} is not an order of edges 0, 1, ...")


@message(name="fedphd.update")
class FedPhDUpdate:
    """A client's model after local training; its weight follows from what it told at enrolment."""

    theta: Annotated[Model, by_weight]
    loss: float


def homogeneity(counts: np.ndarray, q_u: np.ndarray) -> np.ndarray:
    """mu = 2 - |q - q_u| (Eqs. 18, 20) of histograms along the last axis; of no images nothing is known, and q is taken as q_u."""
    n = counts.sum(-1, keepdims=True)
    q = np.divide(counts, n, out=np.broadcast_to(q_u, counts.shape).copy(), where=n > 0)
    return 2 - np.linalg.norm(q - q_u, axis=-1)


def chances(own: np.ndarray, edges: np.ndarray, a: float, b: float, q_u: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """P_n(e) of Eq. 25, for one client or several: edges as they would be with the client; alike when all are at nought."""
    joined = edges + own[..., None, :]
    wanted = np.maximum(0.0, a * homogeneity(joined, q_u) - joined.sum(-1) / scale + b)
    total = wanted.sum(-1, keepdims=True)
    return np.divide(wanted, total, out=np.full(wanted.shape, 1 / len(edges)), where=total > 0)


def sparsifying(grads: Mapping[str, Tensor], params: Mapping[str, Tensor], given: Given) -> Mapping[str, Tensor]:
    """The gradient of f + sum_g sum_k lambda_g |theta^g[k]|^2 (Eq. 17)."""
    lambda_g = given["lambda_g"]
    # one operation for each of hundreds of small tensors, not three
    return {k: torch.addcmul(g, lambda_g[k], params[k], value=2) for k, g in grads.items()}


@spec
class FedPhD(Hierarchical, Discloses, name="fedphd"):
    """Clients train at edges of their choice, edges meet in the cloud, and the network loses channels on the way."""

    local: Solver
    cohort: PositiveInt | Annotated[float, Field(gt=0, le=1)] | None = 0.2  # clients a round: a count, a fraction, or all
    edges: PositiveInt = 2
    r_e: PositiveInt = 1  # rounds between aggregations at the edges
    r_g: PositiveInt = 5  # and in the cloud
    a: NonNegativeFloat = 15_000.0  # what homogeneity counts for, against images
    b: float = 0.0
    selection: Literal["homogeneity", "random"] = "homogeneity"
    weights: Literal["homogeneity", "size"] = "homogeneity"  # size: a = 0 in Eqs. 21 and 23
    normalised: bool = False  # images count as shares of all images, so that a and b have no unit
    q_u: tuple[NonNegativeFloat, ...] | None = None  # the wanted distribution of labels; None: uniform
    histogram: Disclosure = Exact()
    variant: Literal["sparse", "os", "none"] = (
        "sparse"  # pruned by norm after sparse training, at random at the start, never
    )
    ratio: Annotated[float, Field(ge=0, lt=1)] = (
        0.2  # of channels removed; 0.2 of them is 43 % of the CIFAR network's parameters
    )
    R_s: PositiveInt = 50  # pruned at the first aggregation in the cloud from this round on
    lambda_0: NonNegativeFloat = 1e-4
    outages: tuple[tuple[int, int], ...] = ()  # (round, edge): edges that are silent, to try what happens then

    def __post_init__(self) -> None:
        if self.local.ema is not None:
            raise ValueError("local.ema: a per-step average would double the upload; use the recipe's `ema`")
        if self.r_g % self.r_e:
            raise ValueError(
                f"r_g={self.r_g} is not a multiple of r_e={self.r_e}: edges would bring half a period to the cloud"
            )
        if self.q_u is not None and abs(sum(self.q_u) - 1) > 1e-6:
            raise ValueError(f"q_u={list(self.q_u)} adds up to {sum(self.q_u):g}; a distribution adds up to 1")
        for r, e in self.outages:
            if not (r >= 1 and 0 <= e < self.edges):
                raise ValueError(f"outages: there is no round {r} with an edge {e}; rounds count from 1, edges from 0")
            if not self._reached(r):
                raise ValueError(f"outages: no edge is left in round {r}; leave one")

    def ready(self, clients: int) -> None:
        if isinstance(self.cohort, int) and self.cohort > clients:
            raise RecipeError(
                f"algorithm.cohort: {self.cohort} clients a round, but there are {clients}; lower it or raise clients"
            )

    def setup(self, model: Model, fed: Federation) -> Server:
        if self.variant == "os":
            model = prune(model, self.ratio, "random", fed.workbench.stream("prune"))
        elif self.variant == "sparse":
            cut(model.arch, self.ratio)  # a network that cannot be pruned is refused here
        return FedPhDServer(model, pruned=self.variant != "sparse", phase=ENROL)

    def round(self, server: FedPhDServer, fed: Federation) -> Server:
        if server.phase == ENROL:
            told = {n: answer.histogram for n, answer in fed.ask(self.enrol, fed.clients)}
            classes = len(next(iter(told.values())))  # of the data: a network may have more
            if self.q_u is not None and len(self.q_u) != classes:
                raise RecipeError(
                    f"algorithm.q_u: {len(self.q_u)} shares, but there are {classes} classes; give one for each"
                )
            return dataclasses.replace(server, told=told, edges=self._empty(classes), phase=FEDERATE)
        r = fed.federated + 1
        edges, here = list(server.edges), self._reached(r)
        for e in here:
            if edges[e].theta is None:  # the first round of a cycle, or the first after an outage
                edges[e] = dataclasses.replace(edges[e], theta=fed.carry("down", e, server.model))
        cohort = fed.sample(self.cohort)
        server, at = self._chosen(server, fed, cohort, here)
        self._train(server, fed, edges, at)
        if r % self.r_e == 0:
            for e in here:
                edges[e] = self._aggregated(edges[e])
        n_e, mu_e = [sum(edge.counts) for edge in edges], [self._mu(edge.counts) for edge in edges]
        fed.note(edges={str(n): e for n, e in at.items()}, n_e=n_e, mu_e=mu_e)
        if r % self.r_g:
            return dataclasses.replace(server, edges=tuple(edges))
        return self._in_the_cloud(server, fed, r, {e: edges[e] for e in here if edges[e].trained})

    def _chosen(
        self, server: FedPhDServer, fed: Federation, cohort: Sequence[int], here: Sequence[int]
    ) -> tuple[FedPhDServer, dict[int, int]]:
        """The edge that each client goes to: the one it chose or, where that is silent, its next-best."""
        # one snapshot for all clients of the round: the published balance of load comes out only so
        q = torch.tensor([edge.counts for edge in server.edges])
        choices = dict(fed.ask(self.choose, cohort, q=q, scale=self._scale(server)))
        late = {n: choice.told.histogram for n, choice in choices.items() if choice.told is not None}
        at = {n: next((e for e in choice.edges if e in here), here[0]) for n, choice in choices.items()}
        return dataclasses.replace(server, told=server.told | late), at

    def _train(self, server: FedPhDServer, fed: Federation, edges: list[Edge], at: Mapping[int, int]) -> None:
        """Local training at the edges' models; what comes back waits, in a weighted mean, for the edge to aggregate."""
        sparse = not server.pruned
        orders = {e: {"theta": edges[e].theta, "sparse": sparse} for e in set(at.values())}
        w = {n: self._weight(server.told[n], self._scale(server)) for n in at}
        weighed = {at[n] for n in at if w[n]}
        w = {n: w[n] if at[n] in weighed else 1.0 for n in at}  # ReLU left nobody at this edge
        waiting = {e: Reduced(SimpleNamespace(theta=edges[e].waiting), edges[e].weight) for e in orders if edges[e].weight}
        trained = fed.mean(self.train, {n: orders[e] for n, e in at.items()}, weight=w, group=at, start=waiting)
        for e, found in trained.items():
            if not found.weight:  # nobody who went there answered
                continue
            counts = np.sum([server.told[n] for n in found.heard], axis=0) + np.array(edges[e].waiting_counts or 0.0)
            edges[e] = dataclasses.replace(
                edges[e], waiting=found.value.theta, weight=found.weight, waiting_counts=tuple(counts.tolist())
            )

    def _aggregated(self, edge: Edge) -> Edge:
        """Eq. 19, on counts: q_e <- (n_e q_e + sum n_n q_n) / (n_e + sum n_n); and Eqs. 23 and 24."""
        if edge.waiting is None:
            return edge
        counts = tuple(x + y for x, y in zip(edge.counts, edge.waiting_counts))
        return Edge(counts, theta=edge.waiting, trained=True)

    def _in_the_cloud(self, server: FedPhDServer, fed: Federation, r: int, edges: Mapping[int, Edge]) -> FedPhDServer:
        """Eqs. 21 and 22; then pruning, when its time has come; then every edge starts reset_for."""
        theta, pruned = server.model, server.pruned
        w = {e: self._weight(edge.counts, self._scale(server)) for e, edge in edges.items()}
        alike = not any(w.values())
        brought = {e: edge.theta for e, edge in edges.items() if alike or w[e]}
        if brought:  # nobody may have trained where everything was silent that did
            theta = mean((fed.carry("up", e, theta_e), 1.0 if alike else w[e]) for e, theta_e in brought.items())
        if not pruned and r >= self.R_s:
            theta, pruned = prune(theta, self.ratio, "norm", fed.workbench.stream("prune")), True
            fed.note(pruned_to=theta.params.numel)
        return FedPhDServer(theta, edges=self._empty(len(server.edges[0].counts)), told=server.told, pruned=pruned)

    @on_client
    def enrol(self, client: Client) -> Histogram:
        # the same noise in whatever round it is asked for: an answer that was lost, or came late, cost its epsilon already
        told = self.histogram.disclosed(client.data.histogram, client.lasting("histogram"))
        client.state["told"] = ReportedHistogram(tuple(told))
        return Histogram(torch.tensor(told))

    @on_client
    def choose(self, client: Client, q: Tensor, scale: float) -> EdgeChoice:
        late = None if "told" in client.state else self.enrol(client)
        edges, own = q.cpu().numpy().astype(np.float64), np.array(client.state["told"].counts)
        P = chances(own, edges, self.a, self.b, self._target(len(own)), scale)
        if self.selection == "random":
            P = np.full(len(edges), 1 / len(edges))
        rng = client.stream("edge").numpy()
        first, lot = int(rng.choice(len(edges), p=P)), rng.random(len(edges))  # edges that are equally likely are drawn, too
        return EdgeChoice(
            (first, *sorted((e for e in range(len(edges)) if e != first), key=lambda e: (-P[e], lot[e]))), late
        )

    @on_client
    def train(self, client: Client, theta: Model, sparse: bool) -> FedPhDUpdate:
        net = client.load(theta)
        how: dict[str, Any] = {}
        if sparse:
            how = {"direction": sparsifying, "given": {"lambda_g": group_weights(theta.arch, self.lambda_0)}}
        fit = client.fit(net, self.local, client.data, **how)
        return FedPhDUpdate(client.unload(net), fit.loss)

    def warnings(self, rounds: int) -> list[str]:
        told = [f"outages: round {r} is after the last one, {rounds}" for r, _ in self.outages if r > rounds]
        if rounds % self.r_g:
            told.append(
                f"the last {rounds % self.r_g} of {rounds} rounds never reach the cloud; make rounds a multiple of r_g"
            )
        if self.variant == "sparse":
            at = -(-self.R_s // self.r_g) * self.r_g
            if at > rounds:
                told.append(
                    f"nothing is pruned: R_s={self.R_s} comes to round {at}, after the last one; lower R_s or raise rounds"
                )
            elif at != self.R_s:
                told.append(f"R_s={self.R_s} is not a multiple of r_g={self.r_g}: the network is pruned in round {at}")
        return told

    def spent(self, server: FedPhDServer) -> dict[str, Any] | None:
        charge = self.histogram.charge
        if charge is None:
            return None
        return {"histogram": {"mechanism": str(self.histogram), "epsilon": charge[0], "delta": charge[1], "times": 1}}

    def _reached(self, r: int) -> list[int]:
        return [e for e in range(self.edges) if (r, e) not in self.outages]

    def _empty(self, classes: int) -> tuple[Edge, ...]:
        return (Edge((0.0,) * classes),) * self.edges

    def _target(self, classes: int) -> np.ndarray:
        return np.full(classes, 1 / classes) if self.q_u is None else np.array(self.q_u)

    def _scale(self, server: FedPhDServer) -> float:
        return (sum(map(sum, server.told.values())) or 1.0) if self.normalised else 1.0

    def _mu(self, counts: Sequence[float]) -> float:
        return float(homogeneity(np.array(counts), self._target(len(counts))))

    def _weight(self, counts: Sequence[float], scale: float) -> float:
        """ReLU(n + a mu + b), Eqs. 21 and 23."""
        a = self.a if self.weights == "homogeneity" else 0.0
        return max(0.0, sum(counts) / scale + a * self._mu(counts) + self.b)
