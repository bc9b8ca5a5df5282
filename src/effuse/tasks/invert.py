"""Drawing images that classifiers recognise: each is cropped and mirrored at random before they see it."""

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from effuse.core.model import Net
from effuse.core.spec import spec
from effuse.core.task import Batch, Task

BLACK = -1.0


@spec
class Invert(Task):
    """Images for a classifier; an algorithm adds the loss, which needs that classifier."""

    padding: NonNegativeInt = 4  # black pixels around an image, of which a crop of the image's size is taken
    flip: bool = True  # mirror half of the images, at random

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The number of each image, the corner of its crop, and whether it is mirrored."""
        device = generator.device
        corner = torch.randint(2 * self.padding + 1, (n, 2), generator=generator, device=device)
        mirrored = torch.rand(n, generator=generator, device=device) < (0.5 if self.flip else 0.0)
        return {"row": torch.arange(n, device=device), "corner": corner, "mirrored": mirrored}

    def seen(self, images: Tensor, batch: Batch) -> Tensor:
        """The images as a classifier sees them.

        A crop is a product with two matrices of zeros and ones: its gradient needs no scatter, whose order varies on a GPU.
        """
        p, side = self.padding, images.shape[-1]
        steps = torch.arange(side, device=images.device)
        down, right = (batch.drawn["corner"][:, i, None] + steps for i in (0, 1))
        right = torch.where(batch.drawn["mirrored"][:, None], right.flip(1), right)
        padded = torch.nn.functional.pad(images - BLACK, (p, p, p, p))
        places = torch.arange(side + 2 * p, device=images.device)
        rows, columns = ((chosen[:, :, None] == places).to(images.dtype) for chosen in (down, right))
        return torch.einsum("nhy,ncyx,nwx->nchw", rows, padded, columns) + BLACK

    def loss(self, net: Net, batch: Batch) -> Tensor:
        """The mean brightness of what is seen; it only shows that the network draws images."""
        return batch.mean(self.seen(net(batch.drawn["row"]), batch).flatten(1).mean(1))
