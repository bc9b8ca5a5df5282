"""What a client's features are on average in each class."""

import torch
from torch import Tensor
from torch.nn import functional as F

from effuse.core.aggregate import Reducer
from effuse.core.model import Net
from effuse.core.prelude import Client, Given, RecipeError
from effuse.core.task import Batch


def refuse_comparing(aggregate: Reducer) -> None:
    """Refuse rules that compare whole replies: what clients tell of classes that they lack is no value to compare."""
    if aggregate.holds:
        raise RecipeError(
            f"algorithm.aggregate: {aggregate} compares whole replies, and clients have different classes; "
            "use mean() or clipped(norm)"
        )


def features(net: Net, batch: Batch, given: Given) -> Tensor:
    """The features of each image, in fp32."""
    return net(batch.x, give="features").float()


def class_sums(client: Client, net: Net, unit: bool = False) -> tuple[Tensor, Tensor]:
    """The sum of the features of each class, C x d, and its number of images; `unit` brings each image's to length one.

    Under a budget a protected unit has a weight of one in all.
    """
    z = client.apply(net, features, client.data)
    if unit:
        z = F.normalize(z, dim=1)
    weighted = torch.cat([z, torch.ones_like(z[:, :1])], dim=1) * client.unit_weights.to(z.device)[:, None]
    member = F.one_hot(client.data.labels, len(client.data.dataset.classes)).to(z.device, z.dtype)
    total = member.T @ weighted  # adding rows by index has no fixed order on a GPU
    return total[:, :-1], total[:, -1]
