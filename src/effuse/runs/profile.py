"""`--profile`: a trace in the run folder, and where the time went."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from effuse.core.files import write_atomically
from effuse.core.spans import Profile, profiling


@contextlib.contextmanager
def profiled(folder: Path, wanted: bool) -> Iterator[Profile | None]:
    """Measure what runs within; however it ends, its trace is left in the run folder."""
    if not wanted:
        yield None
        return
    try:
        with profiling() as profile:
            yield profile
    finally:
        if folder.is_dir():
            write_atomically(folder / "trace.json", json.dumps(profile.trace(), separators=(",", ":")).encode())
