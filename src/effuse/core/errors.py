"""Errors, each a sentence that names the place, the value and the remedy."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path


class EffuseError(Exception):
    """Base of all errors that effuse raises on purpose; the command line prints them without a traceback."""


class RecipeError(EffuseError):
    """A recipe, a key or a value that does not fit the closed grammar or the declared types."""


class DataError(EffuseError):
    """Data that is missing, unreadable or inconsistent."""


class MissingError(DataError):
    """Missing data files; a rehearsal can continue without them."""


class PartitionError(EffuseError):
    """A split of the data that its bounds do not allow."""


class ModelError(EffuseError):
    """Parameters that do not fit their network."""


class WireError(EffuseError):
    """A message that is malformed, of an unknown type, or holds a value that may not be sent."""


class FederationError(EffuseError):
    """A violated rule of the protocol between server and clients."""


class QuorumError(FederationError):
    """Too few clients answered in time."""


class TrainingError(EffuseError):
    """Training that produced a non-finite number."""


class AuditError(EffuseError):
    """An audit whose result contradicts what was promised."""


class RunError(EffuseError):
    """A run folder that cannot be written, read or resumed."""


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix a federation error raised within with its place."""
    try:
        yield
    except FederationError as error:
        raise FederationError(f"{where}: {error}") from None


def shown(words: str, limit: int | None = None) -> str:
    """Text of any origin as one line that a terminal shows as it is, with control characters as escapes.

    Names of files and classes, and what sites and servers send, could otherwise move the cursor or hide what is there.
    """
    line = "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in words)
    return line if limit is None or len(line) <= limit else f"{line[: limit - 3]}..."


def alike(word: str, known: Iterable[str]) -> str:
    """A question that suggests the closest of the known names; empty when none is close."""
    close = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.5)
    return "did you mean " + " or ".join(close) + "?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an 'unknown name' error: the closest valid names, or all of them when none is close."""
    known = sorted(known)
    return alike(word, known) or "valid: " + ", ".join(known)


def misspelt(*paths: Path) -> str:
    """A question that suggests existing names for the first missing part of a path; empty when none is close."""
    known: set[str] = set()
    for path in paths:
        while not path.parent.exists():
            path = path.parent
        with contextlib.suppress(OSError):  # a folder that may not be read
            known |= {p.name for p in path.parent.iterdir()}
    return alike(path.name, known)
