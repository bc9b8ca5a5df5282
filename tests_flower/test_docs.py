"""The commands of the pages for the server's operator and for a site, carried out in a folder for each machine."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from effuse.transport.flower.subprocesses import free_port

DOCS = Path(__file__).parent.parent / "docs"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(DOCS.parent / "src"), "COLUMNS": "200"}


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [c for block in blocks for c in block.replace("\\\n", "").splitlines() if c.strip()]


def started(line: str, folder: Path) -> subprocess.Popen:
    """A command of a page, started in its reader's folder."""
    assert line.startswith("effuse ")
    script = line.replace("effuse", f"exec {sys.executable} -m effuse", 1)
    return subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def sizeless(line: str) -> str:
    """A line without its time, which a site prints where nobody watches, and without sizes."""
    return re.sub(r"[0-9,]+ bytes", "N bytes", re.sub(r"^\S+Z ", "", line))


def output_of(process: subprocess.Popen, seconds: float = 120) -> str:
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output
    return output


def test_the_two_pages_make_a_federation(tmp_path):
    """Two sites with folders of images, one of which lacks a class; no path of a site reaches the server."""
    server = tmp_path / "server"
    server.mkdir()
    address = f"127.0.0.1:{free_port()}"
    keys, serve, resume, sample = (line.replace("0.0.0.0:8443", address) for line in commands("server.md"))
    dry_run, join = (line.replace("fed.example.org:8443", address) for line in commands("site.md"))
    output_of(started(keys, server))
    rng = np.random.default_rng(0)
    for k, classes in enumerate((("benign", "malignant"), ("malignant",))):
        shutil.copytree(server / "keys" / f"client-{k}", tmp_path / f"site-{k}" / f"client-{k}")
        for name in classes:
            folder = tmp_path / f"site-{k}" / "scans" / name
            folder.mkdir(parents=True)
            for i in range(20):
                Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(folder / f"{i}.png")
    running = started(serve, server)
    try:
        preview = output_of(started(dry_run, tmp_path / "site-0"))
        digest = re.search(r"manifest demo@([0-9a-f]{64})", preview)[1]
        assert "what would leave this site (client 0, 32 images here) in 3 rounds" in preview
        assert "to train: 3 messages" in preview
        sites = []
        for k in range(2):
            command = join.replace("HASH", digest[:16])
            command = command.replace("client-id 0", f"client-id {k}").replace("client-0", f"client-{k}")
            sites.append(started(command, tmp_path / f"site-{k}"))
        output = output_of(running)
        outputs = [output_of(site) for site in sites]
    finally:
        running.kill()
    assert digest in output and "weights_sha256" in output
    # a site prints the lines of the page's normal day, except for the sizes of messages
    (day,) = re.findall(r"```text\n(.*?)```", (DOCS / "site.md").read_text(), re.DOTALL)
    day = day.replace("fed.example.org:8443", address).replace("HASH", digest)
    printed = [sizeless(line) for line in outputs[0].splitlines()]
    assert [line for line in printed if line in map(sizeless, day.splitlines())] == [*map(sizeless, day.splitlines())]
    assert "client 0 is ready with 32 images: benign 16, malignant 16; held out: 8" in outputs[0]
    assert "client 1 is ready with 16 images: benign 0, malignant 16; held out: 4" in outputs[1]
    assert all("the server says that the run is over" in words for words in outputs)
    written = "".join(p.read_text(errors="replace") for p in server.rglob("*") if p.suffix in (".json", ".log", ".jsonl"))
    assert "scans" not in written and str(tmp_path / "site-0") not in written
    assert "weights_sha256" in output_of(started(resume, server))
    output_of(started(sample, server))
    assert any((server / "runs" / "first" / "exports").rglob("*"))
