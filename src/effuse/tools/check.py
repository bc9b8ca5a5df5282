"""The dry run: what a recipe would cost and send, and what would fail, before anything is computed."""

from collections.abc import Callable
from typing import Any, cast

import torch

from effuse.core.algorithm import Server
from effuse.core.capabilities import Averages, Companions, Discloses, Personal, StopsEarly
from effuse.core.data import Dataset, Shard
from effuse.core.ledger import EVALUATION, TRAINING
from effuse.core.model import Model
from effuse.core.recipe import Recipe
from effuse.fast import cpu_slots
from effuse.metrics.cost import activation_bytes, costs, figures, macs, parameters
from effuse.runs.evaluation import evaluation_calls, shares_of
from effuse.runs.rounds import FinishedRound, rounds_of
from effuse.transport.plan import Plan
from effuse.transport.refusals import hollow_model, refuse
from effuse.transport.rehearsal import Rehearsal
from effuse.transport.state import MemorySnapshots, bytes_in

WIDTH = 4  # bytes of a float
PASSES = 3  # through a network for a training image: forward, and two backward
SMALLEST_SHARE = 10  # a client with fewer images gets a warning


def check(recipe: Recipe, name: str = "") -> dict[str, Any]:
    """Rehearse a recipe; raises the errors that a run would raise."""
    train, test = recipe.data.load("train"), recipe.data.load("test")
    recipe = recipe.resolved(train)
    shards = recipe.shards(train)
    refuse(recipe, train, test)
    model = hollow_model(recipe)
    fed = Rehearsal(recipe, shards)
    rounds, evaluations, server, server_bytes, client_bytes = rehearse(recipe, fed, model)
    algorithm, ledger = recipe.algorithm, fed.ledger.report()
    final = algorithm.deliver(server)
    training = ledger[TRAINING]
    traffic: dict[str, Any] = {"exact": not isinstance(algorithm, StopsEarly)}
    if isinstance(algorithm, StopsEarly):
        traffic["reason"] = f"the longest run is shown: {algorithm.early_stop}"
    traffic |= {k: training[k] for k in ("parameters", "bytes")}
    traffic["links"] = {k: {d: v[d]["bytes"] for d in v} for k, v in training["links"].items()}
    traffic["evaluation"] = {k: ledger[EVALUATION][k] for k in ("parameters", "bytes")}
    traffic["per_round"] = rounds
    traffic["clients"] = training["clients"]
    traffic |= {"edges": training["edges"]} if "edges" in training else {}
    traffic["costs"] = prices = costs(training["links"])
    return {
        "recipe": name or "recipe",
        "parameters": parameters(recipe.model),
        "macs": macs(recipe.model),
        "networks": [
            {"name": arch.name, "parameters": parameters(arch)["total"], "macs": macs(arch)} for arch in recipe.networks[1:]
        ],
        "macs_frozen": algorithm.frozen * macs(recipe.model, "features") if isinstance(algorithm, Companions) else 0,
        "partition": partition(train, shards),
        "traffic": traffic,
        "figures": figures(final, algorithm, prices),
        "after": {"parameters": final.params.numel, "macs": macs(final.arch)},
        "privacy": algorithm.spent(server) if isinstance(algorithm, Discloses) else None,
        "plan": Plan(recipe, fed.released).spent(),
        "evaluation": (looks := evaluation(recipe, fed, server, evaluations)),
        "steps": {"client": fed.machine.steps["client"], "server": fed.machine.steps["server"]},
        "memory": memory(recipe, model, train, fed.held),
        "disk": disk(recipe, final, server_bytes, client_bytes),
        "warnings": warnings(recipe, shards) + dwarfed(looks),
    }


def partition(train: Dataset, shards: list[Shard]) -> dict[str, Any]:
    """Who holds what: sizes, labels by class, and groups (such as patients) where the data has them."""
    held = {"sizes": [len(s) for s in shards], "classes": list(train.classes), "labels": [s.histogram for s in shards]}
    if train.groups is None:
        return held
    return held | {"groups": [len(train.groups[s.rows.to(train.groups.device)].unique()) for s in shards]}


def evaluation(recipe: Recipe, fed: Rehearsal, server: Server, times: int) -> dict[str, Any]:
    """What the evaluations of a run cost: network evaluations, and their arithmetic as a multiple of the training's."""
    algorithm = recipe.algorithm
    if isinstance(algorithm, Personal):
        owners, averaged = len(list(algorithm.owners(server, fed))), algorithm.averages
    else:
        own = isinstance(algorithm, Averages) and algorithm.average(server) is not None
        owners, averaged = 0, recipe.ema is not None or own
    calls = evaluation_calls(recipe, owners, averaged)
    passes = 1 if recipe.sampler is None else recipe.sampler.passes
    trained = sum(PASSES * images * macs(arch) for arch, images in fed.machine.images.items())
    drawn = times * calls * passes * macs(recipe.model)
    return {"times": times, "calls": calls, "of_training": drawn / trained if trained else None}


