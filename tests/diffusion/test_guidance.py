"""The arithmetic of classifier-free guidance."""

import pytest
import torch
from torch import Tensor

from effuse.diffusion.guidance import guided
from effuse.tasks.denoise import NULL


def test_guidance_by_hand() -> None:
    """cond 3, uncond 1, w = 0.5: 1.5 x 3 - 0.5 x 1 = 4."""

    def net(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return torch.where(labels == NULL, 1.0, 3.0)[:, None, None, None].expand_as(x)

    x, t = torch.zeros(2, 1, 1, 1), torch.tensor([4, 4])
    assert guided(net, torch.tensor([0, 7]), 0.5)(x, t).flatten().tolist() == pytest.approx([4.0, 4.0])
    assert guided(net, torch.tensor([0, 7]), 0.0)(x, t).flatten().tolist() == [3.0, 3.0]


def test_one_evaluation_of_twice_the_batch() -> None:
    seen: list[tuple[int, list[int], list[int]]] = []

    def net(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        seen.append((len(x), t.tolist(), labels.tolist()))
        return x

    guided(net, torch.tensor([2, 5]), 1.0)(torch.zeros(2, 1, 1, 1), torch.tensor([8, 9]))
    assert seen == [(4, [8, 9, 8, 9], [2, 5, -1, -1])]


def test_guidance_of_epsilon_is_guidance_of_x0() -> None:
    """x0 = (x_t - s epsilon) / a is affine in epsilon, and the weights 1 + w and -w sum to one."""
    a, s, w = 0.8, 0.6, 2.5
    x, cond, uncond = torch.randn(3, 5, dtype=torch.float64)

    def clean(epsilon: Tensor) -> Tensor:
        return (x - s * epsilon) / a

    guided_epsilon = (1 + w) * cond - w * uncond
    torch.testing.assert_close(clean(guided_epsilon), (1 + w) * clean(cond) - w * clean(uncond))
