"""Keyed randomness: every draw has an address, so order, engine and restarts cannot change a result."""

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator

import numpy as np
import torch

DEFAULT_GENERATOR = threading.RLock()  # a process has one; clients side by side take turns
# torch's settings are the process's, too: who changes them, and who must not meet them changed, holds this
SETTINGS = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Stream:
    """An address of random numbers; streams of different addresses are independent."""

    key: tuple[int | str, ...]
    secret: bytes = dataclasses.field(default=b"", repr=False)  # a deployed site mixes its own in; it never leaves the site

    def child(self, *key: int | str) -> "Stream":
        return Stream(self.key + key, self.secret)

    @property
    def seed(self) -> int:
        """A 63-bit seed that any generator takes."""
        digest = hashlib.blake2b(json.dumps(self.key).encode(), key=self.secret[:64], digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(self.seed)

    def numpy(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.seed))


def stream(seed: int, t: int, job: str, call: int, client: int, purpose: str, secret: bytes = b"") -> Stream:
    """The address of a draw; setup is t = -1, the server is client -1, evaluation is t = -2 whatever the round."""
    return Stream((seed, t, job, call, client, purpose), secret)


@contextlib.contextmanager
def keyed(source: Stream) -> Iterator[None]:
    """Run library code that can only use torch's default generator (dropout, initialisation) on a stream of ours."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with DEFAULT_GENERATOR, torch.random.fork_rng(devices=devices):
        torch.manual_seed(source.seed)
        yield
