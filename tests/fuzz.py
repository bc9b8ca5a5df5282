"""Foreign bytes: seeded mutations of valid inputs, read in a forked process with bounds on memory and on time.

A reader may accept an input or refuse it by an error of the project. Anything else is a finding.
"""

import contextlib
import mmap
import os
import random
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from effuse.core.errors import EffuseError

MEMORY = 1 << 30  # bytes that reading one input may take beyond what the process has
HANG = 30.0  # seconds of processor time for one input
FINDINGS = 5  # after which a reader is given up
BYTES = (
    b"",
    b"\x00",
    b"\xff",
    b"\x00" * 8,
    b"\xff" * 8,
    b"\x7f\xff\xff\xff",
    b"\x01" + b"\x00" * 7,
    b"\r\n",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
)
NUMBERS = [
    "0",
    "-1",
    "1",
    "0.5",
    "-0.0",
    "1e308",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "9" * 20,
    "1_0",
    "0x7f",
    "1j",
    "1.0.0",
]
JSON = ["null", "true", "false", "[]", "{}", "[[]]", '{"":0}', '""', '"x"', '"\\ud800"', '"\\u0000"', ":", ",", '"']
CODE = [
    "None",
    "()",
    "f(x=1)",
    "f(x=1,x=2)",
    "f(*x)",
    "f(**x)",
    "[0]*9",
    "[0]*999999999",
    "lambda:0",
    "x.y",
    "b''",
    "...",
    "@",
]
WORDS = [*NUMBERS, *JSON, *CODE, "\u00b2", "\u0663", "\u202e", "#", "=", "../x", "/etc/passwd"]
DEEP = ("[" * 3000, '{"a":' * 3000, "(" * 300, "-" * 3000, "f(" * 150, "9" * 5000, "x" * 5000, "a." * 2000, "a=" * 500)


class Reader(NamedTuple):
    """Valid inputs, and what reads an input; it is told which valid one the input came from."""

    valid: list[bytes]
    read: Callable[[bytes, int], object]
    made: Callable[[random.Random, int], bytes] | None = None  # makes an input by the reader's own grammar


class Hung(BaseException):
    """Reading took too long."""


def mutated(blob: bytes, other: bytes, draw: random.Random) -> bytes:
    """A few random changes, each of them at a random place."""
    made = bytearray(blob)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(made) + 1)
        to = min(len(made), at + draw.choice((0, 1, 1, 2, 4, 8, 32, 4096)))
        kind = draw.randrange(9)
        if kind == 0 and made:
            made[at % len(made)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            made[at:to] = draw.choice(BYTES)
        elif kind == 2:
            made[at:to] = draw.choice(WORDS).encode()
        elif kind == 3:
            made[at:] = b""
        elif kind == 4:
            made[at:to] = draw.randbytes(to - at)
        elif kind == 5:
            made[at:at] = made[at:to] * draw.choice((1, 2, 50))
        elif kind == 6:
            start = draw.randrange(len(other) + 1)
            made[at:to] = other[start : start + draw.choice((4, 64, 1 << 20))]
        elif kind == 7 and (runs := number_at(made, at)):
            made[runs[0] : runs[1]] = draw.choice(NUMBERS).encode()
        elif draw.random() < 0.05:
            made[at:to] = draw.choice(DEEP).encode()
    return bytes(made)


def number_at(blob: bytearray, at: int) -> tuple[int, int] | None:
    """The run of digits that begins at or after a place."""
    while at < len(blob) and not 48 <= blob[at] <= 57:
        at += 1
    end = at
    while end < len(blob) and 48 <= blob[end] <= 57:
        end += 1
    return (at, end) if end > at else None


def made(reader: Reader, name: str, seed: int, number: int) -> tuple[bytes, int]:
    """One input, and the valid one that it came from."""
    draw = random.Random(f"{seed} {name} {number}")
    base = draw.randrange(len(reader.valid))
    if reader.made is not None and draw.random() < 0.5:
        return reader.made(draw, base), base
    return mutated(reader.valid[base], draw.choice(reader.valid), draw), base


def fuzzed(make: Callable[[Path], Reader], name: str, n: int, seed: int, first: int = 0) -> None:
    """Read `n` inputs in a process of its own; an error lists what came out that should not have."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        _fuzzed(make(Path(folder)), name, n, seed, first, Path(folder) / "findings")


def _fuzzed(reader: Reader, name: str, n: int, seed: int, first: int, log: Path) -> None:
    for base, blob in enumerate(reader.valid):
        reader.read(blob, base)  # each valid input is accepted
    at = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        os._exit(_read_all(reader, name, range(first, first + n), seed, log, at))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    number = int.from_bytes(at[:], "little")
    how = f"input {number} ended the process with {code}; " if code not in (0, 1) else ""
    found = log.read_text() if log.exists() else ""
    assert code == 0, f"{name}, seed {seed}: {how}{found}"
    assert number == first + n - 1


def _read_all(reader: Reader, name: str, numbers: range, seed: int, log: Path, at: mmap.mmap) -> int:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGVTALRM, _hang)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # decoders print warnings
    findings: dict[str, str] = {}
    for number in numbers:
        at[:] = number.to_bytes(8, "little")
        blob, base = made(reader, name, seed, number)
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG)
        signal.setitimer(signal.ITIMER_PROF, 2 * HANG)  # ends the process where Python cannot
        try:
            with contextlib.suppress(EffuseError):
                reader.read(blob, base)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next((f"{f.filename}:{f.lineno}" for f in reversed(frames) if "effuse" in f.filename), "?")
            words = "".join(traceback.format_exception(error, limit=-4))
            findings.setdefault(f"{type(error).__name__} {place}", f"input {number}: {blob[:200]!r}\n{words}")
            if len(findings) >= FINDINGS:
                break
    if findings:
        log.write_text("\n".join(findings.values()))
    return 1 if findings else 0


def _hang(*signalled: object) -> None:
    raise Hung
