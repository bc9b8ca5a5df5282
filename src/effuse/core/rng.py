"""Keyed random numbers: every draw has an address, so that order, engine and restarts cannot change a result."""

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator

import numpy as np
import torch

DEFAULT_GENERATOR = threading.RLock()  # torch has one per process: parallel clients use it in turn
# torch's settings are global too: hold this to change them, or to rely on them; take it before the generator
SETTINGS = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Stream:
    """The address of a random stream; streams of different addresses are independent."""

    key: tuple[int | str, ...]
    secret: bytes = dataclasses.field(default=b"", repr=False)  # of a deployed site; it never leaves the site

    def child(self, *key: int | str) -> "Stream":
        return Stream(self.key + key, self.secret)

    @property
    def seed(self) -> int:
        """A 63-bit seed, which every generator accepts."""
        digest = hashlib.blake2b(json.dumps(self.key).encode(), key=self.secret[:64], digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(self.seed)

    def numpy(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.seed))


def stream(seed: int, t: int, job: str, call: int, client: int, purpose: str, secret: bytes = b"") -> Stream:
    """The address of a draw. Setup has t = -1, evaluation t = -2 in every round, and the server is client -1."""
    return Stream((seed, t, job, call, client, purpose), secret)


@contextlib.contextmanager
def keyed(source: Stream) -> Iterator[None]:
    """Seed torch's default generator from a stream, for library code that can use no other (dropout, initialisation)."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with DEFAULT_GENERATOR, torch.random.fork_rng(devices=devices):
        torch.manual_seed(source.seed)
        yield
