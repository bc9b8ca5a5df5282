"""The classification task."""

import torch
import torch.nn.functional as F
from torch import Tensor

from effuse.core.spec import spec
from effuse.core.task import Batch, Net, Task


@spec
class Classify(Task):
    """Cross-entropy of the labels under the network's logits; nothing is drawn at random."""

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def loss(self, net: Net, batch: Batch) -> Tensor:
        return batch.mean(F.cross_entropy(net(batch.x).float(), batch.labels, reduction="none"))
