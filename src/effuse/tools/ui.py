"""A page of all runs of a folder, read-only: `effuse ui`.

A request names a run and one of two files of it. Both are looked up among those that a scan found, so no path of a request
is ever opened. Names are shown as text, and the page has no script.
"""

import html
import ipaddress
import json
import os
import re
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

from effuse.core.errors import shown

DEPTH = 4  # folders below the root in which runs are looked for
MOST = 500  # runs on the page, the newest first
TAIL = 1 << 18  # bytes of rounds.jsonl that are read for its last line, and more where that is longer
LARGEST = 64 << 20  # bytes of a file that is served
AGAIN = 5  # seconds after which the page loads itself again
PAGE = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; base-uri 'none'; form-action 'none'"
# a report may have scripts of its own, which can reach nothing: no network, and an origin of its own
REPORT = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif;
  background: light-dark(#fff, #14181c); color: light-dark(#1c2126, #e6eaee) }
body { margin: 1.5rem auto; max-width: 72rem; padding: 0 1rem }
main { overflow-x: auto }
a { color: light-dark(#0b57d0, #8ab4f8) }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid #8884; vertical-align: top }
img { max-width: 7rem; image-rendering: pixelated; display: block }
progress { width: 7rem; display: block }
"""


def find_runs(root: Path) -> dict[str, Path]:
    """The run folders below a folder by their paths in it, the newest first; links are not followed."""
    found = sorted(_walk(root, DEPTH), key=_changed, reverse=True)
    return {root.name if run == root else run.relative_to(root).as_posix(): run for run in found[:MOST]}


def _changed(run: Path) -> float:
    try:
        return (run / "manifest.json").stat().st_mtime
    except OSError:  # it was deleted meanwhile
        return 0.0


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "manifest.json").is_file():
        yield folder
        return
    try:
        inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()) if depth else []
    except OSError:  # a folder that may not be read
        return
    for path in inner:
        yield from _walk(path, depth - 1)


def described(run: Path) -> dict[str, Any]:
    """What the page tells of a run; of a damaged one, that it cannot be read."""
    manifest, last, result = _json(run / "manifest.json"), _last(run / "rounds.jsonl"), _json(run / "result.json")
    recipe = manifest.get("recipe")
    total = str(recipe.get("rounds", "?")) if isinstance(recipe, dict) else "?"
    metrics = last.get("metrics") if isinstance(last.get("metrics"), dict) else {}
    if isinstance(result.get("metrics"), dict):
        metrics = {name: m.get("value") for name, m in result["metrics"].items() if isinstance(m, dict)}
    newest = max(p.stat().st_mtime for p in (run / "manifest.json", run / "rounds.jsonl") if p.exists())
    return {
        "name": str(manifest.get("name") or "run"),
        "state": "finished" if result else f"last round {ago(time.time() - newest)}",
        "done": last.get("federated", 0),
        "rounds": total,
        "loss": last.get("loss"),
        "metrics": metrics,
        "created": str(manifest.get("created", "")),
    }


def ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _last(path: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines."""
    try:
        with open(path, "rb") as file:
            size, tail, lines = path.stat().st_size, TAIL, list[bytes]()
            while len(lines) < 2:  # the first may have been cut
                file.seek(max(0, size - tail))
                lines = [line for line in file.read().split(b"\n")[:-1] if line]
                if tail >= size:
                    break
                tail *= 2
        found = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def page(root: Path) -> str:
    """The list of all runs."""
    rows = "".join(_row(key, run) for key, run in find_runs(root).items())
    head = "<tr><th>run<th>progress<th>loss<th>metrics<th>samples</tr>"
    table = f"<table>{head}{rows}</table>" if rows else "<p>There is no run yet: <code>effuse run demo</code></p>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{AGAIN}">'
        f'<meta name="viewport" content="width=device-width"><title>effuse runs</title><style>{STYLE}</style>'
        f"<h1>Runs in {_text(root.name or root)}</h1><main>{table}</main></html>"
    )


def _row(key: str, run: Path) -> str:
    try:
        return _told(key, run)
    except Exception as error:  # one damaged run, or one that was deleted meanwhile, does not hide the others
        return f"<tr><td><b>{_text(key)}</b><td colspan=4>it cannot be shown: {_text(type(error).__name__)}</tr>"


def _told(key: str, run: Path) -> str:
    about, link = described(run), f"/run/{quote(os.fsencode(key), safe='')}"
    report = f'<br><a href="{link}/report.html">report</a>' if (run / "report.html").is_file() else ""
    grid = f'<img alt="newest samples" src="{link}/samples.png">' if _samples(run) else ""
    metrics = "<br>".join(f"{_text(name)} {_text(_number(value))}" for name, value in about["metrics"].items())
    bar = ""
    if about["rounds"].isdecimal() and isinstance(about["done"], int):
        bar = f'<progress aria-label="rounds" max="{int(about["rounds"])}" value="{about["done"]}"></progress>'
    return (
        f"<tr><td><b>{_text(key)}</b><br>{_text(about['name'])}, {_text(about['created'])}{report}"
        f"<td>{_text(about['done'])}/{_text(about['rounds'])}, {_text(about['state'])}{bar}"
        f"<td>{_text(_number(about['loss']))}<td>{metrics}<td>{grid}</tr>"
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else ""


def _text(words: object) -> str:
    return html.escape(shown(str(words), 300))


def _samples(run: Path) -> Path | None:
    """The newest grid of samples."""
    return max((run / "samples").glob("round-*.png"), default=None)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD with the page, a report or a grid, and anything else with an error."""

    server: "Pages"
    timeout = 30  # seconds that a client may take for its request

    def do_GET(self) -> None:
        if not self.server.knows(self.headers.get("Host", "")):
            return self._answer(HTTPStatus.FORBIDDEN, b"this page is not served under that name")
        try:
            path = urlsplit(self.path).path
        except ValueError:
            return self._answer(HTTPStatus.BAD_REQUEST, b"that is no address")
        if path == "/":
            return self._answer(
                HTTPStatus.OK, page(self.server.root).encode("utf-8", "backslashreplace"), "text/html; charset=utf-8", PAGE
            )
        if path == "/favicon.ico":  # browsers ask for one, and count its absence as an error
            return self._answer(HTTPStatus.NO_CONTENT, b"")
        match = re.fullmatch(r"/run/([^/]+)/(report\.html|samples\.png)", path)
        run = find_runs(self.server.root).get(os.fsdecode(unquote_to_bytes(match[1]))) if match else None
        if match is None or run is None:
            return self._answer(HTTPStatus.NOT_FOUND, b"there is no such page")
        if match[2] == "samples.png":
            return self._file(_samples(run), "image/png", PAGE)
        return self._file(run / "report.html", "text/html; charset=utf-8", REPORT)

    do_HEAD = do_GET

    def _file(self, path: Path | None, kind: str, policy: str) -> None:
        if path is None or path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
            return self._answer(HTTPStatus.NOT_FOUND, b"there is no such file")
        try:
            blob = path.read_bytes()
        except OSError:
            return self._answer(HTTPStatus.NOT_FOUND, b"the file cannot be read")
        self._answer(HTTPStatus.OK, blob, kind, policy)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain", policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "effuse"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged: they would hide what the user is told."""


class Pages(ThreadingHTTPServer):
    """Serves the runs of a folder."""

    daemon_threads = True

    def __init__(self, root: Path, host: str, port: int) -> None:
        self.root, self.host = root.resolve(), host
        super().__init__((host, port), Handler)

    def knows(self, host: str) -> bool:
        """Whether a Host header is an address or our own name: a foreign name that leads here is another site's attack."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self.host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        own = self.server_address[0]
        return address.is_loopback or not ipaddress.ip_address(str(own)).is_loopback
