"""Errors between a site and its server, as sentences."""

import email.utils
import socket
import ssl
import time

import httpx

HANDSHAKE = 5.0  # seconds that a handshake may take


class Disconnected(Exception):
    """The connection broke; the site tries again."""

    until = "until there is one"


class TurnedAway(Disconnected):
    """The server refuses this node; the site tries again for a moment.

    An earlier process of this site may still count as connected, or the server may only just have started.
    """

    until = "for a moment"


def code_of(error: Exception) -> int | None:
    """Flower's number for a refusal; None where it is not one of Flower's."""
    if not isinstance(error, httpx.HTTPStatusError):
        return None
    try:
        code = error.response.json()["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return code if isinstance(code, int) else None


def clock_difference(response: httpx.Response) -> str:
    """How far this machine's clock is from the server's, where the response has a date."""
    try:
        ahead = time.time() - email.utils.parsedate_to_datetime(response.headers["date"]).timestamp()
    except (LookupError, ValueError):
        return ""
    return f"this machine's clock is {abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's: "


def speaks_tls(address: str) -> bool:
    """Whether a server completes a TLS handshake, whoever it is: nothing is sent to it."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=HANDSHAKE) as plain:
            context.wrap_socket(plain, server_hostname=host.strip("[]")).close()
    except (OSError, ValueError):
        return False
    return True


def summary(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code} {error.response.text[:160]}"
    return f"{type(error).__name__}: {error}"[:200]
