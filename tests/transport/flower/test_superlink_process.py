"""Which calls a SuperLink takes from whom."""

import asyncio

import pytest

from effuse.transport.flower.parts import CALL, INLINE, PIECE
from effuse.transport.flower.superlink_process import LARGEST, OPERATOR, PART, OnlySites, token

TOKEN = token(b"s" * 32)


def status(path: str, *headers: tuple[str, str], kind: str = "http") -> int:
    """What a call is answered; 200 by the app behind, 0 without an answer."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(name.encode(), value.encode()) for name, value in headers]}
    asyncio.run(OnlySites(app, TOKEN)(scope, None, send))
    return sent[0]["status"] if sent else 0


@pytest.mark.parametrize("path", ["/v1/fleet/pull-messages", "/v1/fleet/activate-node", "/health"])
def test_sites_need_no_token(path):
    assert status(path) == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-nodes",
        "/v1/control/stop-run",
        "/v1/runtime/acquire-task",
        "/docs",
        "/openapi.json",
        "/",
        "",
        "/health/x",
        "/v1/fleet",
        "/v1/fleetx",
        "/v1/fleet/../control/stop-run",
        "//v1/fleet/x",
    ],
)
def test_everything_else_is_the_operators(path):
    assert status(path) == 403
    assert status(path, (OPERATOR, TOKEN)) == 200
    for wrong in ("", TOKEN[:-1], TOKEN + "0", token(b"t" * 32)):
        assert status(path, (OPERATOR, wrong)) == 403
    assert status(path, (OPERATOR, "x"), (OPERATOR, TOKEN)) == 403, "of two headers none counts"


def test_no_other_protocol_is_spoken():
    assert status("/v1/fleet/x", (OPERATOR, TOKEN), kind="websocket") == 0
    assert status("", kind="lifespan") == 200, "starting and ending"


def test_the_token_does_not_tell_the_secret():
    assert "s" not in TOKEN and len(TOKEN) == 128 and token(b"s" * 32) == TOKEN


LENGTHS = [
    ((), 200),
    ((("content-length", "0"),), 200),
    ((("content-length", "1500000000"),), 413),
    ((("content-length", "9" * 400),), 413),
    ((("content-length", "-1"),), 413),
    ((("content-length", "1"), ("content-length", "2")), 413),
    ((("transfer-encoding", "chunked"),), 413),
]


@pytest.mark.parametrize(("headers", "answer"), LENGTHS)
def test_a_sites_call_has_a_limited_length_before_it_is_read(headers, answer):
    """Nothing is read where more is declared. The operator's own calls have no limit."""
    assert status("/v1/fleet/push-object", *headers) == status("/health", *headers) == answer
    assert status("/v1/fleet/push-object", *headers, (OPERATOR, TOKEN)) == 200


@pytest.mark.parametrize(("path", "most"), [(PART, 8 << 20), ("/v1/fleet/push-messages", 512 << 10), ("/health", 512 << 10)])
def test_a_call_that_brings_a_part_may_be_longer(path, most):
    """A part has 5 MiB; a packet within its message 256 KiB, and so has a list of the parts of 20 GB."""
    assert (LARGEST, CALL) == (8 << 20, 512 << 10) and INLINE < CALL // 2 + 1 and PIECE < LARGEST
    assert [status(path, ("content-length", str(most + k))) for k in (0, 1)] == [200, 413]
