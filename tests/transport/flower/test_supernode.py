"""A site's connection: how long it tries again after which error, and the sentences that it shows."""

import asyncio
import contextlib
import email.utils
import socket
import ssl
import stat
import threading
from types import SimpleNamespace

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from effuse.core.errors import FederationError
from effuse.core.wire import decode
from effuse.transport.flower import activation, log, supernode, turned_away
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.keys import init
from effuse.transport.flower.messages import ANSWER, Invitation, Packet, Refusal
from effuse.transport.flower.site import Site
from effuse.transport.flower.subprocesses import free_port
from effuse.transport.flower.supernode import SiteClient

UNKNOWN, IN_USE, CUT = "unknown", "in use", "cut off"  # the key; or the network between activation and probe


class Stop(Exception):
    """Ends the site, which would try again forever."""


class Server:
    """A SuperLink that answers requests for activation as flwr 1.41 does, by a list of causes."""

    def __init__(self, *causes) -> None:
        self.causes, self.cause, self.requests = list(causes), None, 0

    def ActivateNode(self, request):
        if request.heartbeat_interval:
            if not self.causes:
                raise Stop
            self.cause, self.requests = self.causes.pop(0), self.requests + 1
        elif self.cause == IN_USE:
            raise http_error(400, 2003, "Invalid heartbeat interval.")
        elif self.cause == CUT:
            raise httpx.ConnectError("nobody there")
        raise self.cause if isinstance(self.cause, Exception) else http_error(412, 2004, "Failed to activate SuperNode.")

    def DeactivateNode(self, request):
        """Without effect in these tests."""


def http_error(status: int, code: int | None, detail: str, **headers: str) -> httpx.HTTPStatusError:
    content = {"detail": detail} if code is None else {"code": code, "detail": detail}
    response = httpx.Response(status, json=content, headers=headers, request=httpx.Request("POST", "https://a"))
    return httpx.HTTPStatusError("refused", request=response.request, response=response)


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """A function that joins with a site; the site's sentences are in its attribute `shown`, and waits are short."""
    monkeypatch.setattr(supernode, "AGAIN", 0.001)
    monkeypatch.setattr(activation, "STARTING", 0.05)

    keys = SimpleNamespace(private=ec.generate_private_key(ec.SECP384R1()))

    shown: list[str] = []
    site = SimpleNamespace(folder=tmp_path, client=1, report=shown.append)

    def join(server: Server) -> None:
        monkeypatch.setattr(SiteClient, "_connected", lambda self: contextlib.nullcontext(server))
        SiteClient(site, "fed.example.org:8443", keys).run()

    join.shown = shown
    return join


def test_an_unknown_key_ends_the_site_with_a_sentence(joined):
    """Flower answers `412 {"code":2004}` every time."""
    server = Server(*[UNKNOWN] * 1000)
    with pytest.raises(FederationError, match=r"^the server does not know this key; .*client 1 was shut out"):
        joined(server)
    assert joined.shown == [
        "no connection to fed.example.org:8443 (the server does not know this key); trying again for a moment"
    ]
    assert 1 < server.requests < 100, "the site tries more than once, since the server may have just started"


def test_a_server_that_has_just_started_soon_knows_its_keys(joined):
    with pytest.raises(Stop):
        joined(Server(httpx.ConnectError("refused"), UNKNOWN, UNKNOWN))


def test_a_network_that_fails_is_no_refusal(joined, monkeypatch):
    """An error of the network, also between activation and probe, says nothing about the key."""
    monkeypatch.setattr(activation, "STARTING", 0.0)
    monkeypatch.setattr(activation, "REFUSED", 0.0)
    broken = [httpx.ConnectError("nobody there"), httpx.ConnectTimeout("too slow"), httpx.ReadTimeout("too slow"), CUT] * 20
    with pytest.raises(Stop):
        joined(Server(*broken))
    assert all("trying again until there is one" in words and "key" not in words for words in joined.shown)


def test_a_key_in_use_is_reported_as_such(joined, monkeypatch):
    """The node of a killed site counts as active for a while; the site waits for that. Flower answers the same 412."""
    monkeypatch.setattr(activation, "REFUSED", 0.05)
    with pytest.raises(FederationError, match="refuses this node .*another process takes part with this key"):
        joined(Server(*[IN_USE] * 1000))
    assert len(joined.shown) == 1 and "2004" not in joined.shown[0] and "does not know" not in joined.shown[0]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (60, "this machine's clock is 60 s ahead of the server's: set the clocks right"),
        (-4000, "this machine's clock is 4,000 s behind the server's: set the clocks right"),
        (None, "signature); set the clocks right"),
    ],
)
def test_a_wrong_clock_is_reported_as_such(joined, monkeypatch, seconds, words):
    """Flower answers `401 Invalid SuperNode authentication`; the difference is known if the answer has a date."""
    monkeypatch.setattr(activation, "REFUSED", 0.05)
    monkeypatch.setattr(activation.time, "time", lambda: 1_800_000_000.0)
    date = {} if seconds is None else {"date": email.utils.formatdate(1_800_000_000 - seconds, usegmt=True)}
    with pytest.raises(FederationError) as caught:
        joined(Server(*[http_error(401, None, "Invalid SuperNode authentication", **date)] * 1000))
    assert "does not accept this site's signature" in str(caught.value) and words in str(caught.value)
    assert len(joined.shown) == 1, "the same reason is shown once"


