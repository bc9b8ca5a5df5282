"""A network as a value: its architecture is a spec, its parameters are named tensors."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from effuse.core.build import with_values
from effuse.core.data import Shape
from effuse.core.errors import ModelError
from effuse.core.message import message
from effuse.core.params import Buffers, Params, named_values
from effuse.core.rng import Stream, keyed
from effuse.core.spec import Spec, spec


@spec
class Arch(Spec, ABC):
    """An architecture; `side`, `channels` and `classes` are filled in from the data when left open."""

    if TYPE_CHECKING:  # a subclass may make them class variables, keys or properties

        @property
        def parts(self) -> Mapping[str, tuple[str, ...]]: ...
        @property
        def conditional(self) -> bool: ...
    else:
        # part -> prefixes of parameter names; each parameter must match exactly one part
        parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
        conditional: ClassVar[bool] = False  # whether the network has class embeddings

    # parameters (names or prefixes) that `build` sets and training leaves alone; a Model does not hold them
    frozen: ClassVar[tuple[str, ...]] = ()
    uncut: ClassVar[tuple[str, ...]] = ()  # layers (ends of names) whose outputs are not pruned
    featured: ClassVar[bool] = False  # its network takes `give=` and can return its features, a vector per image
    staged: ClassVar[bool] = False  # give="stages": the maps of its middle and of the decoder; it takes a `condition=`
    levelled: ClassVar[bool] = False  # give="levels": a classifier's output, features, and a pooled vector of each level
    travels: ClassVar[bool] = True  # False for an architecture that reads a local path: it may not be sent

    side: Annotated[int | None, Field(ge=0, le=1 << 14)] = None
    channels: Annotated[int | None, Field(ge=0, le=1 << 12)] = None
    classes: Annotated[int | None, Field(ge=0, le=1 << 20)] = None

    def resolved(self, shape: Shape) -> "Arch":
        """This architecture for data of that shape; values that the recipe set do not change."""
        given = {"side": self.side, "channels": self.channels, "classes": self.classes}
        from_data = {"side": shape.side, "channels": shape.channels, "classes": shape.classes}
        return with_values(self, "model", **{k: from_data[k] if v is None else v for k, v in given.items()})

    @property
    def portable(self) -> "Arch":
        """This architecture without paths of this machine, as it is sent."""
        return self

    @property
    def shape(self) -> Shape:
        if self.side is None or self.channels is None or self.classes is None:
            raise ModelError(f"{self} is not resolved: its side, channels or classes are still open")
        return Shape(self.side, self.channels, self.classes)

    @abstractmethod
    def build(self) -> nn.Module:
        """The network, with new parameters from torch's default generator."""

    def hollow_net(self) -> nn.Module:
        """The network on the meta device, to be counted or traced."""
        with torch.device("meta"):
            return self.build().eval()

    def example(self) -> tuple[Tensor | None, ...]:
        """Example inputs of the network: one image and, for a U-Net, a time step and perhaps a label."""
        side, channels, _ = self.shape
        with torch.device("meta"):
            x, one = torch.zeros(1, channels, side, side), torch.zeros(1, dtype=torch.int64)
        return (x, one, one if self.conditional else None) if self.parts else (x,)

    def initial(self, stream: Stream) -> "Model":
        """The model that a run starts from."""
        with keyed(stream):
            net = Net(self.build(), arch=self)
        return Model(self, Params.of(net), Buffers.of(net))

    def constant(self, name: str) -> bool:
        """Whether a parameter is one of the frozen ones."""
        return any(_under(name, p) for p in self.frozen)

    def whole(self) -> "Arch":
        """This architecture before pruning."""
        return with_values(self, "model", cut="") if getattr(self, "cut", "") else self

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        """Write the network in the folder format of its library; overridden where there is one."""
        raise ModelError(f"{self.name} has no folder format of its own")

    def part_of(self, name: str) -> str:
        """The part that a parameter belongs to."""
        matches = [part for part, prefixes in self.parts.items() if any(_under(name, p) for p in prefixes)]
        if len(matches) != 1:
            raise ModelError(f"{self.name}: parameter '{name}' belongs to {matches or 'no part'}; it must be exactly one")
        return matches[0]


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@message(name="model")
class Model:
    """An architecture with its parameters and buffers."""

    arch: Arch
    params: Params
    buffers: Buffers

    def holding(self, params: Params) -> "Model":
        """This model with some or all parameters replaced."""
        return dataclasses.replace(self, params=self.params.holding(params))

    def part(self, *names: str) -> Params:
        """The parameters of the named parts."""
        unknown = [n for n in names if n not in self.arch.parts]
        if unknown:
            raise ModelError(f"{self.arch.name} has no part '{unknown[0]}'; it has {', '.join(self.arch.parts) or 'none'}")
        return self.params.select(lambda k: self.arch.part_of(k) in names)

    def lerp(self, other: "Model", weight: float) -> "Model":
        if self.arch != other.arch:
            raise ModelError("two models of different architectures cannot be averaged")
        return Model(self.arch, self.params.lerp(other.params, weight), self.buffers.lerp(other.buffers, weight))

    def to(self, device: torch.device | str) -> "Model":
        return Model(self.arch, self.params.to(device), self.buffers.to(device))


