"""Several clients at a time on one GPU, each on a stream of its own; their answers still come in cohort order."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Worker = TypeVar("Worker")
T = TypeVar("T")


def in_slots(
    job: Callable[[Worker, int], T],
    clients: Sequence[int],
    workers: Sequence[Worker],
    streams: Sequence[torch.cuda.Stream | None],
) -> Iterator[tuple[int, T]]:
    """Do a job for every client, at most one at a time on each worker; a round holds as many answers as there are workers."""
    if len(workers) == 1:
        for client in clients:
            yield client, job(workers[0], client)
        return
    free = deque(zip(workers, streams))
    waiting: deque[tuple[int, tuple[Worker, Any], Future[T]]] = deque()
    main = torch.cuda.current_stream()

    def on_stream(worker: Worker, stream: Any, client: int) -> T:
        with torch.cuda.stream(stream):
            stream.wait_stream(main)
            done = job(worker, client)
            stream.synchronize()
            return done

    with ThreadPoolExecutor(len(workers)) as pool:
        left = deque(clients)
        while left or waiting:
            while left and free:
                client, slot = left.popleft(), free.popleft()
                waiting.append((client, slot, pool.submit(on_stream, *slot, client)))
            client, slot, future = waiting.popleft()
            answer = future.result()
            yield client, answer
            # the server has used the answer on its own stream; only then may its memory serve the next client
            main.synchronize()
            del answer, future
            free.append(slot)
