"""One cast of all weights in a step, and one of their gradients, instead of a kernel for each tensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CAST = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)  # layers whose weights autocast rounds


class _Rounded(torch.autograd.Function):
    """Tensors in bf16, and their gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.like = weights
        ctx.set_materialize_grads(False)  # an unused weight has no gradient, rather than zeros
        rounded = [torch.empty_like(w, dtype=torch.bfloat16) for w in weights]
        torch._foreach_copy_(rounded, list(weights))
        ctx.mark_non_differentiable(*(r for r, trained in zip(rounded, ctx.needs_input_grad) if not trained))
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # in the weights' memory layout, or torch would copy the gradients once more
        full = [None if g is None else torch.empty_like(w) for w, g in zip(ctx.like, grads)]
        torch._foreach_copy_([f for f in full if f is not None], [g for g in grads if g is not None])
        return tuple(full)


class Bf16Weights:
    """Calls a network with rounded copies of its weights, as autocast would round each one separately."""

    def __init__(self, net: nn.Module, faster: Callable[[Any], Any]) -> None:
        self.net, self.weights = net, autocast_weights(net)
        self.run = faster(torch.func.functional_call)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        rounded = dict(zip(self.weights, _Rounded.apply(*self.weights.values())))
        return self.run(self.net, rounded, inputs, options)


def autocast_weights(net: nn.Module) -> dict[str, Tensor]:
    """The parameters that autocast rounds: weights of convolutions, weights and biases of linear layers."""
    found: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, CAST):
            found[f"{name}.weight"] = module.weight
            if isinstance(module, nn.Linear) and module.bias is not None:
                found[f"{name}.bias"] = module.bias
    return found


def to_bf16(net: nn.Module) -> None:
    """Round once what autocast would round in every evaluation; for a network that only draws samples."""
    for weight in autocast_weights(net).values():
        weight.data = weight.data.to(torch.bfloat16)
