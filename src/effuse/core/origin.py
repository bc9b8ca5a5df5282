"""The origin of an unexpected error: the files of algorithms, networks and recipes in its traceback."""

import os
import traceback

from effuse.core.registry import SPEC_PACKAGES
from effuse.core.spec import Spec

ROOMS = {*SPEC_PACKAGES, "recipes"} - {"core"}  # packages in which users may have put their own files


def culprit(error: BaseException) -> str:
    """The lines of an error's traceback that are in user files, or else in packages of specs; empty where there are none."""
    if known := getattr(error, "culprit", ""):  # set in the process that raised it
        return str(known)
    in_effuse, outside = {}, {}
    for frame, line in traceback.walk_tb(error.__traceback__):
        package, _, module = str(frame.f_globals.get("__name__")).partition(".")
        if package == "effuse" and module.split(".")[0] in ROOMS and "." in module:
            in_effuse[frame.f_code.co_filename] = line
        elif package != "effuse" and _defines_a_spec(frame.f_globals):
            outside[frame.f_code.co_filename] = line
    if isinstance(error, SyntaxError) and error.filename:  # the traceback does not contain the file
        in_effuse[error.filename] = error.lineno or 1
    if outside:
        return f"in {_listed(outside)}, which is not part of effuse"
    return f"in {_listed(in_effuse)}; unless that is a file of your own, please report it" if in_effuse else ""


def _defines_a_spec(names: dict[str, object]) -> bool:
    own = names.get("__name__")
    return any(isinstance(v, type) and issubclass(v, Spec) and v.__module__ == own for v in names.values())


def _listed(lines: dict[str, int]) -> str:
    return ", ".join(f"{_short(file)}:{line}" for file, line in lines.items())


def _short(file: str) -> str:
    try:
        return min(os.path.relpath(file), file, key=len)
    except (OSError, ValueError):  # the working directory is gone, or on another drive
        return file
