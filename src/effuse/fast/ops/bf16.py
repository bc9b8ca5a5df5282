"""One cast of all weights a step, and one of their gradients back, instead of one kernel for each of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CAST = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)  # whose weights autocast rounds


class _Rounded(torch.autograd.Function):
    """Tensors in bf16, and their gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.like = wholes
        ctx.set_materialize_grads(False)  # what a loss does not use has no gradient, rather than zeros
        halves = [torch.empty_like(w, dtype=torch.bfloat16) for w in wholes]
        torch._foreach_copy_(halves, list(wholes))
        ctx.mark_non_differentiable(*(h for h, learnt in zip(halves, ctx.needs_input_grad) if not learnt))  # frozen layers
        return tuple(halves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # as weights are laid out, or torch would copy them once more
        wholes = [None if g is None else torch.empty_like(w) for w, g in zip(ctx.like, grads)]
        torch._foreach_copy_([w for w in wholes if w is not None], [g for g in grads if g is not None])
        return tuple(wholes)


class Bf16Weights:
    """A network that is called with rounded copies of its weights, as autocast would round each of them by itself."""

    def __init__(self, net: nn.Module, faster: Callable[[Any], Any]) -> None:
        self.net, self.wholes = net, autocast_weights(net)
        self.run = faster(torch.func.functional_call)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        halves = dict(zip(self.wholes, _Rounded.apply(*self.wholes.values())))
        return self.run(self.net, halves, inputs, options)


def autocast_weights(net: nn.Module) -> dict[str, Tensor]:
    """The parameters that autocast rounds: weights of convolutions, all of linear layers."""
    found: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, CAST):
            found[f"{name}.weight"] = module.weight
            if isinstance(module, nn.Linear) and module.bias is not None:
                found[f"{name}.bias"] = module.bias
    return found


def to_bf16(net: nn.Module) -> None:
    """Keep rounded what autocast would round in every evaluation: for a network that only draws."""
    for weight in autocast_weights(net).values():
        weight.data = weight.data.to(torch.bfloat16)
