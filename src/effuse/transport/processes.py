"""Worker processes of one machine, one for each GPU: messages cross in the wire format, results are those of one process.

The server's program, its workbench and the evaluation stay in this process. A worker gets the recipe as text and loads the
data itself. Each of its slots has a connection of its own, on which one answer follows one request; one more connection only
lives as long as this process does, so that no worker outlives it, however it ends.
"""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from effuse.core import errors
from effuse.core.errors import EffuseError, RecipeError, RunError
from effuse.core.recipe import Recipe
from effuse.core.spans import span
from effuse.core.spec import Spec, field_hints
from effuse.core.wire import decode
from effuse.transport.loopback import Loopback
from effuse.transport.serving import FAILED, Failure, Tally, receive, send
from effuse.transport.slots import in_slots
from effuse.transport.state import Snapshots, frame, unframe

T = TypeVar("T")
PATIENCE = 5.0  # seconds that a worker has to end by itself
START = "import sys; from effuse.transport.serving import serve; serve(*map(int, sys.argv[1:]))"


class Processes(Loopback):
    """Loopback whose clients live in worker processes."""

    def __init__(
        self, recipe: Recipe, *args: Any, folder: Path, workers: int, slots: int, snapshots: Callable[[int], Snapshots]
    ) -> None:
        super().__init__(recipe, *args, snapshots=snapshots)
        self.recipe, self.folder, self.slots = recipe, folder, slots
        self.processes = [Process(self, number) for number in range(workers)]
        self.at_a_time = workers * slots

    def _each(self, job: Callable[[Any, int], T], clients: Sequence[int]) -> Iterator[tuple[int, T]]:
        for process in self.processes:
            process.start()
        # one slot of every process, then the next of each: a small cohort is spread over all of them
        slots = [process.slots[i] for i in range(self.slots) for process in self.processes]
        # the threads here only wait, so that torch's own number of them does not matter
        return in_slots(job, clients, slots, [None] * len(slots), threads=1, stop=self.stop)

    def stop(self) -> None:
        for process in self.processes:
            process.stop()


class Process:
    """A worker process as its parent sees it."""

    def __init__(self, fed: Processes, number: int) -> None:
        self.fed, self.number = fed, number
        self.slots: list[Slot] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._life: socket.socket | None = None

    def start(self) -> None:
        """Start it, where it is not running; it gets ready while we go on."""
        if self._child is not None:
            return
        device = self.fed.workbench.machine.device
        told = {
            "recipe": self.fed.recipe.saved(),
            "modules": modules_of(self.fed.recipe),
            "folder": str(self.fed.folder),
            "device": device.type,
        }
        ours, theirs = zip(*(socket.socketpair() for _ in range(1 + self.fed.slots)))
        handles = [s.fileno() for s in theirs]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        if device.type == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = gpu_of(self.number)
        # a session of its own: Ctrl-C at the terminal is for us, and we end our workers
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *map(str, handles)],
            pass_fds=handles,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in theirs:
            end.close()
        self._life = ours[0]
        self.slots = [Slot(self, s) for s in ours[1:]]
        with contextlib.suppress(OSError):  # a process that is dead already is told at the first request
            send(self._life, json.dumps(told).encode())

    def stop(self) -> None:
        """End it now; what it was doing is lost, as in a crash."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        for connection in (self._life, *(slot.connection for slot in self.slots)):
            connection.close()  # type: ignore[union-attr]

    def lost(self) -> RunError:
        """What to say when a connection ends."""
        try:
            code = self._child.wait(PATIENCE)  # type: ignore[union-attr]
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return RunError(
            f"round {self.fed.t}: worker process {self.number + 1} of {len(self.fed.processes)} {how}; when there is memory "
            f"enough for it, `effuse resume {self.fed.folder}` goes on from the last checkpoint"
        )


class Slot:
    """A worker's place for one client at a time: takes a request, gives the answer."""

    def __init__(self, process: Process, connection: socket.socket) -> None:
        self.process, self.connection = process, connection
        self._ready = False

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        with span("workers"):
            if not self._ready:
                self._answer()  # it says that it is ready, or why it cannot be
                self._ready = True
            try:
                send(self.connection, frame(head, body))
            except OSError:
                raise self.process.lost() from None
            receipt, reply = self._answer()
            return receipt, reply

    def _answer(self) -> list[bytes]:
        try:
            state, told, *rest = unframe(receive(self.connection))
        except (OSError, EOFError):
            raise self.process.lost() from None
        if state == FAILED:
            raise rebuilt(decode(told, Failure), self.process.number)
        tally, meter = decode(told, Tally), self.process.fed.workbench.machine.meter
        if tally.images:
            meter.trained(tally.images)
        if tally.evaluations:
            meter.sampled(tally.evaluations)
        return rest


def rebuilt(failure: Failure, number: int) -> Exception:
    """A worker's error as ours."""
    kind = getattr(errors, failure.kind, None)
    ours = isinstance(kind, type) and issubclass(kind, EffuseError)
    error = kind(failure.words) if ours else RuntimeError(f"worker process {number + 1}: {failure.kind}: {failure.words}")
    error.culprit = failure.culprit
    error.add_note(failure.trace)
    return error


def pick_workers(asked: int | None, device: torch.device, clients: int) -> int:
    """How many worker processes: by default one for each GPU where there are several; 1 is this process alone."""
    wanted = asked or (torch.cuda.device_count() if device.type == "cuda" else 1)
    return min(wanted, clients)


def slots_each(machines: int, workers: int, device: torch.device) -> int:
    """Clients at a time in each process: a GPU has its own, the threads of a CPU are divided."""
    return machines if device.type == "cuda" else math.ceil(machines / workers)


def gpu_of(number: int) -> str:
    """The GPU of a worker, as CUDA_VISIBLE_DEVICES names it; more workers than GPUs share them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]
    return names[number % len(names)]


def modules_of(recipe: Recipe) -> list[str]:
    """Modules outside effuse that define what a recipe names; a worker must import them to read it."""
    found: dict[str, None] = {}
    queue: list[Any] = [recipe]
    while queue:
        item = queue.pop()
        if isinstance(item, Spec):
            module = type(item).__module__
            if module == "__main__":
                raise RecipeError(f"{item.name} is defined in the script itself; put it into a module for worker processes")
            if not module.startswith("effuse."):
                found[module] = None
            queue += [getattr(item, key) for key in field_hints(type(item))]
        elif isinstance(item, tuple):
            queue += item
    return list(found)
