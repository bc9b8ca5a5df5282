"""Arguments that are sent to each client only once, and the record of the clients that have received them."""

from collections.abc import Iterable, Mapping
from typing import Any

Message = Mapping[str, Any]  # arguments of a job by their names
Once = Message | Mapping[int, Message] | None  # the same arguments for all clients, or {client: arguments}


class Received(dict[str, set[int]]):
    """For each argument that was sent once, the clients that have received it."""

    def missing(self, once: Once, client: int) -> Message:
        """The arguments of `once` that a client has not received."""
        return {name: value for name, value in _for_client(once, client).items() if client not in self.get(name, ())}

    def discard(self, name: str, clients: Iterable[int] | None) -> None:
        """Forget that clients have received an argument; None: all of them."""
        if clients is None:
            self.pop(name, None)
        elif name in self:
            self[name] -= set(clients)

    def record(self, names: Iterable[str], client: int) -> None:
        """Record that a client has received these arguments."""
        for name in names:
            self.setdefault(name, set()).add(client)


def _for_client(once: Once, client: int) -> Message:
    if once and all(isinstance(key, int) for key in once):
        return once.get(client, {})  # type: ignore[call-overload]
    return once or {}  # type: ignore[return-value]
