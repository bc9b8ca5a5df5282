"""Errors that end in one sentence: the place, the value, the remedy."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path


class EffuseError(Exception):
    """Anything effuse refuses or cannot do; the command line prints it without a traceback."""


class RecipeError(EffuseError):
    """A recipe, a key or a value that does not fit the closed grammar or the declared types."""


class DataError(EffuseError):
    """Data that is missing, unreadable or inconsistent."""


class MissingError(DataError):
    """Files that are not there, so that only a rehearsal without them can go on."""


class PartitionError(EffuseError):
    """A split of the data that its bounds do not allow."""


class ModelError(EffuseError):
    """Parameters that do not fit the network they are meant for."""


class WireError(EffuseError):
    """A message that is malformed, of an unknown type, or carries what may not travel."""


class FederationError(EffuseError):
    """A rule of the protocol between server and clients that was broken."""


class QuorumError(FederationError):
    """Too few clients answered in time."""


class TrainingError(EffuseError):
    """Training that produced a non-finite number."""


class RunError(EffuseError):
    """A run folder that cannot be written, read or resumed."""


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix a federation error raised within with its place."""
    try:
        yield
    except FederationError as error:
        raise FederationError(f"{where}: {error}") from None


def alike(word: str, known: Iterable[str]) -> str:
    """The question after the closest of some names; nothing when none is close."""
    close = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.5)
    return "did you mean " + " or ".join(close) + "?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """A tail for 'unknown name' errors: the closest valid names, or all of them when none is close."""
    known = sorted(known)
    return alike(word, known) or "valid: " + ", ".join(known)


def misspelt(*paths: Path) -> str:
    """The question after names like the first part of a path that is not there; nothing when none is close."""
    known: set[str] = set()
    for path in paths:
        while not path.parent.exists():
            path = path.parent
        with contextlib.suppress(OSError):  # a folder that may not be looked into
            known |= {p.name for p in path.parent.iterdir()}
    return alike(path.name, known)
