"""Faster blocks for the ConvNeXt U-Net in recorded steps."""

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
    """The same block. Its normalisations add the biases and time embeddings before them, and apply the GELU."""

    time_index: int  # of this block's time embedding

    def forward(self, x: Tensor, embedding: tuple[Tensor, ...] | None = None) -> Tensor:  # type: ignore[override]
        mix: Any = self.mix  # its convolutions are AlignedConv2d here
        depthwise: Any = self.depthwise
        norm, widen, _, norm_wide, narrow = mix
        shift = depthwise.bias if embedding is None else embedding[self.time_index]
        h = widen.unbiased(normed(depthwise.unbiased(x), norm, shift))
        shortcut = None if isinstance(self.residual, nn.Identity) else self.residual
        return joined(narrow, normed(h, norm_wide, widen.bias, before=True), shortcut, x)


class FusedUNet(ConvNeXtUNet):
    """The same network. One product gives all blocks' time embeddings, with the adjacent biases added."""

    def times(self, embedding: Tensor, give: Give) -> Any:
        blocks = self.blocks(give)
        return side_by_side([b.time for b in blocks], F.gelu(embedding), [b.depthwise.bias for b in blocks])

    def blocks(self, give: Give = "output") -> list[Any]:
        """The blocks in order. Features do not depend on those after the middle, which then have no gradient."""
        levels = (*self.downs, self.middle, *(self.ups if give != "features" else ()))
        return [block for level in levels for block in (level.first, level.second)]


class FusedLinearAttention(LinearAttention):
    """The same attention as one kernel between the convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(linear_attention(self.qkv(self.norm(x)), HEADS)[0])


def adapt(net: Any, kernels: Collection[str]) -> None:
    """Replace the modules for which one of the available kernels is faster."""
    if "norm" in kernels:
        net.__class__ = FusedUNet
        for module in net.modules():
            if type(module) is Block:
                module.__class__ = FusedBlock
        for index, block in enumerate(net.blocks()):
            block.time_index = index
    if "attention" in kernels:
        for module in net.modules():
            if type(module) is LinearAttention:
                module.__class__ = FusedLinearAttention
