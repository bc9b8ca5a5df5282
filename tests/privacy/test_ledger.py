"""A site's ledger: nothing is released that is not charged, whoever asks, in whichever run, and whenever it is killed."""

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from effuse.core.errors import FederationError, RecipeError, RunError
from effuse.core.privacy import Budget, Release
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.ledger import Ledger, ledger_folder, ledger_path, order_key

CAP = Budget(epsilon=1.0, accountant="rdp")
FIT = (Release("fit", noise=20.0),)  # by Renyi divergences at delta 1e-5: epsilon 0.1816, 24 times 0.990, 25 times 1.013
ONE, TWO = order_key(b"manifest", b"one"), order_key(b"manifest", b"two")


def ledger(folder: Path, cap: Budget = CAP, run: str = "a run") -> Ledger:
    return Ledger(folder / "ledgers" / "data.jsonl", cap, run)


def numbered(i: int) -> str:
    return order_key(str(i).encode())


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledgers" / "data.jsonl").read_text().splitlines()]


def test_a_charge_is_on_disk_and_survives_exactly(tmp_path):
    odd = (Release("fit", noise=0.1 + 0.2, rate=1 / 3, steps=7), Release("histogram", "laplace", math.pi * 100))
    wide = Budget(epsilon=99.0, delta=1e-3, accountant="rdp")
    ledger(tmp_path, wide).charge(ONE, "round 3, job 'train'", odd)
    (entry,) = ledger(tmp_path).entries()
    assert entry.releases == odd and (entry.run, entry.key, entry.what) == ("a run", ONE, "round 3, job 'train'")
    assert ledger(tmp_path).spent() == (epsilon_of(odd, 1e-5, "rdp"), 1e-5)
    assert ledger(tmp_path, wide).spent() == (epsilon_of(odd, 1e-3, "rdp"), 1e-3)


def test_files_are_the_owners_only(tmp_path):
    ours = ledger(tmp_path)
    ours.charge(ONE, "a job", FIT)
    ours.store(ONE, b"reply")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ledgers").rglob("*")}
    assert modes == {"data.jsonl": 0o600, "data": 0o700, ONE: 0o600}
    assert stat.S_IMODE((tmp_path / "ledgers").stat().st_mode) == 0o700


def test_overspending_is_refused_before_anything_is_written(tmp_path):
    """The 25th would bring epsilon from 0.990 to 1.013. Another run is no way out."""
    ours = ledger(tmp_path)
    charged = 0
    with pytest.raises(
        FederationError, match=r"a job would cost epsilon 0.1816; with the 0.9901 that this site's data has spent"
    ):
        while True:
            ours.charge(numbered(charged), "a job", FIT)
            charged += 1
    assert charged == len(lines(tmp_path)) == 24
    assert ledger(tmp_path).spent()[0] == pytest.approx(0.990, abs=5e-4)
    with pytest.raises(
        FederationError, match=r"the site's cap is 1 \(delta 1e-05, rdp\); ask for less, or let the site raise"
    ):
        ledger(tmp_path, run="another run").charge(ONE, "a job", FIT)
    ledger(tmp_path).charge(ONE, "a small job", [Release("histogram", noise=1000.0)])
    ledger(tmp_path, Budget(epsilon=2.0, accountant="rdp")).charge(TWO, "a job", FIT)
    assert len(lines(tmp_path)) == 26


def test_the_accountant_of_the_cap_decides(tmp_path):
    """Noise 5 costs 0.7255 by loss distributions and 0.7945 by Renyi divergences; the cap is 0.75. Twice it costs 1.061."""
    costly = [Release("fit", noise=5.0)]
    with pytest.raises(FederationError, match="would cost epsilon 0.7945"):
        ledger(tmp_path, Budget(epsilon=0.75, accountant="rdp")).charge(ONE, "a job", costly)
    ledger(tmp_path, Budget(epsilon=0.75)).charge(ONE, "a job", costly)
    with pytest.raises(FederationError, match="would cost epsilon 0.7255; with the 0.7255 .* that is 1.061"):
        ledger(tmp_path, Budget(epsilon=0.75)).charge(TWO, "a job", costly)


