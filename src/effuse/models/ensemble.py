"""Several classifiers as one network: the mean of their logits, or their majority."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from effuse.core.build import make, with_values
from effuse.core.data import Shape
from effuse.core.model import Arch, Model
from effuse.core.params import Buffers, Params
from effuse.core.spec import spec
from effuse.models.saved import write_plain

Vote = Literal["logits", "majority"]


@spec
class Ensemble(Arch, name="ensemble_of"):
    """Classifiers that answer together. Their architectures may differ."""

    members: tuple[Arch, ...]
    vote: Vote = "logits"  # the mean of the logits; or the majority, where a tie goes to the mean of the logits

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("members is empty; an ensemble needs at least one classifier")
        wrong = next((member for member in self.members if member.parts), None)
        if wrong is not None:
            raise ValueError(f"{wrong.name} returns images; an ensemble joins classifiers, such as resnet() or cnn()")

    def resolved(self, shape: Shape) -> Arch:
        """This ensemble and its members for data of that shape."""
        members = tuple(member.resolved(shape) for member in self.members)
        return with_values(super().resolved(shape), "model", members=members)

    def build(self) -> nn.Module:
        return Together([member.build() for member in self.members], self.vote)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


class Together(nn.ModuleList):
    """The members; parameter p of member k is called 'k.p'."""

    def __init__(self, members: Sequence[nn.Module], vote: Vote) -> None:
        super().__init__(members)
        self.vote = vote

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.stack([member(x).float() for member in self])
        mean = logits.mean(0)
        if self.vote == "logits":
            return mean
        classes = torch.arange(logits.shape[2], device=x.device)
        votes = (logits.argmax(2, keepdim=True) == classes).sum(0)
        return votes + 0.5 * mean.softmax(1)  # less than a vote: it decides between equal votes only


def ensemble_of(members: Sequence[Arch], vote: Vote = "logits", where: str = "model") -> Ensemble:
    """The architecture of an ensemble of resolved classifiers, which have one shape; `where` is for errors."""
    side, channels, classes = members[0].shape
    values = {"members": tuple(members), "vote": vote, "side": side, "channels": channels, "classes": classes}
    made: Ensemble = make(Ensemble, values, where)
    return made


def together(models: Sequence[Model], vote: Vote = "logits") -> Model:
    """Several classifiers as one model; nothing is trained."""
    arch = ensemble_of([model.arch for model in models], vote)
    params = {f"{k}.{name}": value for k, model in enumerate(models) for name, value in model.params.items()}
    buffers = {f"{k}.{name}": value for k, model in enumerate(models) for name, value in model.buffers.items()}
    return Model(arch, Params(params), Buffers(buffers))
