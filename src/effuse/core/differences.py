"""How a reply differs from what was sent: the update that it stands for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.visit import through_wire


def models_sent(values: Mapping[str, Any], message: Any, wire: str) -> list[Model]:
    """The models of a message that a reply may have started from, as they arrived."""
    arguments = (getattr(message, f.name) for f in dataclasses.fields(message))
    sent = [through_wire(value, wire) for value in arguments if isinstance(value, Model)]
    replied = [value.arch for value in values.values() if isinstance(value, Model)]
    return [model for model in sent if model.arch in replied] if replied else sent  # a guide may have been sent beside it


def needs_start(values: Mapping[str, Any]) -> bool:
    """Whether a reply has models or parts of one, which differ from what was sent; other Params are differences already."""
    return any(isinstance(value, (Model, dict)) for value in values.values())


def changed(values: Mapping[str, Any], sent: list[Model], change: Callable[[Params, Params], Params]) -> dict[str, Any]:
    """A reply with all of its Params changed; `change` also gets the Params that they are compared with."""
    result = dict(values)
    for name, value in values.items():
        if isinstance(value, Model):
            result[name] = value.holding(change(sent[0].params, value.params))
        elif isinstance(value, dict):
            result[name] = {k: change(sent[0].params.select(part.__contains__), part) for k, part in value.items()}
        elif isinstance(value, Params):
            result[name] = change(value.zeros(), value)
    return result


def differences(values: Mapping[str, Any], message: Any, wire: str) -> list[Params] | None:
    """Every set of a reply's Params as a difference; None where it is not known from what."""
    sent = models_sent(values, message, wire)
    if len(sent) != 1 and needs_start(values):
        return None
    found: list[Params] = []

    def kept(before: Params, reply: Params) -> Params:
        found.append(reply - before)
        return reply

    changed(values, sent, kept)
    return found
