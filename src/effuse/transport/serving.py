"""A worker process's side: it carries out the orders that its parent sends, and ends with its parent."""

import contextlib
import importlib
import json
import os
import signal
import socket
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from effuse.core.machine import Machine, Meter
from effuse.core.message import message
from effuse.core.origin import culprit
from effuse.core.protection import Protection
from effuse.core.recipe import Recipe
from effuse.core.wire import encode
from effuse.core.workbench import Client
from effuse.fast import machines_for
from effuse.transport.simulator import on_disk
from effuse.transport.state import frame, unframe
from effuse.transport.worker import Worker

DONE, FAILED = b"done", b"failed"


@message(name="worker.counts")
class Tally:
    """The work of a process since its last report."""

    images: int
    evaluations: int


@message(name="worker.failure")
class Failure:
    """An error on its way to the parent."""

    kind: str  # the name of its class
    words: str
    culprit: str  # the lines of the user's files that it came from
    trace: str


def serve(life: int, *slots: int) -> None:
    """Run a worker process until its parent ends; the arguments are file descriptors of its sockets."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=life)
    try:
        settings = json.loads(receive(control))
    except (OSError, EOFError):
        return  # the parent ended before it sent the settings
    threading.Thread(target=_end_with, args=(control,), daemon=True).start()
    connections = [socket.socket(fileno=s) for s in slots]
    try:
        for module in settings["modules"]:
            importlib.import_module(module)
        workers, threads = _workers(settings, len(slots))
    except Exception as error:
        for connection in connections:
            send(connection, failed(error))
        raise SystemExit(1) from None
    served = [
        threading.Thread(target=_serve_slot, args=(*worker, connection, threads), daemon=True)
        for worker, connection in zip(workers, connections)
    ]
    for thread in served:
        thread.start()
    for thread in served:
        thread.join()


def _workers(
    settings: dict[str, Any], slots: int
) -> tuple[list[tuple[Worker, torch.cuda.Stream | None, "UnreportedWork"]], int]:
    """A worker for each slot, and torch's number of threads in each."""
    recipe, device = Recipe.restore(settings["recipe"]), torch.device(settings["device"])
    torch.set_num_threads(recipe.threads)
    train = recipe.data.load("train").to(device)
    shards = recipe.shards(train)
    machines = machines_for(recipe, device, len(train))
    meter = UnreportedWork(machines[0].meter)

    def worker(machine: Machine) -> Worker:
        def client(k: int) -> Client:
            return Client(machine, recipe.task, recipe.rounds, k, shards[k])

        made = Worker(recipe.algorithm, recipe.seed, client, on_disk(Path(settings["folder"])), recipe.wire)
        if recipe.budget is not None:
            made.protections = {int(k): Protection(recipe.budget, sigma) for k, sigma in settings["sigmas"].items()}
        return made

    return [(worker(m), m.stream, meter) for m in machines[:slots]], machines[0].threads or recipe.threads


class UnreportedWork:
    """The part of a meter that the parent has not been told of."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.lock = meter, threading.Lock()
        self.images = self.evaluations = 0

    def tally(self) -> Tally:
        with self.lock:
            new = Tally(self.meter.images - self.images, self.meter.evaluations - self.evaluations)
            self.images, self.evaluations = self.images + new.images, self.evaluations + new.evaluations
            return new


def _serve_slot(
    worker: Worker, stream: torch.cuda.Stream | None, meter: "UnreportedWork", connection: socket.socket, threads: int
) -> None:
    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, EOFError), torch.cuda.stream(stream):  # the parent has closed it
        send(connection, frame(DONE, encode(Tally(0, 0), Tally)))
        while True:
            request = receive(connection)
            try:
                receipt, reply = worker.handle(*unframe(request))
                answer = frame(DONE, encode(meter.tally(), Tally), receipt, reply)
            except Exception as error:
                answer = failed(error)
            send(connection, answer)


def failed(error: Exception) -> bytes:
    trace = "".join(traceback.format_exception(error))
    failure = Failure(type(error).__name__, " ".join(str(error).split()), culprit(error), trace)
    return frame(FAILED, encode(failure, Failure))


def _end_with(control: socket.socket) -> None:
    """End this process at once when its parent has ended."""
    with contextlib.suppress(OSError):
        control.recv(1)
    os._exit(0)


def send(connection: socket.socket, blob: bytes) -> None:
    connection.sendall(len(blob).to_bytes(8, "little"))
    connection.sendall(blob)


def receive(connection: socket.socket) -> bytearray:
    size = int.from_bytes(_exactly(connection, 8), "little")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    blob = bytearray(size)
    view, at = memoryview(blob), 0
    while at < size:
        got = connection.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return blob
