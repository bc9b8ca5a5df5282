"""What a public page leaves out: where files lie, and every single client."""

import dataclasses
from typing import Any

from effuse.core.grammar import hidden
from effuse.core.metric import Measurement
from effuse.report.facts import Facts
from effuse.report.heat import FEWEST, suppressed
from effuse.runs.records import RoundRecord

KEPT = ("effuse", "name", "engine", "device", "created", "versions", "classes")  # of a manifest


def shareable(facts: Facts) -> Facts:
    """The same facts without single clients, small counts, names of files, and what an audit of private images found.

    The number of images trained goes too: beside the counts that are told, a sum would tell a single one that is not.
    """
    result, manifest = facts.result, {key: facts.manifest[key] for key in KEPT if key in facts.manifest}
    manifest |= {"name": hidden(facts.name)}
    manifest["recipe"] = {key: hidden(value, key == "data") for key, value in facts.recipe.items()}
    if result is not None:
        spent = result.privacy and {k: v for k, v in result.privacy.items() if k != "clients"}
        metrics = {name: measurement(m) for name, m in result.metrics.items()}
        traffic = dataclasses.replace(result.traffic, clients=None, edges=None, evaluation=None)
        result = dataclasses.replace(result, metrics=metrics, privacy=spent, traffic=traffic, images=0)
    return dataclasses.replace(
        facts,
        manifest=manifest,
        records=[_record(record) for record in facts.records],
        result=result,
        split=facts.split and suppressed(facts.split),
        evaluation={name: measurement(m) for name, m in facts.evaluation.items()},
        audit=None,
        public=True,
    )


def measurement(m: Measurement) -> Measurement:
    """The same number without names of files, single clients' numbers, small counts, and numbers of training images."""
    count = m.protocol.get("test images")  # of a subgroup
    fewer = isinstance(count, int) and count < FEWEST
    left_out = {
        "trained_on": "probe" in m.protocol,  # training images; that of `cas` counts drawn ones
        "reference": fewer or m.protocol.get("split") == "train",
        "images": fewer,
        "test images": fewer,
    }
    told = {k: v for k, v in m.protocol.items() if not left_out.get(k)}
    protocol: dict[str, Any] = {k: hidden(v, k == "data") if isinstance(v, str) else v for k, v in told.items()}
    return dataclasses.replace(m, protocol=protocol, clients=None)


def _record(record: RoundRecord) -> RoundRecord:
    traffic = dataclasses.replace(record.traffic, clients=None, edges=None, evaluation=None)
    nothing: dict[str, Any] = dict.fromkeys(("noted", "updates", "clients", "silent"))
    return dataclasses.replace(record, traffic=traffic, loss=None if record.alone else record.loss, images=0, **nothing)
