"""Which nodes a SuperLink turned away, for the operator, who cannot see its process."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

ACTIVATE = "/v1/fleet/activate-node"
REFUSALS = (401, 412)  # a signature that does not hold; a key that is unknown, or whose node is active
AGAIN = 60.0  # seconds after which the same address is noted again
MOST = 1000  # addresses that are remembered
FILE = "turned-away"
Message = MutableMapping[str, Any]


class Noting:
    """Writes the address of every refused activation to a file."""

    def __init__(self, app: Callable[..., Awaitable[None]], path: Path) -> None:
        self.app, self.path, self.noted = app, path, dict[str, float]()

    async def __call__(self, scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in REFUSALS:
                self._note(str((scope.get("client") or ("an unknown address",))[0]))
            await send(message)

        seen = scope["type"] == "http" and scope["path"] == ACTIVATE
        await self.app(scope, receive, watched if seen else send)

    def _note(self, address: str) -> None:
        now = time.monotonic()
        if now - self.noted.get(address, -AGAIN) < AGAIN:
            return
        if len(self.noted) >= MOST:
            self.noted = {known: then for known, then in self.noted.items() if now - then < AGAIN}
        if len(self.noted) >= MOST:
            return
        self.noted[address] = now
        with open(self.path, "a") as file:
            file.write(f"{address}\n")


def taken(path: Path) -> list[str]:
    """The addresses that were noted since the last call."""
    if not path.exists():
        return []
    taking = path.with_suffix(".read")
    path.replace(taking)  # what is noted meanwhile goes to a new file
    return taking.read_text().splitlines()
