"""What becomes of the ConvNeXt U-Net's blocks where steps are recorded."""

from collections.abc import Collection
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from effuse.core.task import Give
from effuse.fast.ops.attention import linear_attention
from effuse.fast.ops.conv import joined
from effuse.fast.ops.norm import normed
from effuse.fast.ops.products import side_by_side
from effuse.models.convnext_unet import HEADS, Block, ConvNeXtUNet, LinearAttention


class FusedBlock(Block):
    """The same block, whose biases, times and GELU are left to the normalisations that follow them."""

    place: int  # among those who are told the time

    def forward(self, x: Tensor, embedding: tuple[Tensor, ...] | None = None) -> Tensor:  # type: ignore[override]
        norm, widen, _, norm_wide, narrow = self.mix
        shift = self.depthwise.bias if embedding is None else embedding[self.place]
        h = widen.unbiased(normed(self.depthwise.unbiased(x), norm, shift))
        shortcut = None if isinstance(self.residual, nn.Identity) else self.residual
        return joined(narrow, normed(h, norm_wide, widen.bias, before=True), shortcut, x)


class FusedUNet(ConvNeXtUNet):
    """The same network, whose blocks' times, with the biases that stand beside them, are one product."""

    def times(self, embedding: Tensor, give: Give) -> Any:
        blocks = self.blocks(give)
        return side_by_side([b.time for b in blocks], F.gelu(embedding), [b.depthwise.bias for b in blocks])

    def blocks(self, give: Give = "output") -> list[Any]:
        """The blocks in their order; features have no use for those behind the middle, which then have no gradient."""
        levels = (*self.downs, self.middle, *(self.ups if give != "features" else ()))
        return [block for level in levels for block in (level.first, level.second)]


class FusedLinearAttention(LinearAttention):
    """The same between its convolutions in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(linear_attention(self.qkv(self.norm(x)), HEADS)[0])


def adapt(net: ConvNeXtUNet, kernels: Collection[str]) -> None:
    """Replace what is faster otherwise, given our kernels that run."""
    if "norm" in kernels:
        net.__class__ = FusedUNet
        for module in net.modules():
            if type(module) is Block:
                module.__class__ = FusedBlock
        for place, block in enumerate(net.blocks()):
            block.place = place
    if "attention" in kernels:
        for module in net.modules():
            if type(module) is LinearAttention:
                module.__class__ = FusedLinearAttention
