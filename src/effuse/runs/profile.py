"""`--profile`: measure where the time goes, and write a trace to the run folder."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from effuse.core.files import write_atomically
from effuse.core.spans import Profile, profiling


@contextlib.contextmanager
def profiled(folder: Path, wanted: bool) -> Iterator[Profile | None]:
    """Profile the block and write its trace to the run folder, even after an error."""
    if not wanted:
        yield None
        return
    try:
        with profiling() as profile:
            yield profile
    finally:
        if folder.is_dir():
            write_atomically(folder / "trace.json", json.dumps(profile.trace(), separators=(",", ":")).encode())
