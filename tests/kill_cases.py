"""Seeded cases of `kills.py`: an algorithm, an engine, one or two strokes; the run must end as if nothing had happened."""

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fake import EVERYONE, FakeChannel, over
from kills import FAILED, STOPPED, SURVIVED, Fate, Stroke, forked, outcome
from toy import ALGORITHMS, toy_recipe

from effuse.algorithms.centralised import Centralised
from effuse.core.recipe import Evaluate, Recipe
from effuse.diffusion.samplers import Ancestral
from effuse.runs import driver, rounds
from effuse.transport.flower import enrolment, server
from effuse.transport.flower.messages import ORDER, Packet

ENGINES = ("simulator", "loopback", "processes", "sites", "grid")  # `grid` are sites behind a network with faults
CASES = [
    (name, engine)
    for name, algorithm in ALGORITHMS.items()
    for engine in ENGINES
    if engine in ("simulator", "loopback") or not isinstance(algorithm, Centralised)
]
EVENTS = ("write", "sync", "rename", "delete", "job", "fit", "draw")
KILLS = {"kill": EVENTS, "power": ("write", "sync", "rename", "job"), "torn": ("write",), "full": ("write",)}
SHARES = (1e9, 1e9, 0.1, 0.0)  # of the time that checkpoints may take: every round, as usual, the first round only


class Reference(NamedTuple):
    """An undisturbed run."""

    outcome: dict[str, Any]
    counts: Counter[str]
    seconds: float


class Troubled(FakeChannel):
    """A network that breaks, delays answers, delivers them twice, and whose sites restart."""

    def __init__(self, folder: Path, clients: int, draw: random.Random) -> None:
        super().__init__(folder, clients)
        self.draw, self.troubles = draw, 12

    def collect(self, tickets, patience):
        # as a real site does, one that has restarted keeps an order until it has seen the terms again
        ready = [t for t in tickets if not (t in self.packets and self.early(*self.packets[t]))]
        for ticket, reply in super().collect(ready, patience):
            trouble = self.draw.choice(["none", "none", "late", "twice", "break", "restart"]) if self.troubles else "none"
            self.troubles -= trouble != "none"
            if trouble == "late":
                self.held.append((ticket, reply))
                continue
            yield ticket, reply
            if trouble == "twice":
                yield ticket, reply
            elif trouble == "break":
                self.broken = True
                self.check()
            elif trouble == "restart":
                self.restart(self.draw.choice([*self.sites]) - 100)

    def early(self, node: int, packet: Packet) -> bool:
        return packet.kind == ORDER and node in self.sites and self.sites[node].worker is None


def recipe_of(name: str) -> Recipe:
    evaluate, sampler = Evaluate(grid=2, every=2), Ancestral(batch=2)
    return toy_recipe(algorithm=ALGORITHMS[name], rounds=3, reproducible=True, evaluate=evaluate, sampler=sampler)


def act(name: str, engine: str, run: Path, fate: Fate, share: float, draw: random.Random) -> Callable[[], Any]:
    """Start a run, or resume it if it has begun; in a forked process."""

    def action() -> None:
        rounds.CHECKPOINT_SHARE = share
        enrolment.INVITE_AGAIN = server.POLL = server.LIST_NODES = 0.0
        channel = None
        if engine == "sites":
            channel = FakeChannel(run.parent / "sites", 3)
        elif engine == "grid":
            channel = Troubled(run.parent / "sites", 3, draw)
        options: dict[str, Any] = {} if channel is None else {"served": over(channel, EVERYONE)}
        workers = {"workers": 2} if engine == "processes" else {}
        fate.install()
        if (run / "manifest.json").exists():
            driver.resume(run, **options, **workers)
        else:
            kind = engine if engine == "loopback" else "simulator"
            driver.run(recipe_of(name), run, name="toy", engine=kind, **options, **workers)
        fate.stroke, fate.full = None, False  # this file is none of the run's
        (run.parent / "counts").write_text(" ".join(f"{event}={n}" for event, n in fate.counts.items()))

    return action


