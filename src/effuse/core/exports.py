"""Stable import paths: `from effuse.data import Folder`, wherever in the package the class is."""

import importlib
import pkgutil
from typing import Any


def exported(package: str, name: str) -> Any:
    """The class of that name in a package's modules, which are imported until one defines it."""
    if name[:1].isupper():  # a submodule, whose name is in small letters, is looked for by Python itself
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            found = getattr(importlib.import_module(module.name), name, None)
            if getattr(found, "__module__", None) == module.name:
                return found
    raise AttributeError(f"module '{package}' has no attribute '{name}'")
