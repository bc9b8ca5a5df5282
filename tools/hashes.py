"""Compare what two checkouts of effuse compute, bit by bit.

    EFFUSE_DATA=DATA python tools/hashes.py OLD NEW --out DIR

OLD and NEW are paths of source trees. Both run every algorithm of their tests/toy.py and every recipe of `effuse list`,
on this machine's CPU and with the same number of threads. SETTINGS shortens recipes to seconds. The exit code is 1 if
anything differs.

These parts of two runs are compared:

- result: result.json, without times
- weights: every tensor of the saved models, parameters and buffers
- grids: the pixels of the sample grids
- drawn: images that `effuse.load(run).sample` draws from the saved models
- clients: the tensors and plain values of every client's newest state, without the names of keys and message types
- server: the tensors of the last checkpoint and of the server's own optimiser
- losses: the loss of every round
- ledger: ledger.json

Times and bytes on the wire (`wire_bytes`) in result.json and ledger.json are ignored: names of messages travel, and may
change. A run whose data are not in EFFUSE_DATA is listed as "no data".

With --out the runs are saved. Runs of a checkout whose source has not changed are reused.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

DRAWN, SEED = 8, 7
MUST_HAVE = ("result", "weights", "ledger")  # a run without one of them proves nothing
TIMES = ("seconds", "round_seconds")
ENDED = "ended.json"  # in the folder of a run: how it ended
OK, NO_DATA = "ok", "no data"

MEASURED = "evaluate=evaluate(grid=20, metrics=[fid(n=20, encoder=pixels(side=4), split=train)])"
TOY = ("rounds=4", "sampler=ddim(steps=3, batch=4)", "evaluate=evaluate(grid=8, metrics=[fid(n=8, encoder=pixels(side=2))])")
# the settings that shorten a recipe: those of every pattern that matches its name, in this order
SETTINGS: dict[str, tuple[str, ...]] = {
    "*": (MEASURED,),
    "demo": ("rounds=2", "sampler.steps=5"),
    "feddiffuse.*": (
        "rounds=2",
        "model=convnext_unet(dim=8, multipliers=[1, 2])",
        "task.schedule.steps=25",
        "sampler.batch=20",
        "algorithm.local.epochs=1",
        "algorithm.local.batch=32",
    ),
    "fedphd*": ("rounds=4", "sampler.steps=5"),
    "cifar10*": ("rounds=4", "sampler.steps=5"),
    "fedphd": ("algorithm.r_g=2", "algorithm.R_s=2"),
    "fedphd.demo": ("algorithm.r_g=2", "algorithm.R_s=2", "algorithm.local.epochs=1"),
}
SMALL_UNET = "model=unet(widths=[16, 32], layers=1, attention=[16], middle_attention=False, groups=8, dropout=0.1)"
SMALL_BATCH = "algorithm.local.batch=16"
IMAGES = 400  # of a recipe that reads its data from EFFUSE_DATA
# runs that no recipe covers
EXTRA: dict[str, tuple[str, ...]] = {
    "buffers": (
        "rounds=2",
        "task=classify()",
        "sampler=None",
        "model=resnet(widths=[8, 16], blocks=[1, 1], norm=batch)",
        "evaluate=evaluate(grid=0, metrics=[accuracy()])",
        "algorithm.local.epochs=1",
    ),
}


class Run(NamedTuple):
    """One run to compare."""

    kind: str  # algorithm, recipe or extra
    name: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"

    @property
    def settings(self) -> list[str]:
        if self.kind == "algorithm":
            return list(TOY)
        if self.kind == "extra":
            return list(EXTRA[self.name])
        found = [s for pattern, settings in SETTINGS.items() if fnmatch.fnmatchcase(self.name, pattern) for s in settings]
        large = self.name.startswith(("fedphd", "cifar10")) and self.name != "fedphd.demo"
        return [*found, SMALL_UNET, SMALL_BATCH] if large else found


# ---- in a child process, with the effuse of one checkout ----


def perform(run: Run, checkout: Path, folder: Path, threads: int) -> None:
    """Do one run, and draw images from its saved models."""
    import effuse

    if not Path(effuse.__file__).is_relative_to(checkout.resolve()):
        raise SystemExit(f"{checkout}: effuse comes from {effuse.__file__} instead")
    recipe, called = chosen(run)
    recipe = recipe.changed([*run.settings, f"threads={threads}"])
    (folder / "called.txt").write_text(called)
    effuse.run(recipe, out=folder / "run", device="cpu")
    images = {}
    if recipe.sampler is not None:
        for name, options in models(folder / "run"):
            loaded = effuse.load(folder / "run", **options)
            images[name] = loaded.sample(DRAWN, seed=SEED).pixels.numpy()
    np.savez(folder / "run" / "drawn.npz", **images)


def chosen(run: Run) -> tuple[Any, str]:
    """The recipe of a run, and the call that gave it."""
    import effuse

    if run.kind == "algorithm":
        import toy

        return toy.toy_recipe(algorithm=toy.ALGORITHMS[run.name]), run.name
    if run.kind == "extra":
        return effuse.recipe("demo"), "demo"
    call = f"{run.name}(scale=smoke)"
    try:
        recipe = effuse.recipe(call)
    except Exception as error:
        if "no argument 'scale'" not in str(error) and "takes no arguments" not in str(error):
            raise
        call = run.name
        recipe = effuse.recipe(call)
    data = str(recipe.data)
    if not data.startswith("digits"):
        recipe = recipe.changed([f"data=some(source={data}, n={IMAGES})"])
    return recipe, call


def models(run: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The models of a finished run, with the options that `effuse.load` takes for them."""
    if "personal" in json.loads((run / "result.json").read_text()):
        for client in sorted((run / "clients").iterdir(), key=lambda path: int(path.name)):
            yield f"client-{client.name}", {"client": int(client.name)}
        return
    yield "model", {}
    if (run / "model-ema").is_dir():
        yield "model-ema", {"ema": True}


