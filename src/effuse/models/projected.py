"""An encoder with the heads of self-supervised learning: Grill et al., 2020 (BYOL), and Chen et al., 2020 (SimCLR)."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import PositiveInt
from torch import Tensor, nn

from effuse.core.build import with_values
from effuse.core.data import Shape
from effuse.core.errors import ModelError
from effuse.core.model import Arch
from effuse.core.spec import spec
from effuse.core.task import Give
from effuse.models.resnet import ClassifierNet
from effuse.models.saved import write_plain


@spec
class Projected(Arch):
    """A classifier without its head, a projector, and the predictor by which BYOL guesses another view's projection."""

    featured: ClassVar[bool] = True

    encoder: Arch
    hidden: PositiveInt = 4096
    width: PositiveInt = 2048  # of a projection
    predictor: bool = True  # False: the projection is the output, as in SimCLR

    def resolved(self, shape: Shape) -> Arch:
        """This network and its encoder for data of that shape."""
        return with_values(super().resolved(shape), "model", encoder=self.encoder.resolved(shape))

    def build(self) -> nn.Module:
        encoder = self.encoder.build()
        if not isinstance(encoder, ClassifierNet):
            raise ModelError(f"model.encoder: {self.encoder.name} is no classifier with features; use a resnet(...)")
        features = self.encoder.hollow_net()(*self.encoder.example(), give="features").shape[1]
        return ProjectedNet(encoder, features, self.hidden, self.width, self.predictor)

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        write_plain(self, net, folder, scheduler)


class ProjectedNet(nn.Module):
    """Features of the encoder, their projection, and the prediction of another one."""

    def __init__(self, encoder: ClassifierNet, features: int, hidden: int, width: int, predictor: bool) -> None:
        super().__init__()
        encoder.head = nn.Identity()
        self.encoder = encoder
        self.projector = _two_layers(features, hidden, width)
        self.predictor = _two_layers(width, hidden, width) if predictor else nn.Identity()

    def forward(self, x: Tensor, give: Give = "output") -> Any:
        features = self.encoder(x)
        if give == "features":
            return features
        projection = self.projector(features)
        if give == "projection":
            return projection
        output = self.predictor(projection)
        return (output, features) if give == "both" else output


def _two_layers(inputs: int, hidden: int, outputs: int) -> nn.Module:
    # without biases: a BatchNorm that follows subtracts them, so that their gradient would be rounding errors only
    first, second = nn.Linear(inputs, hidden, bias=False), nn.Linear(hidden, outputs, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(), second)
