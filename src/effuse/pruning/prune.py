"""Structured pruning: Model -> smaller Model, every group of channels cut by the same ratio (Fang et al., 2023)."""

import functools
from typing import Literal

import torch
from torch import Tensor, nn

from effuse.core.build import with_values
from effuse.core.errors import ModelError
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream
from effuse.models.cut import Cuttable, cut_text, depthwise, widths_of
from effuse.pruning.groups import OUT, Group, groups_of

Criterion = Literal["norm", "random"]


def prune(model: Model, ratio: float, criterion: Criterion, stream: Stream) -> Model:
    """Remove the given share of channels from every group: those of the smallest norm, or random ones."""
    arch = cut(model.arch, ratio)
    if model.params.hollow:
        hollow = Net(arch.hollow_net(), arch=arch)
        return Model(arch, Params.of(hollow), Buffers.of(hollow))
    net, params = model.arch.hollow_net(), dict(model.params)
    for name, axis, indices in _remaining(model, net, ratio, criterion, stream):
        params[name] = params[name].index_select(axis, indices.to(params[name].device))
    return Model(arch, Params({k: t.contiguous() for k, t in params.items()}), model.buffers)


@functools.lru_cache(maxsize=8)
def cut(arch: Arch, ratio: float) -> Arch:
    """The architecture after pruning. It depends on the ratio alone, not on which channels are removed."""
    if not isinstance(arch, Cuttable):
        raise ModelError(f"{arch.name} cannot be pruned: it has no key that says how its layers were cut; use a U-Net")
    net = arch.hollow_net()
    widths = widths_of(net)
    for group in groups_of(arch):
        removed = group.channels - group.blocks * group.keeps(ratio)
        for slot in group.slots:
            times = len(slot.at) // group.channels  # a skip connection may give a layer the same channels twice
            width, less = widths[slot.layer], removed * times
            layer = net.get_submodule(slot.layer)
            both = isinstance(layer, nn.GroupNorm) or depthwise(layer)  # output channels are the input channels
            into = width.into - less if both or slot.side != OUT else width.into
            widths[slot.layer] = type(width)(into, width.out - less if both or slot.side == OUT else width.out)
    return with_values(arch, "model", cut=cut_text(widths, widths_of(with_values(arch, "model", cut="").hollow_net())))


@functools.lru_cache(maxsize=2)  # the same for every client
def group_weights(arch: Arch, strength: float) -> Params:
    """FedPhD's lambda_g = lambda_0 / Q(g) (Eq. 17) for every parameter, summed over its groups, in a shape that broadcasts.

    Q is the mean distance of the group's layers from the middle layer, at least 1. Layers count from encoder to decoder.
    """
    net = arch.hollow_net()
    parts = list(arch.parts) or [""]
    part = {name: parts.index(arch.part_of(name)) if arch.parts else 0 for name in widths_of(net)}
    depth = {name: i for i, name in enumerate(sorted(part, key=part.__getitem__))}  # stable: modules stay in order
    middle = (len(depth) - 1) / 2
    weights = {k: torch.zeros(_thin(p)) for k, p in net.named_parameters()}
    for group in groups_of(arch):
        distance = sum(abs(depth[name] - middle) for name in group.layers) / len(group.layers)
        lambda_g = strength / max(1.0, distance)
        for slot in group.slots:
            for name, axis in slot.axes(net.get_submodule(slot.layer)).items():
                shape = [1] * weights[name].dim()
                shape[axis] = -1
                along = torch.zeros(weights[name].shape[axis])
                along[slot.at] = lambda_g
                weights[name] += along.view(shape)
    return Params(weights)


def importance(group: Group, net: nn.Module, params: Params) -> Tensor:
    """The squared norm of all values that belong to each channel of a group."""
    total = torch.zeros(group.channels, dtype=torch.float64)
    for slot in group.slots:
        for name, axis in slot.axes(net.get_submodule(slot.layer)).items():
            squares = params[name].double().square().movedim(axis, 0)
            each = squares.reshape(len(squares), -1).sum(1).cpu()
            total.index_add_(0, slot.channel, each[slot.at])
    return total


def _remaining(
    model: Model, net: nn.Module, ratio: float, criterion: Criterion, stream: Stream
) -> list[tuple[str, int, Tensor]]:
    """(parameter, axis, indices that stay) for every parameter that is cut."""
    masks: dict[tuple[str, int], Tensor] = {}
    for group in groups_of(model.arch):
        if criterion == "norm":
            scores = importance(group, net, model.params)
        else:
            scores = torch.rand(group.channels, generator=stream.child(group.name).torch(), dtype=torch.float64)
        best = scores.view(group.blocks, -1).topk(group.keeps(ratio), dim=1).indices
        blocks = torch.zeros(group.blocks, group.channels // group.blocks, dtype=torch.bool)
        chosen = blocks.scatter_(1, best, True).flatten()
        for slot in group.slots:
            for name, axis in slot.axes(net.get_submodule(slot.layer)).items():
                length = net.get_parameter(name).shape[axis]
                mask = masks.setdefault((name, axis), torch.ones(length, dtype=torch.bool))
                mask[slot.at] = chosen[slot.channel]
    return [(name, axis, mask.nonzero().flatten()) for (name, axis), mask in masks.items() if not mask.all()]


def _thin(p: Tensor) -> tuple[int, ...]:
    return (*p.shape[:2], *[1] * (p.dim() - 2))
