"""Published networks that every machine keeps a copy of: never sent, never downloaded, pinned by SHA-256."""

import functools
import hashlib
import os
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from effuse.core.build import with_values
from effuse.core.data import Shape
from effuse.core.errors import MissingError, ModelError
from effuse.core.files import reading
from effuse.core.model import Arch, Model
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream
from effuse.core.spec import spec

ROOT = "EFFUSE_MODELS"  # the environment variable that names a site's folder of published networks


@spec
class LocalCopy(Arch):
    """A frozen network in a folder of each machine. A site looks for the folder's last name in EFFUSE_MODELS."""

    files: ClassVar[tuple[str, ...]] = ()  # what is read, and therefore pinned
    optional: ClassVar[tuple[str, ...]] = ()

    folder: str
    sha256: str | None = None  # of the files that are read; set when the recipe is resolved

    if not TYPE_CHECKING:

        @property
        def travels(self) -> bool:
            """Whether it may come from another machine: as a plain name of pinned content, never as a path."""
            return self.named and self.sha256 is not None

    @property
    def named(self) -> bool:
        return Path(self.folder).name == self.folder and self.folder not in ("", ".", "..")

    @property
    def portable(self) -> Arch:
        return with_values(self, "model", folder=Path(self.folder).resolve().name)

    @property
    def path(self) -> Path:
        """The folder on this machine."""
        root = os.environ.get(ROOT)
        if self.named and root:
            return Path(root) / self.folder
        return Path(self.folder)

    def resolved(self, shape: Shape) -> Arch:
        """The same for data of that shape, with its files pinned."""
        full = super().resolved(shape)
        assert isinstance(full, LocalCopy)
        return with_values(full, "model", sha256=full.verified())

    def verified(self) -> str:
        """The SHA-256 of the files, which must be the pinned one."""
        places = [self.path / name for name in self.files]
        for place in places:
            if not place.is_file():
                raise MissingError(
                    f"{self.name}: there is no {place}; bring a complete folder there, or put it "
                    f"under its name '{Path(self.folder).name}' into the folder that {ROOT} names"
                )
        places += [place for name in self.optional if (place := self.path / name).is_file()]
        found = digest(tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in places), len(str(self.path)))
        if self.sha256 not in (None, found):
            raise ModelError(
                f"the files in '{self.path}' are not those of the recipe: their SHA-256 is {found}, not {self.sha256}; "
                "bring the right copy or drop sha256 from the recipe"
            )
        return found

    def constant(self, name: str) -> bool:
        """Every value: none is trained, sent or saved."""
        return True

    def initial(self, stream: Stream) -> Model:
        return self.empty

    @property
    def empty(self) -> Model:
        """The model, whose values are in the folder."""
        return Model(self, Params({}), Buffers({}))

    def build(self) -> nn.Module:
        """The network with the folder's values; with shapes only under `torch.device("meta")`."""
        where = torch.get_default_device()
        if where.type == "meta":
            return self.shaped().eval()
        self.verified()
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            net = self.loaded()
        return net.requires_grad_(False).eval().to(where)

    @abstractmethod
    def shaped(self) -> nn.Module:
        """The network from its configuration."""

    @abstractmethod
    def loaded(self) -> nn.Module:
        """The network with its values, from safetensors only."""

    def save(self, net: nn.Module, folder: Path, scheduler: Any) -> None:
        raise ModelError(f"{self.name} is a copy of a published network; it is not saved again")


def here(arch: Arch) -> Arch:
    """A network's architecture on this machine: that in a saved folder, or the copy with its path."""
    return arch if isinstance(arch, LocalCopy) else arch.portable


@functools.lru_cache(maxsize=16)
def digest(files: tuple[tuple[str, int, int], ...], root: int) -> str:
    """One SHA-256 of these files and their names, read once for each state of them."""
    h = hashlib.sha256()
    for name, size, _ in files:
        h.update(f"{name[root:]} {size}\n".encode())
        with reading(Path(name)), open(name, "rb") as file:
            while block := file.read(2**20):
                h.update(block)
    return h.hexdigest()


def transformers_of(name: str) -> Any:
    """The transformers library, which an extra brings."""
    try:
        import transformers
    except ImportError:
        raise MissingError(f"{name}: transformers is not installed; pip install 'effuse[sd]'") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers
