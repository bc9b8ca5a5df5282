"""What `effuse serve` and `effuse join` do."""

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from effuse.core.build import build_text
from effuse.core.data import Source
from effuse.core.errors import FederationError, RecipeError
from effuse.core.federation import Federation
from effuse.transport.context import Engine, EngineContext
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.guarded import Limit
from effuse.transport.flower.keys import ClientKeys, ServerKeys
from effuse.transport.flower.messages import Invitation
from effuse.transport.flower.server import Flower
from effuse.transport.flower.site import Site
from effuse.transport.flower.superlink import SuperLink
from effuse.transport.flower.supernode import SiteClient
from effuse.transport.flower.terms import Terms
from effuse.transport.refusals import refuse_quorum

SHARE = "recipe"  # value of --data: this client's share of the recipe's own data, for simulated sites


class Served(NamedTuple):
    """Where a server listens, with which keys, and whose answers it needs by when."""

    listen: str
    keys: Path | None = None
    terms: Terms = Terms()
    insecure: bool = False


def served(how: Served, name: str, clients: int) -> Engine:
    """The engine of a run whose clients are at their sites; options that cannot work are refused here."""
    host, port = address(how.listen)
    if how.keys is None and not how.insecure and not is_loopback(host):
        raise FederationError(
            f"--listen {how.listen}: without --keys anyone who reaches it could take part and read everything; "
            "make keys with `effuse keys init`, or give --insecure"
        )
    quorum, own = how.terms.quorum, ServerKeys(how.keys) if how.keys is not None else None
    if quorum is not None and not 1 <= quorum <= clients:
        raise FederationError(f"--quorum {quorum}: there are {clients} clients; it is between 1 and {clients}")
    shut_out = frozenset(range(clients)) - own.clients().keys() if own is not None else frozenset()
    if own is not None and shut_out and clients - len(shut_out) < (quorum or clients):
        raise FederationError(
            f"{own.folder} has no key of client {min(shut_out)}; make keys for {clients} clients, "
            f"or go on without it by --quorum {clients - len(shut_out)}"
        )

    def make(context: EngineContext) -> Federation:
        if quorum is not None:
            refuse_quorum(context.recipe, quorum)
        superlink = SuperLink(context.folder / "flower" / "superlink", host, port, own)
        return Flower(context, superlink, how.terms._replace(shut_out=shut_out), name)

    return make


def join(
    server: str,
    client: int,
    data: str,
    keys: Path | None,
    folder: Path,
    consent: Consent,
    device: str,
    say: Callable[[str], None],
    preview: Callable[[Site, Invitation], list[str]] | None = None,
    limit: Limit = Limit(),  # noqa: B008
) -> None:
    """Take part as one client until the run is over; with a `preview`, show what would leave the site, and disconnect."""
    address(server)
    own = ClientKeys(keys, client) if keys is not None else None
    site = Site(folder, client, source(data), consent, device, say, limit)
    site_client = SiteClient(site, server, own)
    if preview is not None:
        for line in preview(site, site_client.peek()):
            say(line)
    else:
        with site.locked():
            site_client.run()


def source(data: str) -> Source | None:
    """A site's data, given in the grammar of recipes; None is its share of the recipe's own data."""
    if data == SHARE:
        return None
    if Path(data).expanduser().exists():
        raise RecipeError(f"--data {data}: say how it is to be read, such as --data 'folder(\"{data}\")'")
    built: Source = build_text(data, Source, "--data")
    return built


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise FederationError(f"'{text}' is not an address; give HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
