"""Time the page of a large run: writing it, opening it, and its share of a round of the demo.

    python benchmarks/report.py [--quick] [--json] [--rounds 500] [--clients 100]

The run folder is synthetic: every round has the traffic, losses and times of all clients, and every tenth a grid of noise.
Opening is measured in headless Chromium through Playwright, from the request to the end of the `load` event; the best of
three. Without either of them it is left out. The demo is trained for a few rounds, evaluated after each; what pages cost is
measured in the same run. Wanted: under 2 s to open, under 15 MB, under 2 % of a round.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.core.metric import Measurement
from effuse.recipes.demo import demo
from effuse.report import writer
from effuse.runs import driver
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer
from effuse.runs.records import ClientRecord, Result, RoundRecord, Seconds, Split, Sums, Traffic

MODEL = 12_713_620  # bytes up and down in a round, as of the demo
EVERY = 10  # rounds between evaluations


def build(path: Path, rounds: int, clients: int) -> None:
    """A finished run of so many rounds and clients."""
    rng, folder = np.random.default_rng(0), RunFolder(path)
    path.mkdir(parents=True)
    recipe = dataclasses.replace(demo(), rounds=rounds, clients=clients)
    folder.create(recipe, "demo", "simulator", "cpu", None, {}, classes=[str(i) for i in range(10)])
    counts = rng.multinomial(50, np.full(10, 0.1), size=clients)
    folder.write_json("partition.json", Split(counts.tolist()).to_json())
    for t in range(rounds):
        folder.append(line(rng, t, clients, t % EVERY == EVERY - 1))
    (path / "samples").mkdir()
    for t in range(EVERY, rounds + 1, EVERY):  # noise is the worst case of a PNG
        noise = rng.integers(0, 256, (332, 332, 3), np.uint8).repeat(2, 0).repeat(2, 1)
        Image.fromarray(noise).save(path / "samples" / f"round-{t:05d}.png")
    end = {name: Measurement(value, {"n": 1000}) for name, value in metrics(rng, rounds).items()}
    sent = line(rng, rounds, clients, False).traffic
    result = Result(
        weights_sha256="0" * 64,
        metrics=end,
        rounds=rounds,
        traffic=dataclasses.replace(sent, clients=None),
        parameters=635_681,
        images=rounds * 5000,
        seconds=10.0 * rounds,
    )
    folder.write_json("result.json", result.to_json())


def line(rng: np.random.Generator, t: int, clients: int, evaluated: bool) -> RoundRecord:
    """A round of the synthetic run."""
    nothing, both = Sums(0, 0, 0), Sums(MODEL, MODEL, 2 * MODEL)
    each = {"parameters": MODEL // 4, "bytes": MODEL, "wire_bytes": 0, "messages": clients}
    share = {"up": MODEL // clients, "down": MODEL // clients}
    links = {"client-server": {"up": each, "down": each}}
    sent = Traffic(both, both, nothing, nothing, links, clients={str(k): share for k in range(clients)})
    own = {str(k): ClientRecord(float(rng.random()), float(rng.random())) for k in range(clients)}
    about: dict[str, Any] = {
        "t": t,
        "phase": "federate",
        "federated": t + 1,
        "loss": float(np.exp(-t / 100)),
        "images": 5000,
    }
    found = metrics(rng, t) if evaluated else None
    return RoundRecord(**about, seconds=Seconds(9.0, 10.0), clients=own, metrics=found, traffic=sent)


def metrics(rng: np.random.Generator, t: int) -> dict[str, float]:
    return {name: float(50 * np.exp(-t / 200) + rng.random()) for name in ("fid", "kid", "accuracy", "diversity")}


def opened(page: Path) -> float | None:
    """Seconds until a browser has loaded a page; None where there is no browser."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found = []
        for _ in range(3):
            tab = browser.new_page()
            began = time.monotonic()
            tab.goto(page.as_uri(), wait_until="load")
            assert tab.locator("#pictures figure:visible").count() == 1
            found.append(time.monotonic() - began)
            tab.close()
        browser.close()
    return min(found)


class Timed(writer.Reporting):
    """Adds up the time that pages take."""

    def __init__(self) -> None:
        super().__init__(Observer())
        self.spent, self.pages = 0.0, 0

    def _write(self) -> None:
        began = time.monotonic()
        super()._write()
        self.spent, self.pages = self.spent + time.monotonic() - began, self.pages + 1


def overhead(folder: Path, rounds: int, quick: bool) -> dict[str, float]:
    """The demo with an evaluation after every round: the time of its pages, and their share of all rounds' time."""
    settings = [f"rounds={rounds}", "evaluate.every=1"]
    settings += ["algorithm.local.epochs=None", "algorithm.local.steps=1", "evaluate.metrics=[]"] if quick else []
    watch = Timed()
    driver.run(demo().changed(settings), folder, name="demo", observer=watch)
    total = sum(record.seconds.total for record in RunFolder(folder).records())
    return {
        "rounds": rounds,
        "seconds": total,
        "pages": watch.pages,
        "page_seconds": watch.spent,
        "share": watch.spent / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run, and little training")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--clients", type=int, default=100)
    arguments = parser.parse_args()
    rounds, clients = (20, 5) if arguments.quick else (arguments.rounds, arguments.clients)
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        build(run, rounds, clients)
        began = time.monotonic()
        page = writer.write_report(run)
        found: dict[str, Any] = {"rounds": rounds, "clients": clients, "write_seconds": time.monotonic() - began}
        found |= {"page_mb": page.stat().st_size / 1e6, "open_seconds": opened(page)}
        found["demo"] = overhead(Path(scratch) / "demo", 2 if arguments.quick else 4, arguments.quick)
    if arguments.json:
        print(json.dumps(found))
        return
    opening = "not opened: no browser" if found["open_seconds"] is None else f"opened in {found['open_seconds']:.2f} s"
    written = f"written in {found['write_seconds']:.2f} s, {found['page_mb']:.1f} MB"
    print(f"{rounds} rounds, {clients} clients: {written}, {opening}")
    share = found["demo"]
    print(f"demo: {share['pages']} pages in {share['page_seconds']:.3f} s of {share['seconds']:.1f} s, {share['share']:.2%}")


if __name__ == "__main__":
    main()
