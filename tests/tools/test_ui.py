"""The page of all runs, by real requests on a loopback port."""

import http.client
import json
import os
import threading
from pathlib import Path

import pytest

from effuse.tools.ui import TAIL, Pages, described, find_runs

EVIL = "<script>alert(1)</script>[bold]x\x1b[2J"


def made(folder, name: str = "demo", done: int = 3, **files: str):
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"name": name, "recipe": {"rounds": "12"}, "created": "2026"}))
    lines = [{"federated": n + 1, "loss": 0.5, "metrics": {"fid": 7.25}} for n in range(done)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"federated": 99')
    for file, text in files.items():
        (folder / file.replace("_", ".")).write_text(text)
    return folder


@pytest.fixture
def runs(tmp_path):
    made(tmp_path / "runs" / "first")
    made(tmp_path / "runs" / "table" / "cell-1", report_html="<h1>its report</h1>")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


@pytest.fixture
def served(runs):
    with Pages(runs, "127.0.0.1", 0) as pages:
        threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield pages
        pages.shutdown()


def asked(pages, path: str, host: str | None = None, method: str = "GET"):
    port = pages.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host if host is not None else f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode(errors="replace")
    connection.close()
    return answer, body


def test_runs_with_progress_and_links_to_reports_that_exist(served):
    answer, body = asked(served, "/")
    assert answer.status == 200 and "3/12" in body and "fid 7.25" in body and ">0.5<" in body
    assert "first" in body and "table/cell-1" in body
    assert body.count("report.html") == 1 and "/run/table%2Fcell-1/report.html" in body
    assert 'http-equiv="refresh"' in body and "<script" not in body
    answer, body = asked(served, "/run/table%2Fcell-1/report.html")
    assert body == "<h1>its report</h1>" and answer.getheader("Content-Security-Policy").startswith("sandbox allow-scripts;")


def test_progress_is_live_and_a_line_that_is_being_written_does_not_count(served, runs):
    with open(runs / "first" / "rounds.jsonl", "a") as file:
        file.write(', "loss": 0.25}\n')
    assert "99/12" in asked(served, "/")[1]
    (runs / "first" / "result.json").write_text(json.dumps({"metrics": {"kid": {"value": 0.125}}}))
    body = asked(served, "/")[1]
    assert "finished" in body and "kid 0.125" in body


def test_samples_are_shown(served, runs):
    (runs / "first" / "samples").mkdir()
    for n, blob in ((1, b"old"), (2, b"new")):
        (runs / "first" / "samples" / f"round-{n:05d}.png").write_bytes(blob)
    assert 'src="/run/first/samples.png"' in asked(served, "/")[1]
    answer, body = asked(served, "/run/first/samples.png")
    assert body == "new" and answer.getheader("Content-Type") == "image/png"


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/run/../../secret.txt",
        "/run/..%2F..%2Fsecret.txt/report.html",
        "/run/%2e%2e/report.html",
        "/run/first/../../../secret.txt",
        "/run/first/manifest.json",
        "/run/first%00/report.html",
        "/run/first/report.html",
        "/run/nothing/samples.png",
        "//evil/run/first/samples.png",
        "/run/first/samples.png",
    ],
)
def test_nothing_else_is_served(served, path):
    answer, body = asked(served, path)
    assert answer.status == 404 and "secret" not in body


def test_a_browser_that_asks_for_an_icon_sees_no_error(served):
    answer, body = asked(served, "/favicon.ico")
    assert answer.status == 204 and body == ""


def test_links_out_of_the_folder_are_not_followed(served, runs, tmp_path):
    made(tmp_path / "outside", report_html="secret")
    (runs / "linked").symlink_to(tmp_path / "outside")
    (runs / "first" / "report.html").symlink_to(tmp_path / "secret.txt")
    assert "linked" not in find_runs(runs)
    for path in ("/run/linked/report.html", "/run/first/report.html"):
        assert asked(served, path)[0].status == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[", "10.0.0.1"])
def test_a_foreign_name_is_refused(served, host):
    """DNS rebinding: a page of another site that resolves to 127.0.0.1 may not read runs."""
    answer, body = asked(served, "/", host)
    assert answer.status == 403 and "first" not in body


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80"])
def test_own_names_are_known(served, host):
    assert asked(served, "/", host)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_is_read_only(served, method):
    assert asked(served, "/", method=method)[0].status == 501


def test_names_are_text(served, runs):
    folder = made(runs / EVIL.replace("/", "_"), name=EVIL)
    line = {"federated": 1, "loss": 1.0, "metrics": {EVIL: 1.0}}
    (folder / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    answer, body = asked(served, "/")
    assert "<script" not in body and "\x1b" not in body and body.count("&lt;script&gt;alert(1)") == 3
    policy = answer.getheader("Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "script-src" not in policy


def test_damaged_runs_do_not_break_the_page(served, runs):
    for name, text in (("a", "[]"), ("b", "{"), ("c", '{"recipe": 3, "name": []}')):
        (runs / name).mkdir()
        (runs / name / "manifest.json").write_text(text)
        (runs / name / "rounds.jsonl").write_text("[1]\n")
    assert asked(served, "/")[0].status == 200


def test_a_run_that_cannot_be_shown_hides_no_other(served, runs, monkeypatch):
    """A name that is not UTF-8, a loss of 400 digits, and a run that is deleted while the page is made."""
    made(Path(os.fsdecode(os.fsencode(runs) + b"/caf\xe9")), report_html="its report")
    huge = made(runs / "huge")
    (huge / "rounds.jsonl").write_text('{"federated": 1, "loss": ' + "9" * 400 + "}\n")
    answer, body = asked(served, "/")
    assert answer.status == 200 and "table/cell-1" in body and "it cannot be shown: OverflowError" in body
    assert "/run/caf%E9/report.html" in body and asked(served, "/run/caf%E9/report.html")[1] == "its report"
    monkeypatch.setattr("effuse.tools.ui._walk", lambda folder, depth: [runs / "first", runs / "deleted"])
    answer, body = asked(served, "/")
    assert answer.status == 200 and "first" in body and "it cannot be shown: ValueError" in body


def test_a_last_line_may_be_long(runs):
    """It is read whole although the tail that is read first begins within it."""
    lines = [{"federated": n, "noted": "x" * 3 * TAIL} for n in (1, 2)]
    (runs / "first" / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert described(runs / "first")["done"] == 2
    (runs / "first" / "rounds.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert described(runs / "first")["done"] == 1


def test_the_folder_may_be_a_run_itself(runs):
    assert list(find_runs(runs / "first")) == ["first"] and find_runs(runs / "none") == {}
