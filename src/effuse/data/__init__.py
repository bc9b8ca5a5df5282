"""The sources, partitions and transforms; each class can be imported from here."""

from typing import Any

from effuse.core.exports import exported


def __getattr__(name: str) -> Any:
    return exported(__name__, name)
