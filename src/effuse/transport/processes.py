"""Worker processes of one machine, one for each GPU; messages cross in the wire format, results are those of one process.

The server's program, its workbench and the evaluation stay in this process. A worker gets the recipe as text and loads the
data itself. Each of its slots has a connection of its own, on which one answer follows one request. One more connection is
open as long as this process lives; when it breaks, the worker ends.
"""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from effuse.core import errors
from effuse.core.errors import EffuseError, RecipeError, RunError
from effuse.core.protection import Protection
from effuse.core.recipe import Recipe
from effuse.core.spans import span
from effuse.core.spec import Spec, field_hints
from effuse.core.wire import decode
from effuse.transport.loopback import Loopback
from effuse.transport.serving import FAILED, Failure, Tally, receive, send
from effuse.transport.slots import in_slots
from effuse.transport.state import Snapshots, frame, unframe

T = TypeVar("T")
PATIENCE = 5.0  # seconds that a worker whose connection broke has to end
START = "import sys; from effuse.transport.serving import serve; serve(*map(int, sys.argv[1:]))"


class Processes(Loopback):
    """Loopback whose clients live in worker processes."""

    def __init__(
        self,
        recipe: Recipe,
        *args: Any,
        folder: Path,
        workers: int,
        slots: int,
        snapshots: Callable[[int], Snapshots],
        protections: Mapping[int, Protection] = types.MappingProxyType({}),
    ) -> None:
        super().__init__(recipe, *args, snapshots=snapshots)
        self.protect(protections)
        self.recipe, self.folder, self.slots = recipe, folder, slots
        self.processes = [Process(self, number) for number in range(workers)]
        self.at_a_time = workers * slots

    def _each(self, job: Callable[[Any, int], T], clients: Sequence[int]) -> Iterator[tuple[int, T]]:
        for process in self.processes:
            process.start()
        # one slot of every process, then the next of each: a small cohort is spread over all of them
        slots = [process.slots[i] for i in range(self.slots) for process in self.processes]
        # these threads only wait, so torch's number of threads does not matter
        return in_slots(self.timed(job), clients, slots, [None] * len(slots), threads=1, stop=self.stop)

    def stop(self) -> None:
        for process in self.processes:
            process.stop()


class Process:
    """A worker process as its parent sees it."""

    def __init__(self, fed: Processes, number: int) -> None:
        self.fed, self.number = fed, number
        self.slots: list[Slot] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # the worker ends when it breaks

    def start(self) -> None:
        """Start it if it is not running, and return before it is ready."""
        if self._child is not None:
            return
        device = self.fed.workbench.machine.device
        recipe, folder = self.fed.recipe, str(self.fed.folder)
        settings: dict[str, Any] = {"recipe": recipe.saved(), "modules": modules_of(recipe), "folder": folder}
        settings |= {"device": device.type, "sigmas": {k: p.sigma for k, p in self.fed.worker.protections.items()}}
        parent_ends, child_ends = zip(*(socket.socketpair() for _ in range(1 + self.fed.slots)))
        handles = [end.fileno() for end in child_ends]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        if device.type == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = gpu_of(self.number)
        # in a session of its own, Ctrl-C reaches only this process, which then ends its workers
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *map(str, handles)],
            pass_fds=handles,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in child_ends:
            end.close()
        self._control = parent_ends[0]
        self.slots = [Slot(self, end) for end in parent_ends[1:]]
        with contextlib.suppress(OSError):  # if the process is dead already, the first request reports it
            send(self._control, json.dumps(settings).encode())

    def stop(self) -> None:
        """Kill it; the work under way is lost, as in a crash."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        if self._control is not None:
            self._control.close()
        for slot in self.slots:
            slot.connection.close()

    def lost(self) -> RunError:
        """The error for a connection that broke, once the process has ended."""
        assert self._child is not None, "a slot exists only after the process was started"
        try:
            code = self._child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return RunError(
            f"round {self.fed.t + 1}: worker process {self.number + 1} of {len(self.fed.processes)} {how}; "
            f"check that there is enough memory, then `effuse resume {self.fed.folder}` goes on from the last checkpoint"
        )


class Slot:
    """A worker's place for one client at a time: takes a request, gives the answer."""

    def __init__(self, process: Process, connection: socket.socket) -> None:
        self.process, self.connection = process, connection
        self._ready = False

    def handle(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        with span("workers"):
            if not self._ready:
                self._answer()  # the first answer says that it is ready, or why it failed
                self._ready = True
            try:
                send(self.connection, frame(head, body))
            except OSError:
                raise self.process.lost() from None
            receipt, reply = self._answer()
            return receipt, reply

    def _answer(self) -> list[bytes]:
        try:
            state, head, *rest = unframe(receive(self.connection))
        except (OSError, EOFError):
            raise self.process.lost() from None
        if state == FAILED:
            raise rebuilt(decode(head, Failure), self.process.number)
        tally, meter = decode(head, Tally), self.process.fed.workbench.machine.meter
        if tally.images:
            meter.trained(tally.images)
        if tally.evaluations:
            meter.sampled(tally.evaluations)
        return rest


def rebuilt(failure: Failure, number: int) -> Exception:
    """A worker's error as an error of this process."""
    kind = getattr(errors, failure.kind, None)
    error: Exception
    if isinstance(kind, type) and issubclass(kind, EffuseError):
        error = kind(failure.words)
    else:
        error = RuntimeError(f"worker process {number + 1}: {failure.kind}: {failure.words}")
    error.__dict__["culprit"] = failure.culprit  # where the command line looks for it
    error.add_note(failure.trace)
    return error


def pick_workers(asked: int | None, device: torch.device, clients: int) -> int:
    """How many worker processes: by default one for each GPU; 1 means that there is only this process."""
    wanted = asked or (torch.cuda.device_count() if device.type == "cuda" else 1)
    return min(wanted, clients)


def slots_each(machines: int, workers: int, device: torch.device) -> int:
    """Clients at a time in each process: all slots of its own GPU, or a part of the CPU's slots."""
    return machines if device.type == "cuda" else math.ceil(machines / workers)


def gpu_of(number: int) -> str:
    """The GPU of a worker, as CUDA_VISIBLE_DEVICES names it; more workers than GPUs share them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]
    return names[number % len(names)]


def modules_of(recipe: Recipe) -> list[str]:
    """The modules outside effuse that define a recipe's specs; a worker must import them before it reads the recipe."""
    found: dict[str, None] = {}
    queue: list[Any] = [recipe]
    while queue:
        item = queue.pop()
        if isinstance(item, Spec):
            kind: type = type(item)
            module = kind.__module__
            if module == "__main__":
                raise RecipeError(f"{item.name} is defined in the script itself; put it into a module for worker processes")
            if not module.startswith("effuse."):
                found[module] = None
            queue += [getattr(item, key) for key in field_hints(kind)]
        elif isinstance(item, tuple):
            queue += item
    return list(found)
