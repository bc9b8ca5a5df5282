"""The registry of specs: effuse's packages are imported, and their specs looked up by name."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import typing
from typing import ClassVar, get_origin

from effuse.core.errors import RecipeError, nearest
from effuse.core.spec import Spec

# what others call it, and how it is written here
ELSEWHERE = {
    "dirichlet": "a Dirichlet split is label_skew(beta=0.5), or quantity_skew(beta=0.5) for the sizes alone",
    "noniid": "a Dirichlet split is label_skew(beta=0.5); `effuse list partition` shows the others",
    "ddpm": "sampling as in DDPM is ancestral()",
    "imagefolder": 'a folder of images is folder("PATH")',
}
SPEC_PACKAGES = ("core", "data", "tasks", "diffusion", "models", "privacy", "metrics", "algorithms")


def find(base: type[Spec], name: str, where: str) -> type[Spec]:
    """The subclass of `base` with this name; case and underscores do not matter."""
    known = registry(base)
    found = known.get(plain(name))
    if found is None:
        kind = "name" if base is Spec else base.name.replace("_", " ")
        remedy = ELSEWHERE.get(plain(name)) or nearest(name, (c.name for c in known.values()))
        raise RecipeError(f"{where}: no {kind} '{name}'; {remedy}")
    return found


def registry(base: type[Spec]) -> dict[str, type[Spec]]:
    """Every concrete spec below `base` by its name. Two specs of one name are an error."""
    import_packages(SPEC_PACKAGES)
    known: dict[str, type[Spec]] = {}
    queue = [base]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if not _concrete(cls):
            continue
        if "__dataclass_fields__" not in vars(cls) and (keys := _own_keys(cls)):
            place, ignored = f"{cls.__module__}: write @spec above class {cls.__qualname__}", ", ".join(keys)
            raise RecipeError(f"{place}; without it, its keys are ignored: {ignored}")
        other = known.setdefault(plain(cls.name), cls)
        if other is not cls and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RecipeError(f"two {base.__name__}s are called '{cls.name}': {other.__module__} and {cls.__module__}")
    return known


def _concrete(cls: type) -> bool:
    abstract = getattr(cls, "__abstractmethods__", None) or "__abstract__" in vars(cls)
    return dataclasses.is_dataclass(cls) and not abstract


def _own_keys(cls: type) -> list[str]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return [key for key in inspect.get_annotations(cls) if ClassVar not in (hints[key], get_origin(hints[key]))]


@functools.cache
def import_packages(packages: tuple[str, ...]) -> None:
    """Import every module of the named effuse packages, so that their specs and messages are registered."""
    for package in packages:
        root = importlib.import_module(f"effuse.{package}")
        for module in pkgutil.iter_modules(root.__path__, f"{root.__name__}."):
            importlib.import_module(module.name)


def plain(name: str) -> str:
    """A name in the form in which it is looked up."""
    return name.lower().replace("_", "")
