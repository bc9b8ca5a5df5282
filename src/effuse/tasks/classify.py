"""The classification task."""

import torch
import torch.nn.functional as F
from torch import Tensor

from effuse.core.spec import spec
from effuse.core.task import Batch, Prediction


@spec
class Classify(Prediction):
    """Cross-entropy between the network's logits and the labels; no random numbers are needed."""

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.x,)

    def error(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output.float(), batch.labels, reduction="none")