def test_what_cannot_be_judged_is_refused_before_anything_is_written(tmp_path):
    for release in (Release("fit"), Release("fit", noise=math.nan), Release("fit", noise=1.0, rate=0.0)):
        with pytest.raises(RecipeError):
            ledger(tmp_path).charge(ONE, "a job", [release])
    assert lines(tmp_path) == [] and ledger(tmp_path).spent() == (0.0, 1e-5)
    with pytest.raises(FederationError, match="'../../x'; it must be a hexadecimal digest"):
        ledger(tmp_path).charge("../../x", "a job", FIT)


def test_a_repeated_order_costs_once_and_gets_the_same_bytes(tmp_path):
    ours = ledger(tmp_path)
    assert ours.reply(ONE) is None
    ours.charge(ONE, "a job", FIT)
    assert ours.reply(ONE) is None
    ours.store(ONE, b"the reply\n\r\0")
    assert ours.reply(ONE) == ledger(tmp_path).reply(ONE) == b"the reply\n\r\0"
    assert ours.reply(TWO) is None and len(ours.entries()) == 1


def test_an_order_that_was_killed_is_not_charged_again_but_one_whose_reply_left_is(tmp_path):
    """Before `store` nothing has left the site. After it, the same order done again is another release."""
    killed = ledger(tmp_path)
    killed.charge(ONE, "a job", FIT)
    killed.charge(ONE, "a job", FIT)
    killed.close()  # as the end of its process does
    ours = ledger(tmp_path)
    ours.charge(ONE, "a job", FIT)
    assert len(ours.entries()) == 1
    ours.charge(ONE, "a job", [Release("fit", noise=30.0)])  # less noise or more: it is another one
    assert len(ours.entries()) == 2
    ours.store(ONE, b"reply")
    (tmp_path / "ledgers" / "data" / ONE).write_bytes(b"damaged")
    assert ours.reply(ONE) is None
    ours.charge(ONE, "a job", FIT)
    assert len(ours.entries()) == 3 and ours.reply(ONE) is None
    ours.store(ONE, b"another")
    assert ours.reply(ONE) == b"another"


def test_a_reply_that_was_not_committed_is_not_sent(tmp_path):
    """Killed between the reply's file and its line in the ledger."""
    ours = ledger(tmp_path)
    ours.charge(ONE, "a job", FIT)
    ours.store(ONE, b"reply")
    path = tmp_path / "ledgers" / "data.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    again = ledger(tmp_path)
    assert again.reply(ONE) is None
    again.charge(ONE, "a job", FIT)
    assert len(again.entries()) == 1


def test_two_processes_cannot_do_one_order_for_one_charge(tmp_path):
    """They can do different ones, and each sees what the other has spent."""
    first, second = ledger(tmp_path), ledger(tmp_path)
    first.charge(ONE, "a job", FIT)
    with pytest.raises(FederationError, match="a job: another process on this data is doing this order"):
        second.charge(ONE, "a job", FIT)
    second.charge(TWO, "a job", FIT)
    assert len(first.entries()) == 2
    second.close()
    first.charge(TWO, "a job", FIT)
    assert len(first.entries()) == 2
    first.store(ONE, b"reply")
    second.charge(ONE, "a job", FIT)
    assert len(first.entries()) == 3 and first.reply(ONE) is None


def test_what_was_not_charged_gets_neither_noise_nor_a_stored_reply(tmp_path):
    ours = ledger(tmp_path)
    for call in (lambda: ours.nonce(ONE), lambda: ours.store(ONE, b"reply")):
        with pytest.raises(FederationError, match=f"the order {ONE[:12]} has not been charged here"):
            call()
    ours.charge(ONE, "a job", FIT)
    (tmp_path / "ledgers" / "data.jsonl").write_text("")
    with pytest.raises(RunError, match="the charge of an order is gone"):
        ours.store(ONE, b"reply")