class Proof:
    """Undisturbed runs, each done once, and disturbed ones beside them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.known: dict[tuple[str, str], Reference] = {}
        self.struck: Counter[str] = Counter()  # what -> how often a process ended by it
        driver.run(recipe_of("fedavg"), folder / "warm")  # now this process has imported all that a run imports
        served = over(FakeChannel(folder / "warm-sites", 3), EVERYONE)
        driver.run(recipe_of("feddiff, two kinds of networks"), folder / "warm-served", served=served)

    def reference(self, name: str, engine: str) -> Reference:
        engine = "sites" if engine == "grid" else engine
        if (name, engine) not in self.known:
            home = self.folder / f"quiet-{engine}-{list(ALGORITHMS).index(name)}"
            home.mkdir(parents=True)
            run = home / "run"
            began = time.monotonic()
            code = forked(act(name, engine, run, Fate(home), 1e9, random.Random(0)), home / "log")
            assert code == SURVIVED, (home / "log").read_text()
            seconds = time.monotonic() - began
            counts = Counter({event: int(n) for event, n in map(_halves, (home / "counts").read_text().split())})
            if engine == "processes":  # what happens in the workers is not counted; it is that of loopback
                counts = self.reference(name, "loopback").counts | counts
            self.known[name, engine] = Reference(outcome(run), counts, seconds)
            shutil.rmtree(home)
        return self.known[name, engine]

    def prove(self, number: int) -> None:
        """One case: strokes until one or two have fallen, then a resume to the end, which must equal the undisturbed one."""
        draw = random.Random(f"{self.seed} {number}")
        order = random.Random(self.seed).sample(CASES, len(CASES))  # all of them come before one comes again
        name, engine = order[number % len(order)]
        quiet = self.reference(name, engine)
        home = self.folder / f"case-{number}"
        home.mkdir()
        story = [f"repeat it by `python -m pytest tests_faults --seed {self.seed} --case {number}`: {name}, {engine}"]
        for _ in range(draw.choice([1, 1, 1, 2])):
            story.append(self._strike(story[0], name, engine, home, quiet, draw))
        code = forked(act(name, engine, home / "run", Fate(home), draw.choice(SHARES), draw), home / "log")
        words = "; ".join(story) + "\n" + (home / "log").read_text()[-3000:]
        assert code == SURVIVED, words
        traffic = engine != "grid"
        found = outcome(home / "run", traffic)
        expected = quiet.outcome if traffic else _without_traffic(quiet.outcome)
        for key, value in expected.items():
            assert found[key] == value, f"{key} differs; {words}"
        assert not (left := list(home.rglob("*.partial"))), f"{left} is left; {words}"
        shutil.rmtree(home)

    def _strike(self, case: str, name: str, engine: str, home: Path, quiet: Reference, draw: random.Random) -> str:
        """Run until a stroke has fallen; one that did not, because the run was over before, is tried again earlier."""
        stroke, share, salt = self._drawn(engine, quiet.counts, draw), draw.choice(SHARES), draw.random()
        while True:
            fate = Fate(home, stroke, quiet.counts, seed=draw.randrange(1 << 30))
            after = stroke.at * quiet.seconds if stroke.what == "timer" else None
            trouble = random.Random(salt)
            code = forked(act(name, engine, home / "run", fate, share, trouble), home / "log", after)
            if code != SURVIVED:
                break
            if (home / "run" / "result.json").exists() and stroke.at < 0.01:
                return f"{stroke} never fell"
            shutil.rmtree(home)
            home.mkdir()
            stroke = stroke._replace(at=stroke.at / 2)
        words = f"{case}; {stroke}\n{(home / 'log').read_text()[-3000:]}"
        assert code != FAILED, words
        assert code == -9 or stroke.what == "full" or stroke.worker is not None, words
        assert code in (-9, STOPPED), words
        self.struck[f"{stroke.what}, {'worker' if stroke.worker is not None else engine}"] += 1
        return str(stroke)

    def _drawn(self, engine: str, counts: Counter[str], draw: random.Random) -> Stroke:
        what, at = draw.choice(["kill", "kill", "power", "torn", "full", "timer"]), draw.random()
        if what == "timer":
            return Stroke(what, "time", at)
        # a power cut strikes all processes at once; which files the disk holds is known of this one's only
        apart = engine == "processes" and what in ("kill", "torn", "full") and draw.random() < 0.5
        worker = draw.randrange(2) if apart else None
        here = ("write", "rename", "job") if worker is not None else EVENTS
        if engine == "processes" and worker is None:
            here = ("write", "sync", "rename")
        events = [event for event in KILLS[what] if event in here and counts[event]]
        return Stroke(what, draw.choice(events), at / 2 if worker is not None else at, worker)


def _halves(word: str) -> tuple[str, str]:
    event, _, n = word.partition("=")
    return event, n


def _without_traffic(quiet: dict[str, Any]) -> dict[str, Any]:
    records = [{k: v for k, v in record.items() if k != "traffic"} for record in quiet["rounds.jsonl"]]
    result = {k: v for k, v in quiet["result"].items() if k != "traffic"} | {"figures": None}
    return {"result": result, "rounds.jsonl": records, "ledger": None}
