"""The end of a run: its model, its ledger and its result are written."""

import dataclasses
from collections.abc import Callable
from typing import Any

from effuse.core.algorithm import Server
from effuse.core.capabilities import Discloses, Personal
from effuse.core.ledger import TRAINING
from effuse.core.model import Model
from effuse.core.recipe import Recipe
from effuse.metrics.cost import costs, figures
from effuse.metrics.history import accuracy_over_rounds
from effuse.models.cut import Cuttable
from effuse.runs.folder import RunFolder
from effuse.runs.records import Result, Traffic, plain
from effuse.runs.save import save_model, weights_digest

PRUNED = "model/ is a network that has lost channels; `effuse.load` opens it, plain diffusers does not"
PERSONAL = "model/ holds the shared parts and the initial private ones; each client keeps its own model"


def finish(
    folder: RunFolder,
    recipe: Recipe,
    server: Server,
    average: Model | None,
    digests: list[str],
    ledger: dict[str, Any],
    elapsed: Callable[[], float],
    **known: Any,
) -> Result:
    """Write what a run ends in, from the report of its ledger and its records; `known` are fields of the result."""
    algorithm = recipe.algorithm
    model = algorithm.deliver(server)
    save_model(model, recipe, folder.path / "model")
    if average is not None:
        save_model(average, recipe, folder.path / "model-ema")
    ledger["costs"] = costs(ledger[TRAINING]["links"])
    images, seconds, per_round = 0, 0.0, []
    accuracies: list[tuple[int, float]] = []
    for record in folder.each_record():
        if record.metrics and "accuracy" in record.metrics:
            accuracies.append((record.federated, record.metrics["accuracy"]))
        images += record.images
        seconds += record.seconds.round
        sent = {"parameters": plain(record.traffic.parameters), "bytes": plain(record.traffic.bytes)}
        per_round.append({"phase": record.phase} | sent)
    spent = algorithm.spent(server) if isinstance(algorithm, Discloses) else None
    privacy = {} if spent is None else {"privacy": spent}
    folder.write_json("ledger.json", ledger | privacy | {"per_round": per_round})
    arch = model.arch
    cut = arch != recipe.model and isinstance(arch, Cuttable) and arch.cut
    result = Result(
        weights_sha256=weights_digest(model, digests),
        traffic=dataclasses.replace(Traffic.from_json(ledger[TRAINING], "the ledger"), clients=None),
        parameters=model.params.numel,
        figures=figures(model, algorithm, ledger["costs"]) | accuracy_over_rounds(accuracies),
        images=images,
        seconds=elapsed(),
        round_seconds=seconds,
        pruned=PRUNED if cut else None,
        personal=PERSONAL if isinstance(algorithm, Personal) else None,
        **known,
    )
    folder.write_json("result.json", plain(result))
    return result
