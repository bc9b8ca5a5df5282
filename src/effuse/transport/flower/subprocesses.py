"""Child processes that end with this process; no other process is touched."""

import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GRACE = 15.0  # seconds between SIGTERM and SIGKILL
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Make a child die with its parent, also when that is killed; in a session of its own Ctrl-C does not reach it first."""
    os.setsid()
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(command: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            preexec_fn=_die_with_parent,
        )


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and their children: by SIGTERM, and after a while by SIGKILL."""
    _signal(processes, signal.SIGTERM)
    until = time.monotonic() + GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    _signal(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal(processes: Sequence[subprocess.Popen[bytes]], what: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, what)


def free_port() -> int:
    """A port of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_in_use(host: str, port: int) -> bool:
    """Whether a process listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def last_lines(log: Path, lines: int = 3) -> str:
    """The end of a process's log, for an error message."""
    if not log.exists():
        return "it printed nothing"
    printed = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(printed[-lines:])[-600:] or "it printed nothing"
