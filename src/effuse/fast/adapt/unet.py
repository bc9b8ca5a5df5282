"""Faster blocks for the U-Net in recorded steps; imported only for such a network, because it needs diffusers."""

from collections.abc import Collection
from typing import Any

import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from effuse.core.task import Give
from effuse.fast.ops.bias import plus
from effuse.fast.ops.conv import doubled, joined
from effuse.fast.ops.norm import FusedGroupNormSiLU, normed
from effuse.fast.ops.products import aligned, side_by_side
from effuse.models.unet import network_class

Network: Any = network_class()
# base classes without diffusers' annotations, which do not fit the forward passes below
AnyResnetBlock: Any = ResnetBlock2D
AnyAttention: Any = Attention
AnyUpsample: Any = Upsample2D


class FusedNetwork(Network):
    """The same network. One product gives all blocks' time embeddings, with the adjacent biases added."""

    def times(self, embedding: Tensor, give: Give) -> Any:
        blocks = self.blocks(give)
        return side_by_side([b.time_emb_proj for b in blocks], F.silu(embedding), [b.conv1.bias for b in blocks])

    def blocks(self, give: Give = "output") -> list[Any]:
        """The blocks in order. Features do not depend on those after the middle, which then have no gradient."""
        levels = (*self.down_blocks, self.mid_block, *(self.up_blocks if give != "features" else ()))
        return [block for level in levels for block in level.resnets]


class FusedResnetBlock(AnyResnetBlock):
    """The same block. Its normalisations add biases and time embeddings, and apply SiLU and dropout."""

    time_index: int  # of this block's time embedding

    def forward(self, x: Tensor, temb: tuple[Tensor, ...]) -> Tensor:
        h = self.conv1.unbiased(normed(x, self.norm1, after=True))
        h = normed(h, self.norm2, temb[self.time_index], after=True, drop=self.dropout)
        return joined(self.conv2, h, self.conv_shortcut, x)


class FusedAttention(AnyAttention):
    """The same attention. One product gives queries, keys and values, and positions stay in rows.

    Zeros pad a pruned head's 204 features to 208; they add nothing to any product.
    """

    def forward(self, x: Tensor, temb: Any = None) -> Tensor:
        rows = self.group_norm(x).movedim(1, -1).flatten(1, 2)
        qkv = side_by_side([self.to_q, self.to_k, self.to_v], rows, parts=self.heads)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        scale = (self.to_q.out_features // self.heads) ** -0.5
        h = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
        h = F.linear(h, aligned(self.to_out[0].weight, 1, self.heads)).unflatten(1, x.shape[2:]).movedim(-1, 1)
        return plus(h, self.to_out[0].bias.to(h.dtype), x)  # rounded, as autocast has it


class Doubling(AnyUpsample):
    """The same upsampling, by copies that keep channels last."""

    def forward(self, x: Tensor, output_size: int | None = None) -> Tensor:
        return self.conv(doubled(x)) if output_size is None else super().forward(x, output_size)


def adapt(net: Any, kernels: Collection[str]) -> None:
    """Replace the modules for which one of the available kernels is faster."""
    for module in net.modules():
        if type(module) is Upsample2D:
            module.__class__ = Doubling
    if "norm" not in kernels:
        return
    net.conv_norm_out.__class__, net.conv_act.__class__ = FusedGroupNormSiLU, nn.Identity
    for module in net.modules():
        if type(module) is Attention and module.group_norm is not None:  # the middle has none where time embeddings scale
            module.__class__ = FusedAttention
    if net.config.resnet_time_scale_shift == "default":
        net.__class__ = FusedNetwork
        for index, block in enumerate(net.blocks()):
            block.__class__, block.time_index = FusedResnetBlock, index