def test_nonces_are_counted_and_differ_even_where_random_bytes_repeat(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "urandom", bytes)
    ours = ledger(tmp_path)
    ours.charge(ONE, "a job", FIT)
    nonces = [ours.nonce(ONE) for _ in range(3)]
    again = ledger(tmp_path)
    again.charge(TWO, "a job", FIT)
    nonces.append(again.nonce(TWO))
    assert len(set(nonces)) == 4 and all(len(nonce) == 16 for nonce in nonces)
    assert [line["count"] for line in lines(tmp_path) if line["kind"] == "nonce"] == [1, 2, 3, 4]


def test_nonces_differ_where_the_count_repeats(tmp_path):
    """As after the ledger was restored from a backup."""
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        ours = ledger(folder)
        ours.charge(ONE, "a job", FIT)
        found.append(ours.nonce(ONE))
    assert found[0] != found[1]


def test_only_the_last_replies_of_a_run_are_kept(tmp_path):
    ours, theirs = ledger(tmp_path), ledger(tmp_path, run="another run")
    for i, book in enumerate([theirs, ours, ours, ours]):
        book.charge(numbered(i), "a job", FIT)
        book.store(numbered(i), b"%d" % i)
    ours.keep(2)
    assert [ours.reply(numbered(i)) for i in range(4)] == [b"0", None, b"2", b"3"]
    ours.charge(numbered(1), "a job", FIT)  # its reply has left, so this is another release
    assert len(ours.entries()) == 5
    ours.keep(9)
    ours.keep(0)
    assert [ours.reply(numbered(i)) for i in range(4)] == [b"0", None, None, None]


def test_a_torn_last_line_is_cut_wherever_it_was_torn(tmp_path):
    ours = ledger(tmp_path)
    ours.charge(ONE, "a job", FIT)
    path = tmp_path / "ledgers" / "data.jsonl"
    before = path.read_bytes()
    ours.charge(TWO, "a job", FIT)
    whole = path.read_bytes()
    for end in range(len(before), len(whole)):
        path.write_bytes(whole[:end])
        assert [entry.key for entry in ledger(tmp_path).entries()] == [ONE] and path.read_bytes() == before
    path.write_bytes(whole[:-1])
    ledger(tmp_path).charge(numbered(3), "a job", FIT)
    assert [entry.key for entry in ledger(tmp_path).entries()] == [ONE, numbered(3)]


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_line_that_was_changed_or_removed_is_named(tmp_path, line):
    ours = ledger(tmp_path)
    for i in range(3):
        ours.charge(numbered(i), "a job", FIT)
    path = tmp_path / "ledgers" / "data.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    for bad in (b"", b"\n", b"{}\n", b"[]\n", b"\xff\n", good[line - 1].replace(b"charge", b"xharge")):
        path.write_bytes(b"".join([*good[: line - 1], bad, *good[line:]]))
        if bad or line < 3:  # that the last line is missing cannot be seen
            with pytest.raises(RunError, match=rf"data.jsonl, line {line}: damaged or changed by hand .* from a backup"):
                ledger(tmp_path).charge(numbered(9), "a job", FIT)
    if line < 3:
        path.write_bytes(b"".join(good).replace(b"20.0", b"99.0", line))
        with pytest.raises(RunError, match=r"line 2: .*it does not follow the line before it"):
            ledger(tmp_path).spent()