class Net:
    """A network lent by a machine: call it, read its parameters, or run it with other weights."""

    def __init__(self, module: nn.Module, run: Callable[..., Tensor] | None = None, arch: Arch | None = None) -> None:
        self.module, self._arch = module, arch
        held = ({k: v for k, v in values.items() if arch is None or not arch.constant(k)} for values in named_values(module))
        self.params, self.buffers = held  # without frozen parameters, as in a Model
        self.run = module if run is None else run  # may be compiled

    @property
    def arch(self) -> Arch:
        if self._arch is None:
            raise ModelError("this network was made without an architecture")
        return self._arch

    def __call__(self, *inputs: Tensor | None, params: Mapping[str, Tensor] | None = None, **options: Any) -> Any:
        if params is None:
            return self.run(*inputs, **options)
        return torch.func.functional_call(self.module, {**params, **self.scratch()}, inputs, options)

    def scratch(self) -> dict[str, Tensor]:
        """Copies of the buffers, for a call with other weights: BatchNorm updates its statistics while it runs."""
        return {k: b.clone() for k, b in self.module.named_buffers()}

    def train(self) -> "Net":
        if not self.module.training:
            self.module.train()
        return self

    def eval(self) -> "Net":
        self.module.eval()
        return self


class Functional(Net):
    """A network with other parameters, such as those that a gradient is taken of."""

    def __init__(self, net: Net, params: Mapping[str, Tensor]) -> None:
        self.module, self._arch, self.params, self.buffers = net.module, net._arch, dict(params), net.buffers

    def __call__(self, *inputs: Tensor | None, params: Mapping[str, Tensor] | None = None, **options: Any) -> Any:
        return torch.func.functional_call(self.module, dict(self.params if params is None else params), inputs, options)


@torch.no_grad()
def fill(net: nn.Module | Net, model: Model) -> None:
    """Copy a model's values into a network of its architecture."""
    for own, given in zip(named_values(net), (model.params, model.buffers)):
        targets: list[Tensor] = []
        for name, value in given.items():
            if name not in own or own[name].shape != value.shape:
                raise ModelError(f"'{name}' of shape {tuple(value.shape)} does not fit {model.arch.name}")
            targets.append(own[name])
        if targets:
            torch._foreach_copy_(targets, given.tensors)
        # every value must be replaced: a reused network still holds those of the last job
        missing = next((k for k in own if k not in given), None)
        if missing is not None:
            raise ModelError(f"{model.arch.name} got no value for '{missing}'")


def draws_inside(net: nn.Module) -> bool:
    """Whether a step draws from torch's default generator, which a process has only once."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in net.modules())
