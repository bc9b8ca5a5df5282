"""Run a plan of commands on a machine that is lent for minutes, and bring home what they finish.

    setsid python tools/lease.py run PLAN --runs RUNS --effuse 'python3 bundle/effuse' &    # on that machine
    python tools/lease.py home RUNS --to OUT --seconds 540                                  # wait, then write OUT/part-*
    cat OUT/part-* | tar x -C runs                                                          # at home, after each call

A plan has one command a line, in lanes that run beside each other:

    [lane]
    reproduce fedddpm.headline --only method=auxiliary,seed=0
    below fedddpm.headline-paper/auxiliary-0 fid_auxiliary 10
    reproduce fedddpm.headline --only method=fedddpm,seed=0

Lines are commands of effuse. The runs of a table go to RUNS/TABLE-SCALE, of `run` to RUNS/NAME (`--out NAME`). A lane ends
at a command that fails, and at `below RUN METRIC LIMIT` if the run's number is not below the limit. Every `home` brings
what is new: first records and pictures, then preparations and models, then checkpoints of unfinished runs.
"""

import argparse
import io
import json
import shlex
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

MIB = 2**20
DONE, BROUGHT, LOGS = ".done", ".brought", "logs"
RECORDS, VALUES = {".json", ".jsonl", ".txt", ".log", ".png"}, ".safetensors"


class Ended(Exception):
    """A lane may not go on."""


def lanes_of(plan: str) -> list[list[str]]:
    """The commands of each lane; text after # is a comment."""
    lanes: list[list[str]] = []
    for line in (line.partition("#")[0].strip() for line in plan.splitlines()):
        if line == "[lane]":
            lanes.append([])
        elif line and not lanes:
            sys.exit(f"{line!r} stands before the first [lane]; add one above it")
        elif line:
            lanes[-1].append(line)
    return lanes


def command_of(line: str, runs: Path, effuse: list[str]) -> list[str]:
    """A line as a command whose runs are below `runs`."""
    words = shlex.split(line)
    if words[0] == "reproduce" and "--out" not in words:
        scale = words[words.index("--scale") + 1] if "--scale" in words else "paper"
        words += ["--out", f"{words[1]}-{scale}"]
    if "--out" in words:
        at = words.index("--out") + 1
        words[at] = str(runs / words[at])
    return [*effuse, *words]


def require_below(runs: Path, run: str, name: str, limit: str) -> None:
    """End the lane unless a run's number is below a limit; a number that is missing or no number is not."""
    file = runs / run / "result.json"
    if not file.exists():
        raise Ended(f"{run} has not finished")
    found = json.loads(file.read_text())["metrics"].get(name, {}).get("value")
    if found is None or not found < float(limit):
        raise Ended(f"{run} has {name} {found}, which is not below {limit}")


def run_lane(number: int, lines: list[str], runs: Path, effuse: list[str]) -> None:
    log = runs / LOGS / f"lane-{number}.log"
    with log.open("a") as out:
        for line in lines:
            began = time.time()
            try:
                if line.startswith("below "):
                    require_below(runs, *shlex.split(line)[1:])
                elif code := subprocess.run(command_of(line, runs, effuse), stdout=out, stderr=out).returncode:
                    raise Ended(f"exit code {code}")
            except Ended as why:
                print(f"== {line}: {why}; the lane ends here", file=out, flush=True)
                return
            print(f"== {line}: {time.time() - began:.0f} s", file=out, flush=True)


def run(plan: Path, runs: Path, effuse: list[str]) -> None:
    lanes = lanes_of(plan.read_text())
    (runs / LOGS).mkdir(parents=True, exist_ok=True)
    threads = [threading.Thread(target=run_lane, args=(i, lines, runs, effuse)) for i, lines in enumerate(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (runs / DONE).touch()


def rank(file: Path, runs: Path) -> int | None:
    """When a file comes home: records and pictures first, checkpoints of unfinished runs last; None stays."""
    if file.suffix in RECORDS:
        return 0
    if file.suffix != VALUES:
        return None
    if file.name == "prepared.safetensors" or any(folder.name.startswith("model") for folder in file.parents):
        return 1
    finished = any((runs / folder / "result.json").exists() for folder in file.relative_to(runs).parents)
    return None if finished else 2


def fresh(runs: Path) -> list[Path]:
    """The files that have changed since they were brought, in the order in which they come home."""
    brought = json.loads((runs / BROUGHT).read_text()) if (runs / BROUGHT).exists() else {}
    ranked = sorted((r, p) for p in runs.rglob("*") if p.is_file() and (r := rank(p, runs)) is not None)
    return [p for _, p in ranked if brought.get(str(p.relative_to(runs))) != _version(p)]


def _version(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_mtime_ns, found.st_size]


def home(runs: Path, to: Path, seconds: float, part: float, parts: int) -> None:
    """Wait until the plan is done or the time is up; then write what is new, in parts of limited size."""
    until = time.time() + seconds
    while time.time() < until and not (runs / DONE).exists():
        time.sleep(1)
    brought = json.loads((runs / BROUGHT).read_text()) if (runs / BROUGHT).exists() else {}
    packed, left = io.BytesIO(), []
    room = int(part * MIB) * parts - tarfile.RECORDSIZE  # the archive's end
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in fresh(runs):
            version, blob = _version(file), file.read_bytes()  # a running command may write it again
            if packed.tell() + len(blob) + 2 * tarfile.RECORDSIZE > room:
                left.append(file)
                continue
            entry = tarfile.TarInfo(str(file.relative_to(runs)))
            entry.size, entry.mtime = len(blob), int(file.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(blob))
            brought[entry.name] = version
    to.mkdir(parents=True, exist_ok=True)
    blob, size = packed.getvalue(), int(part * MIB)
    for i in range(0, len(blob), size):
        (to / f"part-{i // size:02d}").write_bytes(blob[i : i + size])
    (runs / BROUGHT).write_text(json.dumps(brought))
    state = "the plan is done" if (runs / DONE).exists() else "the plan goes on"
    print(f"{state}; {len(blob) / MIB:.1f} MiB in {to}, {len(left)} files left for the next call")
    for log in sorted((runs / LOGS).glob("*.log")):
        print(f"-- {log.name}", *log.read_text().splitlines()[-4:], sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run a plan's lanes beside each other")
    running.add_argument("plan", type=Path)
    running.add_argument("--runs", type=Path, required=True, help="the folder of all runs")
    running.add_argument("--effuse", default="effuse", help="the command that starts effuse")
    coming = commands.add_parser("home", help="wait, then write what is new in parts")
    coming.add_argument("runs", type=Path)
    coming.add_argument("--to", type=Path, required=True, help="the folder for the parts")
    coming.add_argument("--seconds", type=float, default=0.0, help="how long to wait for the end of the plan")
    coming.add_argument("--part", type=float, default=15.0, help="largest size of a part in MiB")
    coming.add_argument("--parts", type=int, default=4, help="largest number of parts")
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked.plan, asked.runs, shlex.split(asked.effuse))
    else:
        home(asked.runs, asked.to, asked.seconds, asked.part, asked.parts)


if __name__ == "__main__":
    main()
