"""FedPhD: Long et al., 2025, "Federated Pruning with Hierarchical Learning of Diffusion Models", Algorithm 1."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from effuse.algorithms.shared.homogeneity import aggregation_weight, edge_probabilities, homogeneity
from effuse.algorithms.shared.labels import TOLD, Histogram, spent_on, told
from effuse.algorithms.shared.outages import Outages, outage_warnings, reachable_edges, validate_outages
from effuse.core.aggregate import Reduced, by_weight
from effuse.core.capabilities import Discloses, Hierarchical
from effuse.core.errors import WireError
from effuse.core.params import mean
from effuse.core.prelude import FEDERATE, Client, Federation, Model, RecipeError, Server, Solver, message, on_client, spec
from effuse.core.task import Given
from effuse.privacy.histogram import Disclosure, Exact
from effuse.pruning.prune import cut, group_weights, prune

ENROL = "enrol"  # the phase in which every client discloses its histogram, once


@message(name="fedphd.edge")
class Edge:
    """An edge within a cycle: the rounds from one aggregation in the cloud to the next."""

    counts: tuple[float, ...]  # n_e q_e: the images of each class behind its model
    theta: Model | None = None  # theta_e; None until the cloud has sent this cycle's model
    trained: bool = False  # theta_e contains work of this cycle, even where disclosed counts are all zero
    waiting: Model | None = None  # the mean of the clients' models since the edge last aggregated
    weight: float = 0.0  # the total weight of that mean
    waiting_counts: tuple[float, ...] = ()  # the sum of those clients' histograms


@message(name="fedphd.server")
class FedPhDServer(Server):
    """The cloud's model, the edges, and the histograms that clients disclosed."""

    edges: tuple[Edge, ...] = ()
    histograms: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)  # n_n q_n of every client
    pruned: bool = False


@message(name="fedphd.choice")
class EdgeChoice:
    """The edges in the order of a client's preference."""

    edges: tuple[int, ...]
    histogram: Histogram | None = None  # its histogram, where the answer to `enrol` was lost

    def __post_init__(self) -> None:
        if sorted(self.edges) != list(range(len(self.edges))) or not self.edges:
            raise WireError(f"edges: {list(self.edges)[:20]} is not an order of edges 0, 1, ...")


@message(name="fedphd.update")
class FedPhDUpdate:
    """A client's model after local training; its weight follows from its disclosed histogram."""

    theta: Annotated[Model, by_weight]
    loss: float | None


def sparsifying(grads: Mapping[str, Tensor], params: Mapping[str, Tensor], given: Given) -> Mapping[str, Tensor]:
    """The gradient of f + sum_g sum_k lambda_g |theta^g[k]|^2 (Eq. 17)."""
    lambda_g = given["lambda_g"]
    # one operation for each of hundreds of small tensors, not three
    return {k: torch.addcmul(g, lambda_g[k], params[k], value=2) for k, g in grads.items()}


