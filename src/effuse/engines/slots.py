"""Several clients at a time on one GPU, each on a stream of its own; their answers still come in cohort order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Worker = TypeVar("Worker")
T = TypeVar("T")


def in_slots(job: Callable[[Worker, int], T], clients: Sequence[int], workers: Sequence[Worker]) -> Iterator[tuple[int, T]]:
    """Do a job for every client, at most one at a time on each worker; a round holds as many answers as there are workers."""
    if len(workers) == 1:
        for client in clients:
            yield client, job(workers[0], client)
        return
    free = deque(workers)
    streams = {id(worker): torch.cuda.Stream() for worker in workers}
    waiting: deque[tuple[int, Worker, Future[T]]] = deque()
    main = torch.cuda.current_stream()

    def on_stream(worker: Worker, client: int) -> T:
        with torch.cuda.stream(streams[id(worker)]):
            streams[id(worker)].wait_stream(main)
            done = job(worker, client)
            streams[id(worker)].synchronize()
            return done

    with ThreadPoolExecutor(len(workers)) as pool:
        left = deque(clients)
        while left or waiting:
            while left and free:
                client, worker = left.popleft(), free.popleft()
                waiting.append((client, worker, pool.submit(on_stream, worker, client)))
            client, worker, future = waiting.popleft()
            answer = future.result()
            yield client, answer
            # the server has used the answer on its own stream; only then may its memory serve the next client
            main.synchronize()
            del answer, future
            free.append(worker)