def test_every_call_returns_after_its_line_and_its_file_are_on_disk(tmp_path, monkeypatch):
    """What is synced last has its final size, and nothing is written after."""
    synced, sync = {}, os.fsync

    def watched(handle):
        sync(handle)
        found = os.fstat(handle)
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", watched)
    ours = ledger(tmp_path)
    path, replies = tmp_path / "ledgers" / "data.jsonl", tmp_path / "ledgers" / "data"
    ours.entries()
    assert {path.stat().st_ino, path.parent.stat().st_ino, tmp_path.stat().st_ino} <= synced.keys()
    for call in (lambda: ours.charge(ONE, "a job", FIT), lambda: ours.nonce(ONE), lambda: ours.store(ONE, b"reply")):
        synced.clear()
        call()
        assert synced[path.stat().st_ino] == path.stat().st_size
    assert synced[(replies / ONE).stat().st_ino] == 5 and replies.stat().st_ino in synced


def test_a_full_disk_refuses_the_charge(tmp_path, monkeypatch):
    ours = ledger(tmp_path)
    ours.entries()

    def full(handle):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        ours.charge(ONE, "a job", FIT)
    with pytest.raises(FederationError, match="has not been charged here"):
        ours.nonce(ONE)


@pytest.mark.parametrize(
    "variables, folder",
    [
        ({"EFFUSE_LEDGERS": "/safe/place", "XDG_STATE_HOME": "/state"}, "/safe/place"),
        ({"XDG_STATE_HOME": "/state"}, "/state/effuse/ledgers"),
        ({"HOME": "/home/x"}, "/home/x/.local/state/effuse/ledgers"),
    ],
)
def test_ledgers_lie_in_the_users_state(monkeypatch, variables, folder):
    for name in ("EFFUSE_LEDGERS", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ledger_folder() == Path(folder) and ledger_path("a1b2") == Path(folder) / "a1b2.jsonl"


def test_the_key_of_an_order_depends_on_every_part_and_where_it_ends():
    keys = {order_key(*parts) for parts in ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"ab", b"c", b""), (b"ab", b"d"))}
    assert len(keys) == 5 and order_key(b"ab", b"c") == order_key(b"ab", b"c")


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from effuse.core.privacy import Budget, Release
from effuse.privacy.ledger import Ledger, order_key

path, kills = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(0)
Ledger(path, Budget(epsilon=1e6, accountant="rdp")).charge(order_key(b"first"), "a job", [Release("fit", noise=20.0)])

def work(turn):
    ours, number = Ledger(path, Budget(epsilon=1e6, accountant="rdp")), 0
    while True:
        key = order_key(b"%d, %d" % (turn, number))
        number += 1
        ours.charge(key, "a job", [Release("fit", noise=20.0)])
        os.write(1, b"charged %s\\n" % key.encode())
        os.write(1, b"nonce %s\\n" % ours.nonce(key).hex().encode())
        ours.store(key, key.encode() * 1000)
        os.write(1, b"stored %s\\n" % key.encode())

for turn in range(kills):
    children = []
    for _ in range(2):  # two processes on the same data
        child = os.fork()
        if child == 0:
            work(2 * turn + len(children))
        children.append(child)
    time.sleep(draw.uniform(0.02, 0.1))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


def test_whatever_the_ledger_reported_survives_a_kill_at_any_moment(tmp_path):
    """Fifty times, two processes on the same data are killed while they charge."""
    path = tmp_path / "ledgers" / "data.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), "50"], capture_output=True, text=True, timeout=120, check=True
    )
    said = [line.split() for line in done.stdout.splitlines()]
    charged, nonces, stored = ([w[1] for w in said if w[0] == kind] for kind in ("charged", "nonce", "stored"))
    assert len(charged) > 50 and len(stored) > 20
    ours = Ledger(path, Budget(epsilon=1e6, accountant="rdp"))
    keys = [entry.key for entry in ours.entries()]
    assert set(charged) <= set(keys) and len(keys) == len(set(keys))
    assert len(keys) - 1 - len(charged) <= 100  # killed between a charge and its report
    assert len(nonces) == len(set(nonces))
    counts = [line["count"] for line in lines(tmp_path) if line["kind"] == "nonce"]
    assert counts == list(range(1, len(counts) + 1)) and len(counts) >= len(nonces)
    assert all(ours.reply(key) == key.encode() * 1000 for key in stored)


