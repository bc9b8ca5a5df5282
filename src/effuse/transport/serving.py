"""A worker process's own side: it carries out what its parent sends, and ends with it."""

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

from effuse.core.blame import culprit
from effuse.core.machine import Machine, Meter
from effuse.core.message import message
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
    """Work that a process has done since it last told."""

    images: int
    evaluations: int


@message(name="worker.failure")
class Failure:
    """An error as it crosses: the name of its kind, its sentence, and where it came from, for a sentence and in full."""

    kind: str
    words: str
    culprit: str
    trace: str


def serve(life: int, *slots: int) -> None:
    """A worker process: from its parent's first words to the end of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=life)
    try:
        told = json.loads(receive(control))
    except (OSError, EOFError):
        return  # the parent is gone before it said anything
    threading.Thread(target=_end_with, args=(control,), daemon=True).start()
    connections = [socket.socket(fileno=s) for s in slots]
    try:
        for module in told["modules"]:
            importlib.import_module(module)
        places, threads = _places(told, len(slots))
    except Exception as error:
        for connection in connections:
            send(connection, failed(error))
        raise SystemExit(1) from None
    served = [
        threading.Thread(target=_serve_slot, args=(*place, connection, threads), daemon=True)
        for place, connection in zip(places, connections)
    ]
    for thread in served:
        thread.start()
    for thread in served:
        thread.join()


def _places(told: dict[str, Any], slots: int) -> tuple[list[tuple[Worker, torch.cuda.Stream | None, "UnreportedWork"]], int]:
    """A worker for each slot, and torch's number of threads in each."""
    recipe, device = Recipe.restore(told["recipe"]), torch.device(told["device"])
    torch.set_num_threads(recipe.threads)
    train = recipe.data.load("train").to(device)
    shards = recipe.shards(train)
    machines = machines_for(recipe, device, len(train))
    meter = UnreportedWork(machines[0].meter)

    def worker(machine: Machine) -> Worker:
        def client(k: int) -> Client:
            return Client(machine, recipe.task, recipe.rounds, k, shards[k])

        return Worker(recipe.algorithm, recipe.seed, client, on_disk(Path(told["folder"])), recipe.wire)

    return [(worker(m), m.stream, meter) for m in machines[:slots]], machines[0].threads or recipe.threads


class UnreportedWork:
    """What of a meter has been told already."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.lock = meter, threading.Lock()
        self.images = self.evaluations = 0

    def tally(self) -> Tally:
        with self.lock:
            news = Tally(self.meter.images - self.images, self.meter.evaluations - self.evaluations)
            self.images, self.evaluations = self.images + news.images, self.evaluations + news.evaluations
            return news


def _serve_slot(
    worker: Worker, stream: torch.cuda.Stream | None, meter: "UnreportedWork", connection: socket.socket, threads: int
) -> None:
    torch.set_num_threads(threads)
    with contextlib.suppress(OSError, EOFError), torch.cuda.stream(stream):  # its other end is gone: so are we
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
    """End this process when its parent is gone, whatever it is doing."""
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