def dwarfed(looks: dict[str, Any]) -> list[str]:
    """A warning where evaluations compute more than the training."""
    if (share := looks["of_training"]) is None or share <= 1:
        return []
    return [
        f"evaluating takes {share:.1f} times the arithmetic of all training: {looks['times']} times {looks['calls']:,} "
        "network evaluations; lower n in evaluate.metrics, evaluate.grid or sampler.steps, or raise evaluate.every"
    ]


def rehearse(recipe: Recipe, fed: Rehearsal, model: Model) -> tuple[list[dict[str, Any]], int, Server, int, int]:
    """Run every round on shapes.

    Returns their traffic, the number of evaluations, the final server state, and the largest states in bytes.
    """
    server = fed.prepare(model)
    closed, evaluations, server_bytes, client_bytes = [], 0, 0, 0
    snapshots = cast(Callable[[int], MemorySnapshots], fed.worker.snapshots)  # a rehearsal keeps states in memory
    for done in rounds_of(recipe, fed, server, 0, 0):
        evaluations += done.evaluate
        if done.evaluate and isinstance(recipe.algorithm, Personal):
            _rehearse_evaluation(recipe, recipe.algorithm, fed, done)
        traffic = fed.ledger.close()
        closed.append({"phase": done.phase} | {k: traffic[k] for k in ("parameters", "bytes")})
        server = done.server
        server_bytes = max(server_bytes, bytes_in(server))
        client_bytes = max(client_bytes, sum(snapshots(k).nbytes for k in fed.clients))
    return closed, evaluations, server, server_bytes, client_bytes


def _rehearse_evaluation(recipe: Recipe, algorithm: Personal, fed: Rehearsal, done: FinishedRound) -> None:
    owners = algorithm.owners(done.server, fed)
    _, n = shares_of(recipe, len(owners))
    model = algorithm.deliver(done.server)
    with fed.evaluating():
        for average in (False, True) if algorithm.averages else (False,):
            for _ in fed.ask(algorithm.draw, owners, model=model, n=n, sampler=recipe.sampler, average=average):
                pass
            if any(metric.predicts for metric in recipe.evaluate.metrics):
                test = recipe.data.load("test")
                about: dict[str, Any] = {"images": test.images, "peak": test.peak, "average": average}
                for _ in fed.ask(algorithm.classify, owners, model=model, **about):
                    pass


def memory(recipe: Recipe, model: Model, train: Dataset, held: int) -> dict[str, int]:
    """The estimated memory of a run on a CPU, in bytes.

    It sums the weights, gradients, moments and activations of the clients that train at the same time, the data, and the
    replies of a cohort that are held together.
    """
    together = cpu_slots(recipe)
    trained = recipe.algorithm.trains(recipe)
    networks = {recipe.model: model.params.nbytes} | {t.arch: WIDTH * parameters(t.arch)["total"] for t in trained}
    weights = 5 * together * max(networks.values())
    batches = [t.solver.batch * activation_bytes(t.arch) for t in trained]
    activations = together * max(batches, default=activation_bytes(recipe.model))
    data = train.images.numel() * train.images.element_size()
    parts = {"weights": weights, "activations": activations, "data": data, "cohort": held}
    return parts | {"total": sum(parts.values())}


def disk(recipe: Recipe, model: Model, server_bytes: int, client_bytes: int) -> dict[str, int]:
    """The estimated bytes of a run folder: two checkpoints, three states of each client, the model and its average."""
    own, copies = model.params.nbytes, 1 if recipe.ema is None else 2
    parts = {"checkpoints": 2 * (server_bytes + (copies - 1) * own), "clients": 3 * client_bytes, "model": copies * own}
    return parts | {"total": sum(parts.values())}


def warnings(recipe: Recipe, shards: list[Shard]) -> list[str]:
    """Warnings about a recipe that would run."""
    found = recipe.algorithm.warnings(recipe.rounds)
    small = [k for k, s in enumerate(shards) if len(s) < SMALLEST_SHARE]
    if small:
        found.append(f"clients {', '.join(map(str, small))} hold fewer than {SMALLEST_SHARE} images")
    used = torch.tensor([s.histogram for s in shards]).sum(0)
    missing = (used == 0).nonzero().flatten().tolist()
    if missing:
        found.append(f"no client holds an image of class {', '.join(map(str, missing))}")
    if recipe.sampler is None and recipe.evaluate.grid and recipe.evaluate.metrics == ():
        found.append("there is neither a sampler nor a metric: nothing will be evaluated")
    return found
