"""Several clients at a time on one GPU or CPU, each in a thread of its own; answers come in cohort order."""

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from effuse.core.spans import WAITING, span
from effuse.transport.write_guard import tensors_in

Worker = TypeVar("Worker")
T = TypeVar("T")
AHEAD = 2  # answers that may wait for each worker, so that no worker is idle while a slower one is at work


def in_slots(
    job: Callable[[Worker, int], T],
    clients: Sequence[int],
    workers: Sequence[Worker],
    streams: Sequence[torch.cuda.Stream | None],
    threads: int | None = None,
    stop: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, T]]:
    """Do a job for every client, at most one at a time on each worker; a round holds AHEAD answers a worker.

    Workers of a GPU have a stream each; those of a CPU have that number of torch's `threads` each. `stop` is called, to stop
    the workers, when a job fails or the caller takes no more answers.
    """
    if len(workers) == 1:
        for client in clients:
            yield client, job(workers[0], client)
        return
    free: queue.SimpleQueue[tuple[Worker, torch.cuda.Stream | None]] = queue.SimpleQueue()
    for slot in zip(workers, streams):
        free.put(slot)
    servers = torch.cuda.current_stream() if streams[0] is not None else None

    def one(client: int) -> T:
        worker, stream = free.get()
        try:
            if stream is None or servers is None:
                return job(worker, client)
            with torch.cuda.stream(stream):
                stream.wait_stream(servers)
                answer = job(worker, client)
                stream.synchronize()
                # the server reads the answer on its own stream; before that, its memory must not be given to another client
                for tensor in tensors_in(answer):
                    if tensor.is_cuda:
                        tensor.record_stream(servers)
                return answer
        finally:
            free.put((worker, stream))

    begin = (lambda: None) if threads is None else lambda: torch.set_num_threads(threads)  # a setting of each thread
    pool = ThreadPoolExecutor(len(workers), initializer=begin)
    left, waiting = deque(clients), deque[tuple[int, Future[T]]]()
    try:
        while left or waiting:
            while left and len(waiting) < AHEAD * len(workers):
                client = left.popleft()
                waiting.append((client, pool.submit(one, client)))
            client, future = waiting.popleft()
            with span(WAITING):
                answer = future.result()
            yield client, answer
            del answer, future  # or they would stay in memory while the next one is made
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
