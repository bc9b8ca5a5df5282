"""Warm starts: a run that begins from a saved model."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import nn

from effuse.core.build import with_values
from effuse.core.data import Shape
from effuse.core.errors import ModelError
from effuse.core.model import Arch, Model, Net, fill
from effuse.core.rng import Stream
from effuse.core.spec import spec
from effuse.models.saved import filled, read_arch


@spec
class FromPretrained(Arch):
    """The model in a run's `model/` folder, or one that diffusers saved; only safetensors are read.

    The recipe keeps the path. Messages carry the concrete architecture, because a path is valid on one machine only.
    """

    travels: ClassVar[bool] = False

    folder: str
    sha256: str | None = (
        None  # of the parameters; set when the recipe is resolved, so that a repeated run starts from the same values
    )

    def resolved(self, shape: Shape) -> Arch:
        """The same with the folder's shape checked against the data, and its weights pinned."""
        full = super().resolved(shape)
        assert isinstance(full, FromPretrained)
        arch = full.concrete
        if (arch.side, arch.channels, arch.classes) != (full.side, full.channels, full.classes):
            raise ModelError(
                f"the model in '{self.folder}' is made for {_words(arch)}, the data has {_words(full)}; "
                "add transforms to the data or start from another model"
            )
        digest = filled(arch, Path(self.folder)).params.digest()
        if self.sha256 not in (None, digest):
            raise ModelError(
                f"the weights in '{self.folder}' are not those of the recipe: their SHA-256 is {digest}, not {self.sha256}; "
                "bring the folder back or drop sha256 from the recipe"
            )
        return with_values(full, "model", sha256=digest)

    @functools.cached_property
    def concrete(self) -> Arch:
        """The architecture in the folder, as messages carry it."""
        return read_arch(Path(self.folder), self.classes)

    @property
    def portable(self) -> Arch:
        return self.concrete

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        return self.concrete.parts

    @property
    def conditional(self) -> bool:
        return self.concrete.conditional

    def build(self) -> nn.Module:
        net = self.concrete.build()
        fill(Net(net, arch=self.concrete), filled(self.concrete, Path(self.folder)))
        return net

    def initial(self, stream: Stream) -> Model:
        """The saved model, with its concrete architecture; the stream is not used."""
        return filled(self.concrete, Path(self.folder))


def _words(arch: Arch) -> str:
    return f"{arch.side}x{arch.side}x{arch.channels} images of {arch.classes} classes"
