"""How a site's node becomes active at a SuperLink, and in which words it is told why it does not."""

import contextlib
import time
from typing import Any

import httpx
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, RegisterNodeFleetRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode

from effuse.core.errors import FederationError
from effuse.transport.flower.keys import ClientKeys
from effuse.transport.flower.site import Site
from effuse.transport.flower.trouble import Disconnected, TurnedAway, clock_difference, code_of, speaks_tls, summary

REFUSED = 30.0  # seconds after which the site gives up if the server refuses it
STARTING = 5.0  # the same if the server does not know its key; a server that starts knows its keys in a tenth of a second


class Activation:
    """A site's activations, one for each connection; a server that refuses them for long ends the site."""

    def __init__(self, site: Site, address: str, keys: ClientKeys | None, public: bytes) -> None:
        self.site, self.address, self.keys, self.public = site, address, keys, public
        self._refused_since: dict[bool, float] = {}  # key unknown? -> when the server first refused this node for that

    def made(self, client: Any) -> Node:
        """The node that is activated over this connection."""
        try:
            if self.keys is None:
                with contextlib.suppress(httpx.HTTPStatusError):  # after a reconnection it is registered already
                    client.RegisterNode(RegisterNodeFleetRequest(public_key=self.public))
            request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
            node = Node(node_id=client.ActivateNode(request).node_id)
        except httpx.HTTPError as error:
            self._deactivate(client)
            raise self._diagnosis(client, error) from None
        self._refused_since.clear()
        (self.site.folder / "node").write_text(str(node.node_id))
        return node

    def _deactivate(self, client: Any) -> None:
        """Deactivate this site's node: after its process was killed it counts as active for a while."""
        with contextlib.suppress(httpx.HTTPError, OSError, ValueError):
            client.DeactivateNode(DeactivateNodeRequest(node_id=int((self.site.folder / "node").read_text())))

    def _diagnosis(self, client: Any, error: httpx.HTTPError) -> Disconnected:
        """Why there is no connection; an error where it is useless to try again: another server, or one that refuses."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise FederationError(
                f"{self.address} does not show a certificate of this federation; check the address and the ca.crt in --keys"
            ) from None
        broken = isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError))
        if self.keys is None and broken and speaks_tls(self.address):
            raise FederationError(
                f"{self.address} speaks TLS, and this site has no keys; join with the --keys that the operator sent"
            ) from None
        if code_of(error) == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:  # the key is unknown, or its node is active
            error = self._probe_key(client)
        if not isinstance(error, (httpx.HTTPStatusError, httpx.RemoteProtocolError, httpx.ReadError)):
            self._refused_since.clear()  # no server yet: wait for it
            return Disconnected(summary(error))
        unknown, why = code_of(error) == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, summary(error)
        remedy = "ask the operator for this client's keys, or end the other process that uses them"
        if unknown:
            why = "the server does not know this key"
            remedy = f"ask its operator whether client {self.site.client} was shut out, or for the current keys"
        elif code_of(error) == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            why = "another process takes part with this key, or did until a moment ago"
        if self.keys is None:
            remedy = "join with the --keys that the operator sent"
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
            why = "the server does not accept this site's signature"
            remedy = f"{clock_difference(error.response)}set the clocks right; a request is valid for five minutes"
        since = self._refused_since.setdefault(unknown, time.monotonic())
        if time.monotonic() - since > (STARTING if unknown else REFUSED):
            raise FederationError(f"{why if unknown else f'{self.address} refuses this node ({why})'}; {remedy}") from None
        return TurnedAway(why)

    def _probe_key(self, client: Any) -> httpx.HTTPError:
        """Ask for an invalid activation, without an interval: Flower complains of the interval only if it knows the key."""
        try:
            client.ActivateNode(ActivateNodeRequest(public_key=self.public))
        except httpx.HTTPError as error:
            return error
        return httpx.ReadError("an activation without an interval was granted")  # no known version of Flower does that
