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

OPERATOR = "x-effuse-operator"  # the header of the operator's calls
SECRET_FILE = "EFFUSE_SUPERLINK_SECRET"  # the environment variable that names the file of the secret
FOR_SITES = "/v1/fleet/"  # where nodes sign each call, if there are keys
FOR_ALL = ("/health",)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def token(secret: bytes) -> str:
    """What the operator's calls carry; the secret itself stays on the machine."""
    return hashlib.blake2b(secret, person=b"effuse.operator").hexdigest()


class OnlySites:
    """Refuses all calls but those of sites, and those that carry the operator's token."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._allowed(scope)):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only the operator of this federation may call this"})

    def _allowed(self, scope: Scope) -> bool:
        path = str(scope["path"])
        if path in FOR_ALL or (path.startswith(FOR_SITES) and ".." not in path):
            return True
        given = [value for name, value in scope["headers"] if name == OPERATOR.encode()]
        return len(given) == 1 and hmac.compare_digest(given[0], self.token)


def main() -> None:
    """Start `flower-superlink` with the arguments of this process."""
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    from effuse.transport.flower import turned_away

    own = Middleware(OnlySites, token=token(Path(os.environ[SECRET_FILE]).read_bytes()))
    others = extensions.get_middleware
    noting = Middleware(turned_away.Noting, path=Path(os.environ[SECRET_FILE]).with_name(turned_away.FILE))
    extensions.get_middleware = lambda: (own, noting, *others())
    flower_superlink()


if __name__ == "__main__":
    main()
