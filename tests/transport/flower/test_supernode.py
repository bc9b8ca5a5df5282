"""A site's connection: what is tried again for as long as it takes, what for a moment, and what a site is told."""

import contextlib
import email.utils
import stat
from types import SimpleNamespace

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from effuse.core.errors import FederationError
from effuse.core.wire import decode
from effuse.transport.flower import site as site_module
from effuse.transport.flower import supernode as link
from effuse.transport.flower.messages import ANSWER, Invitation, Packet, Refusal
from effuse.transport.flower.site import Consent, Site
from effuse.transport.flower.supernode import SiteClient

UNKNOWN, IN_USE, CUT = "unknown", "in use", "cut off"  # the key, or the line between one question and the next


class Stop(Exception):
    """The test has seen enough."""


class Server:
    """A SuperLink as flwr 1.41 answers a site that wants to be activated, turn by turn."""

    def __init__(self, *turns) -> None:
        self.turns, self.now, self.asked = list(turns), None, 0

    def ActivateNode(self, request):
        if request.heartbeat_interval:
            if not self.turns:
                raise Stop
            self.now, self.asked = self.turns.pop(0), self.asked + 1
        elif self.now == IN_USE:
            raise refusal(400, 2003, "Invalid heartbeat interval.")
        elif self.now == CUT:
            raise httpx.ConnectError("nobody there")
        raise self.now if isinstance(self.now, Exception) else refusal(412, 2004, "Failed to activate SuperNode.")

    def DeactivateNode(self, request):
        """Of a node that was there before; nothing to these tests."""


def refusal(status: int, code: int | None, detail: str, **headers: str) -> httpx.HTTPStatusError:
    told = {"detail": detail} if code is None else {"code": code, "detail": detail}
    response = httpx.Response(status, json=told, headers=headers, request=httpx.Request("POST", "https://a"))
    return httpx.HTTPStatusError("refused", request=response.request, response=response)


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """A site that joins, and what it says; patience is in hundredths of a second."""
    monkeypatch.setattr(link, "AGAIN", 0.001)
    monkeypatch.setattr(link, "STARTING", 0.05)

    keys = SimpleNamespace(private=ec.generate_private_key(ec.SECP384R1()))

    class Here:
        folder, client, said = tmp_path, 1, []
        say = said.append

    def join(server: Server) -> list[str]:
        monkeypatch.setattr(SiteClient, "_connected", lambda self: contextlib.nullcontext(server))
        SiteClient(Here, "fed.example.org:8443", keys).run()

    join.said = Here.said
    Here.said.clear()
    return join


def test_a_key_that_the_server_does_not_know_is_told_in_words_and_at_once(joined):
    """Flower says `412 {"code":2004}` of it for as long as one asks."""
    server = Server(*[UNKNOWN] * 1000)
    with pytest.raises(FederationError, match=r"^the server does not know this key; .*client 1 was shut out"):
        joined(server)
    assert joined.said == [
        "no connection to fed.example.org:8443 (the server does not know this key); trying again for a moment"
    ]
    assert 1 < server.asked < 100  # it was asked more than once, since it might have just been started


def test_a_server_that_has_just_started_soon_knows_its_keys(joined):
    with pytest.raises(Stop):
        joined(Server(httpx.ConnectError("refused"), UNKNOWN, UNKNOWN))


def test_a_network_that_fails_is_no_refusal(joined, monkeypatch):
    """Whatever breaks on the way, also between the two questions, says nothing about the key."""
    monkeypatch.setattr(link, "STARTING", 0.0)
    monkeypatch.setattr(link, "REFUSED", 0.0)
    broken = [httpx.ConnectError("nobody there"), httpx.ConnectTimeout("too slow"), httpx.ReadTimeout("too slow"), CUT] * 20
    with pytest.raises(Stop):
        joined(Server(*broken))
    assert all("trying again until there is one" in words and "key" not in words for words in joined.said)


def test_a_key_that_is_in_use_is_told_so(joined, monkeypatch):
    """After a site was killed its node counts as there for a while: that is waited for, and Flower's answer is the same 412."""
    monkeypatch.setattr(link, "REFUSED", 0.05)
    with pytest.raises(FederationError, match="refuses this node .*another process takes part with this key"):
        joined(Server(*[IN_USE] * 1000))
    assert len(joined.said) == 1 and "2004" not in joined.said[0] and "does not know" not in joined.said[0]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (60, "this machine's clock is 60 s ahead of the server's: set the clocks right"),
        (-4000, "this machine's clock is 4,000 s behind the server's: set the clocks right"),
        (None, "signature); set the clocks right"),
    ],
)
def test_clocks_that_differ_are_told_apart_from_keys_that_do(joined, monkeypatch, seconds, words):
    """Flower says `401 Invalid SuperNode authentication`; when its answer was sent, a server behind HTTP says too."""
    monkeypatch.setattr(link, "REFUSED", 0.05)
    monkeypatch.setattr(link.time, "time", lambda: 1_800_000_000.0)
    date = {} if seconds is None else {"date": email.utils.formatdate(1_800_000_000 - seconds, usegmt=True)}
    with pytest.raises(FederationError) as caught:
        joined(Server(*[refusal(401, None, "Invalid SuperNode authentication", **date)] * 1000))
    assert "does not accept this site's signature" in str(caught.value) and words in str(caught.value)
    assert len(joined.said) == 1, "the same words every time, whatever the clock says meanwhile"


@pytest.mark.parametrize("owner", [None, 1, 2])
def test_a_dry_run_notices_another_clients_key(owner, tmp_path, monkeypatch):
    """Client 1 looks: terms that were sent to the holder of client 2's key are not shown as if all were well."""
    terms = Invitation("toy", {"rounds": "2"}, ("a", "b"), "", "", owner)
    monkeypatch.setattr(SiteClient, "_attempt", lambda self, enough: setattr(self, "_invitation", terms))
    looking = SiteClient(SimpleNamespace(folder=tmp_path, client=1), "fed.example.org:8443", None)
    if owner != 2:
        assert looking.peek() is terms
        return
    with pytest.raises(
        FederationError, match="key of client 2, not of client 1; give --client-id 2, or ask the server's operator"
    ):
        looking.peek()


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A real site and its link, and a job that fails on a file whose name says too much."""
    said = []
    site = Site(tmp_path / "site", 0, None, Consent(), "cpu", said.append)

    def perform(head, body):
        raise OSError("/srv/Jane Doe/1.png: truncated")

    monkeypatch.setattr(site, "perform", perform)
    site._secret()
    return SiteClient(site, "fed.example.org:8443", None), said


def test_the_traceback_of_a_failed_job_is_in_the_sites_log_and_nowhere_else(failing):
    joined, said = failing
    packet = joined._reply_or_refusal(lambda: Packet(ANSWER, *joined.site.perform(b"", b"")))
    assert decode(packet.head, Refusal).why == "OSError; the details are in the site's own log"
    assert said == ["failed: OSError: /srv/Jane Doe/1.png: truncated"]
    log = joined.site.folder / "site.log"
    text = log.read_text()
    assert "Traceback (most recent call last)" in text and "in perform" in text and said[0] in text
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    secret = (joined.site.folder / "secret").read_bytes()
    assert secret.hex() not in text and repr(secret) not in text


def test_the_log_is_rotated_and_stays_private(failing, monkeypatch):
    """Two lines of 600 bytes do not fit into 1,000: the first is in site.log.1."""
    monkeypatch.setattr(site_module, "LOG_BYTES", 1000)
    folder = failing[0].site.folder
    again = Site(folder, 0, None, Consent(), "cpu", lambda words: None)
    for packet in "ab":
        again.say(packet * 600)
    files = [folder / "site.log", folder / "site.log.1"]
    assert ["bbb" in files[0].read_text(), "aaa" in files[1].read_text()] == [True, True]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]


def test_two_sites_of_one_process_keep_their_logs_apart(tmp_path):
    sites = [Site(tmp_path / str(k), k, None, Consent(), "cpu", lambda words: None) for k in range(2)]
    for site in sites:
        site.say(f"client {site.client}")
    assert ["client 1" in (tmp_path / str(k) / "site.log").read_text() for k in range(2)] == [False, True]
