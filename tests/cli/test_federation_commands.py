"""`keys`, `serve` and `join`: what they write, and what they refuse in one sentence before waiting."""

import fcntl
import subprocess
import sys

import pytest


@pytest.fixture
def keys(effuse, tmp_path):
    assert effuse("keys init keys --clients 2 --host fed.example.org").code == 0
    return tmp_path / "keys"


def test_keys_are_made_once(effuse, keys):
    assert (keys / "server" / "clients" / "1.pub").exists() and (keys / "client-1" / "client.key").exists()
    assert effuse("keys init keys --clients 2").sentence.startswith("FederationError: keys is not empty")
    assert "--clients" in effuse("keys init other").sentence


def test_what_serve_refuses(effuse, keys, toy_file, tmp_path):
    recipe = toy_file()
    for line, words in (
        ("serve --listen 127.0.0.1:8000", "give a RECIPE to start a run, or --resume RUN to continue one"),
        (f"serve {recipe} --listen 0.0.0.0:8000", "without --keys anyone who reaches it could take part"),
        (f"serve {recipe} --listen nowhere", "'nowhere' is not an address; give HOST:PORT"),
        (
            f"serve {recipe} --listen 127.0.0.1:8000 --keys keys/client-0",
            "server.pem is missing; give a server's keys with --keys",
        ),
        (
            f"serve {recipe} --listen 127.0.0.1:8000 --keys keys",
            "has no key of client 2; make keys for 3 clients, or go on without it by --quorum 2",
        ),
        (f"serve {recipe} --listen 127.0.0.1:8000 --keys keys --quorum 3", "has no key of client 2"),
        (f"serve {recipe} --listen 127.0.0.1:8000 --quorum 4", "--quorum 4: there are 3 clients; it is between 1 and 3"),
        (f"serve {recipe} --listen 127.0.0.1:8000 --resume a --out b", "--resume a and --out b: give one of them"),
        # without data here, the classifier of a metric cannot be trained
        (
            """serve demo --listen 127.0.0.1:8000 --set 'data=elsewhere(side=8, channels=1, classes=["a", "b"])'""",
            "needs real images, and there are none here; leave metrics out: --set 'evaluate=evaluate(grid=20)'",
        ),
        # refused before waiting: the data is not in one place
        (
            f"serve {recipe} --listen 127.0.0.1:8000 --set 'algorithm=centralised(local=adam(lr=0.01, batch=8, epochs=1))'",
            "FederationError: centralised needs all data in one place, which a real federation never has",
        ),
        ("serve --listen 127.0.0.1:8000 --resume a --rounds 3", "leave out the options that change it"),
        ("serve --listen 127.0.0.1:8000 --resume a", "a: there is no such run folder"),
    ):
        sentence = effuse(f"{line} --quiet").sentence
        assert words in sentence, sentence
    assert not (tmp_path / "runs").exists() and not (tmp_path / "a").exists()


def test_a_run_of_another_recipe_is_not_resumed(effuse, toy_file):
    """With a recipe, --resume continues only a run of that recipe."""
    assert effuse(f"run {toy_file()} --rounds 1 --out run --quiet").code == 0
    sentence = effuse(f"serve {toy_file()} --seed 1 --rounds 1 --listen 127.0.0.1:8000 --resume run").sentence
    assert "run was run with seed=0, not 1" in sentence
    sentence = effuse(f"serve {toy_file()} --rounds 1 --listen 127.0.0.1:8000 --resume run").sentence
    assert "all on this machine; use `effuse resume run`" in sentence


def test_what_join_refuses(effuse, keys, tmp_path):
    common = "join 127.0.0.1:8000 --client-id 0"
    for line, words in (
        (f"{common} --data 'nothing()'", "no source 'nothing'"),
        (f"{common} --data 'folder(\"missing\")'", "missing: not found"),
        (f"{common} --data keys", "--data keys: say how it is to be read, such as --data 'folder(\"keys\")'"),
        (f"{common} --data {tmp_path}", f"such as --data 'folder(\"{tmp_path}\")'"),
        (f"{common} --data recipe --keys keys/server", "client.key is missing; give a client's keys with --keys"),
        (f"{common} --data recipe --allow demo", "expected RECIPE@HASH"),
        (f"{common} --data recipe --recipe missing.json", "missing.json"),
        ("join nowhere --client-id 0 --data recipe", "'nowhere' is not an address"),
        ("join 127.0.0.1:8000 --client-id -1 --data recipe", "client-id"),
    ):
        sentence = effuse(line).sentence
        assert words in sentence, sentence


def test_one_process_to_a_sites_folder(effuse, tmp_path):
    (tmp_path / "site-0").mkdir()
    with open(tmp_path / "site-0" / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sentence = effuse("join 127.0.0.1:8000 --client-id 0 --data recipe").sentence
    assert "site-0 is in use by another `effuse join`" in sentence


AT_WORK = """
import sys, threading, time
import torch
import effuse.transport.flower.commands as serve
from effuse.cli import main

def training(*args):
    def steps():
        while True:
            x = torch.ones(32, 32, requires_grad=True)
            (x @ x).sum().backward()
    for _ in range(4):
        threading.Thread(target=steps, daemon=True).start()
    time.sleep(0.5)
    raise KeyboardInterrupt

serve.join = training
sys.argv = ["effuse", "join", "127.0.0.1:8000", "--client-id", "0", "--data", "recipe"]
main()
"""


def test_ctrl_c_in_the_middle_of_a_job(tmp_path):
    """The process must exit without an abort, which a service manager would take for a crash."""
    done = subprocess.run([sys.executable, "-c", AT_WORK], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr == "effuse: interrupted\n"


def test_an_interrupted_server_says_all_that_it_needs_again(effuse, toy_file, monkeypatch):
    """Quorum and deadline are not saved with the run: without them the server would wait for all clients."""

    def interrupted(recipe, folder, **how):
        folder.mkdir()
        (folder / "manifest.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("effuse.runs.driver.run", interrupted)
    serve = f"serve {toy_file()} --listen 127.0.0.1:8000 --quiet"
    sentence = effuse(f"{serve} --out a --quorum 2 --deadline 60").sentence
    assert "`effuse serve --listen 127.0.0.1:8000 --quorum 2 --deadline 60 --resume a` goes on" in sentence
    assert "`effuse serve --listen 127.0.0.1:8000 --resume b` goes on" in effuse(f"{serve} --out b").sentence
