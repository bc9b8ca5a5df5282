"""Where an error that nobody foresaw came from: the files in which an algorithm, a network or a recipe is written."""

import os
import traceback

from effuse.core.registry import SPEC_PACKAGES
from effuse.core.spec import Spec

ROOMS = {*SPEC_PACKAGES, "recipes"} - {"core"}  # files of a user's own may lie among ours


def culprit(error: BaseException) -> str:
    """The lines that an error passed through, of the user's own files where they can be told; nothing where it is ours."""
    if found := getattr(error, "culprit", ""):  # another process has looked
        return str(found)
    ours, theirs = {}, {}
    for frame, line in traceback.walk_tb(error.__traceback__):
        package, _, module = str(frame.f_globals.get("__name__")).partition(".")
        if package == "effuse" and module.split(".")[0] in ROOMS and "." in module:
            ours[frame.f_code.co_filename] = line
        elif package != "effuse" and _defines_a_spec(frame.f_globals):
            theirs[frame.f_code.co_filename] = line
    if isinstance(error, SyntaxError) and error.filename:  # the file was never entered
        ours[error.filename] = error.lineno or 1
    if theirs:
        return f"in {_written(theirs)}, which is not part of effuse"
    return f"in {_written(ours)}; unless that is a file of your own, please report it" if ours else ""


def _defines_a_spec(names: dict[str, object]) -> bool:
    own = names.get("__name__")
    return any(isinstance(v, type) and issubclass(v, Spec) and v.__module__ == own for v in names.values())


def _written(lines: dict[str, int]) -> str:
    return ", ".join(f"{_short(file)}:{line}" for file, line in lines.items())


def _short(file: str) -> str:
    try:
        return min(os.path.relpath(file), file, key=len)
    except (OSError, ValueError):  # the working directory is gone, or on another drive
        return file