@pytest.mark.parametrize("owner", [None, 1, 2])
def test_a_dry_run_notices_another_clients_key(owner, tmp_path, monkeypatch):
    """A dry run as client 1 is refused if the terms were sent to the holder of client 2's key."""
    terms = Invitation("toy", {"rounds": "2"}, ("a", "b"), "", "", owner)
    monkeypatch.setattr(SiteClient, "_attempt", lambda self, enough: setattr(self, "_invitation", terms))
    site_client = SiteClient(SimpleNamespace(folder=tmp_path, client=1), "fed.example.org:8443", None)
    if owner != 2:
        assert site_client.peek() is terms
        return
    reason = "key of client 2, not of client 1; give --client-id 2, or ask the server's operator"
    with pytest.raises(FederationError, match=reason):
        site_client.peek()


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A site whose job fails on a file with a patient's name, its client, and the sentences that it shows."""
    shown = []
    site = Site(tmp_path / "site", 0, None, Consent(), "cpu", shown.append)

    def perform(head, body):
        raise OSError("/srv/Jane Doe/1.png: truncated")

    monkeypatch.setattr(site, "perform", perform)
    site._secret()
    return SiteClient(site, "fed.example.org:8443", None), shown


def test_the_traceback_of_a_failed_job_is_in_the_sites_log_only(failing):
    site_client, shown = failing
    packet = site_client._reply_or_refusal(lambda: Packet(ANSWER, *site_client.site.perform(b"", b"")))
    assert decode(packet.head, Refusal).why == "OSError; the details are in the site's own log"
    assert shown == ["failed: OSError: /srv/Jane Doe/1.png: truncated"]
    log = site_client.site.folder / "site.log"
    text = log.read_text()
    assert "Traceback (most recent call last)" in text and "in perform" in text and shown[0] in text
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    secret = (site_client.site.folder / "secret").read_bytes()
    assert secret.hex() not in text and repr(secret) not in text


def test_the_log_is_rotated_and_stays_private(failing, monkeypatch):
    """Two lines of 600 bytes do not fit into 1,000: the first is in site.log.1."""
    monkeypatch.setattr(log, "LOG_BYTES", 1000)
    folder = failing[0].site.folder
    site = Site(folder, 0, None, Consent(), "cpu", lambda words: None)
    for letter in "ab":
        site.report(letter * 600)
    files = [folder / "site.log", folder / "site.log.1"]
    assert ["bbb" in files[0].read_text(), "aaa" in files[1].read_text()] == [True, True]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]


def test_two_sites_of_one_process_keep_their_logs_apart(tmp_path):
    sites = [Site(tmp_path / str(k), k, None, Consent(), "cpu", lambda words: None) for k in range(2)]
    for site in sites:
        site.report(f"client {site.client}")
    assert ["client 1" in (tmp_path / str(k) / "site.log").read_text() for k in range(2)] == [False, True]


def test_a_dry_run_against_a_dead_port_ends(tmp_path, monkeypatch):
    """A site that joins waits for its server; one that only looks does not."""
    monkeypatch.setattr(supernode, "AGAIN", 0.001)
    monkeypatch.setattr(supernode, "LOOK", 0.05)
    site = SimpleNamespace(folder=tmp_path, client=1, report=lambda words: None)
    with pytest.raises(FederationError, match=r"^no connection to 127.0.0.1:\d+ \(ConnectError: .*\); check the address"):
        SiteClient(site, f"127.0.0.1:{free_port()}", None).peek()


def test_a_site_without_keys_is_told_at_once_that_the_server_has_tls(tmp_path):
    """It speaks plainly to a port that waits for a handshake."""
    init(tmp_path / "keys", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "keys/server/server.pem", tmp_path / "keys/server/server.key")
    site = SimpleNamespace(folder=tmp_path, client=1, report=lambda words: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    plain, _ = listening.accept()
                    with contextlib.suppress(OSError):
                        context.wrap_socket(plain, server_side=True).close()

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(FederationError, match="speaks TLS, and this site has no keys; join with the --keys"):
            SiteClient(site, address, None).run()


def test_refused_activations_are_noted_once_for_the_operator(tmp_path, monkeypatch):
    """By address; calls that succeed and other paths are not, nor is one address noted twice in a minute."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": scope["status"]})

    async def send(message):
        sent.append(message["status"])

    sent: list[int] = []
    path = tmp_path / turned_away.FILE
    noting = turned_away.Noting(app, path)
    calls = [(412, "10.0.0.1"), (412, "10.0.0.1"), (200, "10.0.0.2"), (401, "10.0.0.3")]
    for status, address in calls:
        scope = {"type": "http", "path": turned_away.ACTIVATE, "client": (address, 1), "status": status}
        asyncio.run(noting(scope, None, send))
    asyncio.run(noting({"type": "http", "path": "/v1/fleet/x", "client": ("10.0.0.4", 1), "status": 412}, None, send))
    assert sent == [412, 412, 200, 401, 412]
    assert turned_away.taken(path) == ["10.0.0.1", "10.0.0.3"] and turned_away.taken(path) == []


def test_old_addresses_make_room_for_new_ones(tmp_path, monkeypatch):
    """Where two are remembered, a third within a minute is not noted; a minute later it is, as is the first again."""
    now = 1000.0
    monkeypatch.setattr(turned_away, "MOST", 2)
    monkeypatch.setattr(turned_away.time, "monotonic", lambda: now)
    noting = turned_away.Noting(None, tmp_path / turned_away.FILE)
    for address in ("a", "b", "c"):
        noting._note(address)
    now += turned_away.AGAIN
    for address in ("c", "a", "b"):
        noting._note(address)
    assert turned_away.taken(noting.path) == ["a", "b", "c", "a"] and len(noting.noted) == 2
