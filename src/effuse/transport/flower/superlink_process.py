"""A SuperLink of which others reach no more than sites need: `python -m effuse.transport.flower.superlink_process`.

Flower serves the operator's calls on the same port as the sites' ones, without asking who calls: anyone who reached it could
list the sites' public keys, unregister them and stop the run. Here only the process that started it may make these calls.
"""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from effuse.transport.flower.parts import CALL

OPERATOR = "x-effuse-operator"  # the header of the operator's calls
SECRET_FILE = "EFFUSE_SUPERLINK_SECRET"  # the environment variable that names the file of the secret
FOR_SITES = "/v1/fleet/"  # where nodes sign each call, if there are keys
FOR_ALL = ("/health",)
ACTS_BELOW = {"Control": "/v1/control/", "Runtime": "/v1/runtime/", "Fleet": FOR_SITES, "NodeAuth": FOR_SITES}  # layers
PART = "/v1/fleet/push-object"  # the call that brings a part
LARGEST = 8 << 20  # bytes of that call; the largest that effuse makes has a part of 5 MiB
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def token(secret: bytes) -> str:
    """What the operator's calls carry; the secret itself stays on the machine."""
    return hashlib.blake2b(secret, person=b"effuse.operator").hexdigest()


class OnlySites:
    """Refuses all calls but those of sites, which have a limited size, and those that carry the operator's token."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            path = str(scope["path"])
            if self._is_the_operators(scope):
                await self.app(scope, receive, send)
            elif path not in FOR_ALL and (not path.startswith(FOR_SITES) or ".." in path):
                await _refuse(send, 403, b"only the operator of this federation may call this")
            elif not _declares(scope, most := LARGEST if path == PART else CALL):
                await _refuse(send, 413, b"a call must declare its length, and have %d bytes at most" % most)
            else:
                await self.app(scope, receive, send)

    def _is_the_operators(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == OPERATOR.encode()]
        return len(given) == 1 and hmac.compare_digest(given[0], self.token)


def _declares(scope: Scope, most: int) -> bool:
    """Whether a call declares a length, which HTTP servers hold it to, and one that it may have."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    length = lengths[0] if lengths else b"0"
    return not chunked and len(lengths) < 2 and length.isdigit() and len(length) < 12 and int(length) <= most


async def _refuse(send: Send, status: int, why: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": why})


class Below:
    """A layer of Flower that acts on the calls below one path; others go round it, since a layer costs more than a call."""

    def __init__(self, app: Any, layer: Any, path: str) -> None:
        self.app, self.layered, self.path = app, layer(app), path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        below = scope["type"] == "http" and scope["path"].startswith(self.path)
        await (self.layered if below else self.app)(scope, receive, send)


def _where_it_acts(layer: Any) -> Any:
    path = next((path for name, path in ACTS_BELOW.items() if layer.cls.__name__.startswith(name)), None)
    return layer if path is None else type(layer)(Below, layer=layer.cls, path=path)


def main() -> None:
    """Start `flower-superlink` with the arguments of this process."""
    from flwr.server.superlink.linkstate import linkstate_factory
    from flwr.superlink import extensions
    from flwr.superlink import main as superlink
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    from effuse.transport.flower import direct, store, turned_away, waiting

    own = Middleware(OnlySites, token=token(Path(os.environ[SECRET_FILE]).read_bytes()))
    others, plain = extensions.get_middleware, superlink._get_middleware
    noting = Middleware(turned_away.Noting, path=Path(os.environ[SECRET_FILE]).with_name(turned_away.FILE))
    extensions.get_middleware = lambda: (own, noting, Middleware(waiting.Waiting), Middleware(direct.Direct), *others())
    linkstate_factory.InMemoryLinkState = store.Store  # type: ignore[misc]
    superlink._get_middleware = lambda: [_where_it_acts(layer) for layer in plain()]
    flower_superlink()


if __name__ == "__main__":
    main()
