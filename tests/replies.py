"""An algorithm whose replies have every kind of reduced field, and a federation whose clients answer from a script."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from hand import HandNet

from effuse.core.aggregate import Reduced, by_count, by_weight
from effuse.core.algorithm import Algorithm, Server, on_client
from effuse.core.federation import Federation
from effuse.core.message import message
from effuse.core.model import Model
from effuse.core.params import Buffers, Params
from effuse.core.spec import spec
from effuse.core.workbench import Client, Workbench
from effuse.machines.hollow import Hollow
from effuse.tasks.denoise import Denoise

ARCH = HandNet(side=1, channels=1, classes=2)


@message
class Reply:
    """A reply with every kind of field that can be reduced."""

    model: Annotated[Model, by_weight]
    dc: Annotated[Params | None, by_count]
    parts: Annotated[dict[str, Params], by_weight]
    contrast: Annotated[float | None, by_count]
    score: Annotated[float | None, by_weight]
    weight: float = 1.0
    loss: float = 0.0


@spec
class Declared(Algorithm):
    """An algorithm whose jobs never run: the federation below answers them."""

    def round(self, server: Server, fed: Federation) -> Server:
        return server

    @on_client
    def train(self, client: Client, model: Model) -> Reply: ...

    @on_client
    def guided(self, client: Client, guide: str, note: str | None) -> Reply: ...

    @on_client
    def nothing(self, client: Client) -> Server: ...


class Scripted(Federation):
    """A federation with prepared answers; a client without one is silent."""

    def __init__(self, answers: dict[int, Any], clients: int = 5, wire: str = "fp32") -> None:
        super().__init__(Declared(), range(clients), Workbench(Hollow(), Denoise(), 1), 0, wire)
        self.answers, self.sent = answers, {}

    def _dispatch(self, job: Any, orders: dict[int, Any], messages: dict[int, Any]) -> Iterator[tuple[int, Any, str | None]]:
        self.sent = messages
        return self._given(orders)

    def _given(self, orders: dict[int, Any]) -> Iterator[tuple[int, Any, str | None]]:
        for k in orders:
            if k in self.answers:
                yield k, self.answers[k]() if callable(self.answers[k]) else self.answers[k], None


def model(w: float, counter: int = 0, running: float = 0.0) -> Model:
    return Model(ARCH, Params({"w": torch.tensor(w)}), Buffers({"n": torch.tensor(counter), "mean": torch.tensor(running)}))


def params(*values: float) -> Params:
    return Params({f"p{i}": torch.tensor(v) for i, v in enumerate(values)})


def reply(w: float, weight: float = 1.0, *, counter: int = 0, running: float = 0.0, **fields: Any) -> Reply:
    others = {"dc": None, "parts": {}, "contrast": None, "score": None} | fields
    return Reply(model(w, counter, running), weight=weight, **others)


def reduced(answers: list[Reply], **options: Any) -> Reduced:
    fed = Scripted(dict(enumerate(answers)))
    return fed.mean(Declared().train, range(len(answers)), model=model(0.0), **options)


def w(result: Any) -> float:
    return result.value.model.params["w"].item()


def earlier(w: float, weight: float) -> Reduced:
    """An earlier result for a mean to continue from."""
    return Reduced(SimpleNamespace(model=model(w)), weight)