@spec
class FedPhD(Hierarchical, Discloses, name="fedphd"):
    """Clients train at edges of their choice, the cloud averages the edges, and the network is pruned on the way."""

    local: Solver
    cohort: PositiveInt | Annotated[float, Field(gt=0, le=1)] | None = 0.2  # clients a round: a count, a fraction, or all
    edges: PositiveInt = 2  # N_e
    r_e: PositiveInt = 1  # rounds between aggregations at the edges
    r_g: PositiveInt = 5  # rounds between aggregations in the cloud
    a: NonNegativeFloat = 15_000.0  # the weight of homogeneity against images (Eqs. 21, 23, 25)
    b: float = 0.0  # the offset in the same equations
    selection: Literal["homogeneity", "random"] = "homogeneity"
    weights: Literal["homogeneity", "size"] = "homogeneity"  # size: a = 0 in Eqs. 21 and 23
    normalised: bool = False  # images count as shares of all images, so that a and b have no unit
    q_u: tuple[NonNegativeFloat, ...] | None = None  # the target distribution of labels; None: uniform
    histogram: Disclosure = Exact()
    variant: Literal["sparse", "os", "none"] = "sparse"  # sparse training, then pruned by norm; one-shot, at random; never
    ratio: Annotated[float, Field(ge=0, lt=1)] = 0.2  # of channels removed: 43 % of the CIFAR network's parameters
    R_s: PositiveInt = 50  # pruned at the first aggregation in the cloud from this round on
    lambda_0: NonNegativeFloat = 1e-4  # the strength of sparse training (Eq. 17)
    outages: Outages = ()  # simulated: edges that do not answer in given rounds

    def __post_init__(self) -> None:
        if self.local.ema is not None:
            raise ValueError("local.ema: a per-step average would double the upload; use the recipe's `ema`")
        if self.r_g % self.r_e:
            raise ValueError(f"r_g={self.r_g} is not a multiple of r_e={self.r_e}: a cycle would end between aggregations")
        if self.q_u is not None and abs(sum(self.q_u) - 1) > 1e-6:
            raise ValueError(f"q_u={list(self.q_u)} adds up to {sum(self.q_u):g}; a distribution adds up to 1")
        validate_outages(self.outages, self.edges)

    def ready(self, clients: int) -> None:
        if isinstance(self.cohort, int) and self.cohort > clients:
            raise RecipeError(
                f"algorithm.cohort: {self.cohort} clients a round, but there are {clients}; lower it or raise clients"
            )

    def setup(self, model: Model, fed: Federation) -> Server:
        if self.variant == "os":
            model = prune(model, self.ratio, "random", fed.workbench.stream("prune"))
        elif self.variant == "sparse":
            cut(model.arch, self.ratio)  # refuses a network that cannot be pruned
        return FedPhDServer(model, pruned=self.variant != "sparse", phase=ENROL)

    def round(self, server: FedPhDServer, fed: Federation) -> Server:
        if server.phase == ENROL:
            return self._enrol_all(server, fed)
        r = fed.federated + 1
        reachable = reachable_edges(self.outages, self.edges, r)
        edges = self._send_to_edges(server, fed, reachable)
        S = fed.sample(self.cohort)
        server, edge_of = self._select_edges(server, fed, S, reachable)
        edges = self._train_at_edges(server, fed, edges, edge_of)
        if r % self.r_e == 0:
            edges = [self._aggregate_at_edge(edge) if e in reachable else edge for e, edge in enumerate(edges)]
        self._note(fed, edges, edge_of)
        if r % self.r_g:
            return dataclasses.replace(server, edges=tuple(edges))
        theta = self._aggregate_in_cloud(server, fed, {e: edges[e] for e in reachable if edges[e].trained})
        pruned = server.pruned
        if not pruned and r >= self.R_s:
            theta, pruned = prune(theta, self.ratio, "norm", fed.workbench.stream("prune")), True
            fed.note(pruned_to=theta.params.numel)
        classes = len(server.edges[0].counts)
        return FedPhDServer(theta, edges=self._empty_edges(classes), histograms=server.histograms, pruned=pruned)

    def _enrol_all(self, server: FedPhDServer, fed: Federation) -> FedPhDServer:
        """Collect the histograms q_n of all clients."""
        histograms = {n: answer.histogram for n, answer in fed.ask(self.enrol, fed.clients)}
        fed.note(histograms={str(n): counts for n, counts in histograms.items()})
        classes = len(next(iter(histograms.values())))  # of the data; a network may have more
        if self.q_u is not None and len(self.q_u) != classes:
            raise RecipeError(f"algorithm.q_u: {len(self.q_u)} shares, but there are {classes} classes; give one for each")
        return dataclasses.replace(server, histograms=histograms, edges=self._empty_edges(classes), phase=FEDERATE)

    def _send_to_edges(self, server: FedPhDServer, fed: Federation, reachable: Sequence[int]) -> list[Edge]:
        """The edges, with theta sent to those that lack it: at the start of a cycle, or after an outage."""
        edges = list(server.edges)
        for e in reachable:
            if edges[e].theta is None:
                edges[e] = dataclasses.replace(edges[e], theta=fed.carry("down", e, server.model))
        return edges

    def _select_edges(
        self, server: FedPhDServer, fed: Federation, S: Sequence[int], reachable: Sequence[int]
    ) -> tuple[FedPhDServer, dict[int, int]]:
        """Eq. 25: the edge of each client, its first choice among the reachable ones."""
        # one snapshot of q_e for all clients of the round: only so does the published balance of load come out
        q = torch.tensor([edge.counts for edge in server.edges])
        choices: dict[int, EdgeChoice] = {}
        late: dict[int, tuple[float, ...]] = {}
        for n, choice in fed.ask(self.choose, S, q=q, scale=self._scale(server)):
            with fed.using(n):
                if choice.histogram is not None:
                    late[n] = choice.histogram.histogram
                elif n not in server.histograms:
                    raise WireError("it has disclosed no histogram, neither at first nor now")
                choices[n] = choice
        if late:
            fed.note(histograms={str(n): counts for n, counts in late.items()})
        edge_of = {n: next((e for e in choice.edges if e in reachable), reachable[0]) for n, choice in choices.items()}
        return dataclasses.replace(server, histograms=server.histograms | late), edge_of

    def _train_at_edges(
        self, server: FedPhDServer, fed: Federation, edges: Sequence[Edge], edge_of: Mapping[int, int]
    ) -> list[Edge]:
        """Local training from theta_e, and the sums of Eqs. 19 and 23 over the clients that answered."""
        arguments = {e: {"theta": edges[e].theta, "sparse": not server.pruned} for e in set(edge_of.values())}
        w = {n: self._weight(server.histograms[n], self._scale(server)) for n in edge_of}
        weighted = {edge_of[n] for n in edge_of if w[n]}
        w = {n: w[n] if e in weighted else 1.0 for n, e in edge_of.items()}  # ReLU left no client at e: equal weights
        waiting = {e: Reduced.of(edges[e].weight, theta=edges[e].waiting) for e in arguments if edges[e].weight}
        messages = {n: arguments[e] for n, e in edge_of.items()}
        means = fed.mean(self.train, messages, weight=w, group=edge_of, start=waiting)
        trained = list(edges)
        for e, reduced in means.items():
            if not reduced.weight:  # no client of this edge has answered since it last aggregated
                continue
            counts = np.sum([server.histograms[n] for n in reduced.heard], axis=0) + np.array(edges[e].waiting_counts or 0.0)
            trained[e] = dataclasses.replace(
                edges[e], waiting=reduced.value.theta, weight=reduced.weight, waiting_counts=tuple(counts.tolist())
            )
        return trained

    def _aggregate_at_edge(self, edge: Edge) -> Edge:
        """Eqs. 23 and 24, and Eq. 19 on counts: q_e <- (n_e q_e + sum n_n q_n) / (n_e + sum n_n)."""
        if edge.waiting is None:
            return edge
        counts = tuple(x + y for x, y in zip(edge.counts, edge.waiting_counts))
        return Edge(counts, theta=edge.waiting, trained=True)

    def _aggregate_in_cloud(self, server: FedPhDServer, fed: Federation, edges: Mapping[int, Edge]) -> Model:
        """Eqs. 21 and 22."""
        w = {e: self._weight(edge.counts, self._scale(server)) for e, edge in edges.items()}
        if not any(w.values()):
            w = dict.fromkeys(w, 1.0)  # ReLU left no edge: equal weights
        models = {e: edge.theta for e, edge in edges.items() if w[e] and edge.theta is not None}
        if not models:  # no reachable edge has trained
            return server.model
        return mean((fed.carry("up", e, theta_e), w[e]) for e, theta_e in models.items())

    @on_client(covered=True)
    def enrol(self, client: Client) -> Histogram:
        return Histogram(torch.tensor(told(client, self.histogram)))

    @on_client(covered=True)
    def choose(self, client: Client, q: Tensor, scale: float) -> EdgeChoice:
        late = None if TOLD in client.state else self.enrol(client)
        edges, own = q.cpu().numpy().astype(np.float64), np.array(told(client, self.histogram))
        P = edge_probabilities(own, edges, self.a, self.b, self._target(len(own)), scale)
        if self.selection == "random":
            P = np.full(len(edges), 1 / len(edges))
        rng = client.stream("edge").numpy()
        first, tie = int(rng.choice(len(edges), p=P)), rng.random(len(edges))  # equally likely edges follow at random
        others = sorted((e for e in range(len(edges)) if e != first), key=lambda e: (-P[e], tie[e]))
        return EdgeChoice((first, *others), late)

    @on_client(covered=True)
    def train(self, client: Client, theta: Model, sparse: bool) -> FedPhDUpdate:
        net = client.load(theta)
        regulariser: dict[str, Any] = {}
        if sparse:
            regulariser = {"direction": sparsifying, "given": {"lambda_g": group_weights(theta.arch, self.lambda_0)}}
        fit = client.fit(net, self.local, client.data, **regulariser)
        return FedPhDUpdate(client.unload(net), fit.loss)

    def warnings(self, rounds: int) -> list[str]:
        found = outage_warnings(self.outages, rounds)
        if rounds % self.r_g:
            left = rounds % self.r_g
            found.append(f"the last {left} of {rounds} rounds never reach the cloud; make rounds a multiple of r_g")
        if self.variant == "sparse":
            at = -(-self.R_s // self.r_g) * self.r_g
            if at > rounds:
                found.append(f"nothing is pruned: round {at} is after the last one, {rounds}; lower R_s or raise rounds")
            elif at != self.R_s:
                found.append(f"R_s={self.R_s} is not a multiple of r_g={self.r_g}: the network is pruned in round {at}")
        return found

    def spent(self, server: Server) -> dict[str, Any] | None:
        return spent_on(self.histogram)

    def _note(self, fed: Federation, edges: Sequence[Edge], edge_of: Mapping[int, int]) -> None:
        mu_e = [float(homogeneity(np.array(edge.counts), self._target(len(edge.counts)))) for edge in edges]
        fed.note(edges={str(n): e for n, e in edge_of.items()}, n_e=[sum(edge.counts) for edge in edges], mu_e=mu_e)

    def _empty_edges(self, classes: int) -> tuple[Edge, ...]:
        return (Edge((0.0,) * classes),) * self.edges

    def _target(self, classes: int) -> np.ndarray:
        return np.full(classes, 1 / classes) if self.q_u is None else np.array(self.q_u)

    def _scale(self, server: FedPhDServer) -> float:
        return (sum(map(sum, server.histograms.values())) or 1.0) if self.normalised else 1.0

    def _weight(self, counts: Sequence[float], scale: float) -> float:
        a = self.a if self.weights == "homogeneity" else 0.0
        return aggregation_weight(counts, a, self.b, self._target(len(counts)), scale)