def missing(error: BaseException) -> bool:
    """Whether an error reports missing files of a data set."""
    return any(kind.__name__ == "MissingError" for kind in type(error).__mro__)


def child(order: dict[str, Any]) -> None:
    """The main function of a child process: one run, and a file on how it ended."""
    folder = Path(order["folder"])
    try:
        perform(Run(*order["run"]), Path(order["checkout"]), folder, order["threads"])
        how = OK
    except Exception as error:
        if not missing(error):
            raise
        how = NO_DATA
    (folder / ENDED).write_text(json.dumps({"how": how}))


# ---- the contents of a run folder ----


def safetensors(blob: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """The digest of every tensor in a safetensors file, and its metadata; parsed here, independently of both checkouts."""
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, about in header.items():
        start, end = (8 + size + offset for offset in about["data_offsets"])
        digest = hashlib.sha256(blob[start:end]).hexdigest()[:16]
        found[name] = f"{about['dtype']} {about['shape']} {digest}"
    return found, metadata


def frames(blob: bytes) -> Iterator[bytes]:
    """The blobs of a state file; each follows its length."""
    at = 0
    while at < len(blob):
        size = int.from_bytes(blob[at : at + 8], "little")
        if at + 8 + size > len(blob):
            raise ValueError("a state file is cut off")
        yield blob[at + 8 : at + 8 + size]
        at += 8 + size


def leaves(tree: Any) -> Iterator[str]:
    """The plain values of a message's JSON, without keys and names of message types."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key != "":  # the key of a message type's name
                yield from leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from leaves(value)
    else:
        yield json.dumps(tree)


def state(blob: bytes) -> list[str]:
    """All tensors and plain values of a state, sorted; the first frame holds only keys and types."""
    found: list[str] = []
    for frame in list(frames(blob))[1:]:
        tensors, metadata = safetensors(frame)
        found += [*tensors.values(), *leaves(json.loads(metadata["effuse"]))]
    return sorted(found)


def newest(folder: Path, ending: str) -> list[Path]:
    """The file of the latest round and call; the number of older files depends on the timing of checkpoints."""
    files = folder.glob(f"*{ending}") if folder.is_dir() else []
    return sorted(files, key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)])[-1:]


def without(value: Any, keys: Iterable[str]) -> Any:
    """JSON without these keys, at any depth."""
    if isinstance(value, dict):
        return {k: without(v, keys) for k, v in value.items() if k not in keys}
    return [without(v, keys) for v in value] if isinstance(value, list) else value


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """JSON flattened to paths and plain values."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {path: value}
    return {k: v for key, item in items for k, v in flat(item, f"{path}/{key}").items()}


def pixels(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def contents(run: Path) -> dict[str, dict[str, Any]]:
    """The compared parts of a run folder, each as a dictionary of its pieces."""
    models = sorted(file for folder in run.glob("model*") for file in folder.rglob("*.safetensors"))
    weights = {file: safetensors(file.read_bytes())[0] for file in models}
    drawn = np.load(run / "drawn.npz")
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    clients = sorted(path for path in run.glob("clients/*") if path.is_dir())
    checkpoint = [
        t for file in newest(run / "checkpoints", ".safetensors") for t in safetensors(file.read_bytes())[0].values()
    ]
    return {
        "result": flat(without(json.loads((run / "result.json").read_text()), (*TIMES, "wire_bytes"))),
        "weights": {
            f"{f.relative_to(run)}:{name}": digest for f, found in weights.items() for name, digest in found.items()
        },
        "grids": {str(p.relative_to(run)): pixels(np.asarray(Image.open(p))) for p in sorted(run.rglob("*.png"))},
        "drawn": {name: pixels(drawn[name]) for name in drawn.files},
        "clients": {c.name: state(file.read_bytes()) for c in clients for file in newest(c, ".state")},
        "server": {
            "checkpoint": sorted(checkpoint),
            "optimiser": [v for file in newest(run / "server", ".state") for v in state(file.read_bytes())],
        },
        "losses": {str(i): record["loss"] for i, record in enumerate(rounds)},
        "ledger": flat(without(json.loads((run / "ledger.json").read_text()), ("wire_bytes",))),
    }


def differences(old: Path, new: Path) -> list[str]:
    """The parts in which two run folders differ, each with its first difference."""
    before, after = contents(old), contents(new)
    found = []
    for part in before:
        if part in MUST_HAVE and not before[part]:
            found.append(f"{part}: nothing to compare")
        elif before[part] != after[part]:
            found.append(f"{part}: {first(before[part], after[part])}")
    return found


def first(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first piece that differs, and the number of others."""
    differing = [key for key in {**old, **new} if key not in old or key not in new or old[key] != new[key]]
    key = differing[0]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    if key not in old or key not in new:
        return f"{key} only {'in OLD' if key in old else 'in NEW'}{more}"
    if isinstance(old[key], list):
        counts = [collections.Counter(side[key]) for side in (old, new)]
        removed, added = [sorted((a - b).elements()) for a, b in (counts, counts[::-1])]
        return f"{key}: {len(removed)} values only in OLD, {len(added)} only in NEW{more}"
    return f"{key}: {old[key]} -> {new[key]}{more}"


# ---- both sides ----


class Side:
    """One checkout: its list of runs, and their folder."""

    def __init__(self, checkout: Path, out: Path, python: str, threads: int, limit: float) -> None:
        self.checkout, self.python, self.threads, self.limit = checkout.resolve(), python, threads, limit
        if not (self.checkout / "src" / "effuse").is_dir():
            raise SystemExit(f"{checkout}: no checkout of effuse; it has no src/effuse")
        self.folder = out.resolve() / digest_of(self.checkout)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "checkout.txt").write_text(f"{self.checkout}\n")
        paths = [str(self.checkout / "src"), str(self.checkout / "tests")]
        # separate caches, so that neither side reuses computations of the other
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": "",
            "EFFUSE_CACHE": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }

    def runs(self) -> list[Run]:
        listed = json.loads(self._output("-m", "effuse", "list", "--json"))
        toys = json.loads(self._output("-c", "import json, toy; print(json.dumps(list(toy.ALGORITHMS)))"))
        pairs = {"algorithm": toys, "recipe": listed["recipe"], "extra": EXTRA}
        return [Run(kind, name) for kind, names in pairs.items() for name in names]

    def _output(self, *arguments: str) -> str:
        done = subprocess.run([self.python, *arguments], env=self.environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise SystemExit(f"{self.checkout}: {last_line(done.stderr)}")
        return done.stdout

    def place(self, run: Run) -> Path:
        """The folder of a run; it depends on its settings, threads and interpreter."""
        key = json.dumps([run, run.settings, SMALL_UNET, IMAGES, DRAWN, SEED, self.threads, self.python])
        name = re.sub(r"[^\w.+-]+", "-", str(run))
        return self.folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def done(self, run: Run) -> tuple[str, float]:
        """Do a run unless it is finished; returns how it ended, and its seconds."""
        folder = self.place(run)
        if (folder / ENDED).exists():
            ended = json.loads((folder / ENDED).read_text())
            if ended["how"] == OK:
                return OK, ended["seconds"]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        order = {"run": run, "checkout": str(self.checkout), "folder": str(folder), "threads": self.threads}
        began = time.monotonic()
        command = [self.python, str(Path(__file__).resolve()), "--child", json.dumps(order)]
        try:
            done = subprocess.run(
                command, env=self.environment, cwd=folder, capture_output=True, text=True, timeout=self.limit
            )
        except subprocess.TimeoutExpired:
            return f"not finished after {self.limit:g} s", self.limit
        seconds = time.monotonic() - began
        if done.returncode:
            (folder / "error.txt").write_text(done.stderr)
            return f"failed: {last_line(done.stderr)}", seconds
        how = json.loads((folder / ENDED).read_text())["how"]
        (folder / ENDED).write_text(json.dumps({"how": how, "seconds": seconds}))
        return how, seconds


def digest_of(checkout: Path) -> str:
    """A digest of the files that a checkout's runs depend on: its source and tests/toy.py."""
    files = [path for path in sorted((checkout / "src" / "effuse").rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    total = hashlib.sha256()
    for path in [*files, checkout / "tests" / "toy.py"]:
        total.update(f"{path.relative_to(checkout)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def verdict(run: Run, old: Side, new: Side) -> tuple[str, str]:
    """Do a run on both sides and compare them; returns `equal`, `differs`, `failed` or `no data`, and details."""
    ends = {"OLD": old.done(run), "NEW": new.done(run)}
    took = " + ".join(f"{seconds:.0f} s" for _, seconds in ends.values())
    if all(how == NO_DATA for how, _ in ends.values()):
        return NO_DATA, ""
    bad = [f"{side}: {how}" for side, (how, _) in ends.items() if how != OK]
    if bad:
        return "failed", "; ".join(bad)
    folders = [side.place(run) for side in (old, new)]
    calls = [(folder / "called.txt").read_text() for folder in folders]
    if calls[0] != calls[1]:
        return "differs", f"it is called {calls[0]} in OLD and {calls[1]} in NEW"
    found = differences(*(folder / "run" for folder in folders))
    return ("differs", "; ".join(found)) if found else ("equal", took)


def judged(word: str, expected: bool) -> bool:
    """Whether a verdict is as expected."""
    return word == "differs" if expected else word in ("equal", NO_DATA)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="compare the runs whose names contain it")
    parser.add_argument(
        "--except",
        dest="other",
        action="append",
        default=[],
        metavar="NAME",
        help="a run that must differ, as the table names it; may be repeated",
    )
    parser.add_argument("--out", type=Path, help="keep the runs here, and use those that are here")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a run may take")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of both sides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        old, new = (Side(path, out, options.python, options.threads, options.limit) for path in (options.old, options.new))
        return compared(old, new, options)


def compared(old: Side, new: Side, options: argparse.Namespace) -> int:
    """Print a line for each run; 1 if one of them is not as it should be."""
    there, here = ([run for run in side.runs() if options.only in str(run)] for side in (old, new))
    if not there:
        raise SystemExit(f"--only {options.only}: no run of OLD has this in its name")
    if unknown := set(options.other) - {str(run) for run in there}:
        raise SystemExit(f"--except {min(unknown)!r}: no such run; names are like {str(there[0])!r}")
    if old.folder == new.folder:
        print("OLD and NEW have the same source: each run is done once and compared with itself")
    width = max(len(str(run)) for run in [*there, *here])
    counts: collections.Counter[str] = collections.Counter()
    wrong = 0

    def say(run: Run, word: str, more: str, fine: bool) -> None:
        nonlocal wrong
        counts[word] += 1
        wrong += not fine
        print(f"{'  ' if fine else '! '}{str(run).ljust(width)}  {word.ljust(8)}  {more}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        waiting = {run: pool.submit(verdict, run, old, new) for run in there if run in here}
        for run in there:
            if run not in waiting:
                say(run, "missing", "only in OLD", False)
                continue
            word, more = waiting[run].result()
            expected = str(run) in options.other
            note = "" if not expected else "as expected; " if word == "differs" else "expected to differ; "
            say(run, word, note + more, judged(word, expected))
    for run in here:
        if run not in there:
            say(run, "new", "only in NEW, nothing to compare", True)
    print(", ".join(f"{n} {word}" for word, n in sorted(counts.items())) + f"; {wrong} not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