def test_what_protects_images_does_not_protect_groups(tmp_path):
    """A group's release protects each of its images; the reverse does not hold."""
    groups = Budget(epsilon=1.0, unit="group", accountant="rdp")
    ledger(tmp_path, groups).charge(ONE, "a job", FIT)
    ledger(tmp_path).charge(TWO, "a job", FIT)
    assert [entry.unit for entry in ledger(tmp_path).entries()] == ["group", "image"]
    for call in (lambda book: book.charge(numbered(3), "a job", FIT), lambda book: book.foresee("a run", FIT)):
        with pytest.raises(
            FederationError, match="would protect each group, but this site's data has been charged for each"
        ):
            call(ledger(tmp_path, groups))


def test_a_run_is_foreseen_beside_the_charges_of_others(tmp_path):
    """24 fits cost 0.990 of 1. Its own charges are a part of what a run was going to cost."""
    ours, theirs = ledger(tmp_path, run="ours"), ledger(tmp_path, run="theirs")
    for i in range(4):
        ours.charge(numbered(i), "a job", FIT)
    ours.foresee("the run", 24 * FIT)
    assert ours.beside(24 * FIT) == epsilon_of(24 * FIT, 1e-5, "rdp")
    with pytest.raises(FederationError, match="the run would cost epsilon 0.9.*; with the 0.3.* that this site's data has"):
        theirs.foresee("the run", 21 * FIT)
    theirs.foresee("the run", 20 * FIT)
    assert len(lines(tmp_path)) == 4, "nothing is charged"


def test_a_run_keeps_its_own_budget_whatever_the_site_allows_all_runs(tmp_path):
    """Noise 10 once costs 0.3407, twice 0.5 and more; the site allows 10 in all. Another run has a budget of its own."""
    path, budget = tmp_path / "ledgers" / "data.jsonl", Budget(epsilon=0.35)
    one = Ledger(path, Budget(epsilon=10.0), "a" * 64, budget)
    release = [Release("fit", noise=10.0)]
    one.charge(order_key(b"first"), "round 1", release)
    before = path.read_bytes()
    with pytest.raises(FederationError, match=r"round 2: this run has spent epsilon 0.3407, .* its budget of 0.35"):
        one.charge(order_key(b"second"), "round 2", release)
    assert path.read_bytes() == before
    again = Ledger(path, Budget(epsilon=10.0), "a" * 64, budget)
    with pytest.raises(FederationError, match="its budget of 0.35"):
        again.charge(order_key(b"second"), "round 2", release)
    Ledger(path, Budget(epsilon=10.0), "b" * 64, budget).charge(order_key(b"second"), "round 2", release)


@pytest.mark.parametrize("bad", [b"[" * 3000 + b"\n", b'{"after": "", "kind": "nonce", "key": "ab", "count": Infinity}\n'])
def test_a_line_that_python_cannot_read_is_damaged_as_any_other(tmp_path, bad):
    ours = ledger(tmp_path)
    (tmp_path / "ledgers").mkdir()
    (tmp_path / "ledgers" / "data.jsonl").write_bytes(bad)
    with pytest.raises(RunError, match="line 1: damaged or changed by hand"):
        ours.entries()


def test_releases_beyond_all_numbers_cost_more_than_any_cap(tmp_path):
    """1e308 steps of a noise of 0.01 have an infinite divergence: epsilon is infinite. Noise without bound costs nothing."""
    ledger(tmp_path).charge(TWO, "a job", (Release("fit", noise=1e300),))
    with pytest.raises(FederationError, match="would cost epsilon inf"):
        ledger(tmp_path).charge(ONE, "a job", (Release("fit", noise=0.01, steps=10**308),))
