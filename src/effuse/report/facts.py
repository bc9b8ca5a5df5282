"""What a run folder says of its run, finished or not."""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from effuse.core.build import build_text
from effuse.core.errors import EffuseError, RunError, shown
from effuse.core.files import parsed, reading
from effuse.core.metric import Measurement
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.spec import field_hints
from effuse.report.heat import suppressed
from effuse.runs.folder import RunFolder
from effuse.runs.records import Result, RoundRecord, Split, made, plain

PICTURE = re.compile(r"round-(\d+)(?:-client-(\d+))?(-ema)?(?:-client-(\d+))?\.png")
HISTOGRAMS = "histograms"  # of labels, among what an algorithm notes
CLIENTS_SHOWN = 4  # whose own samples are shown; those of all would be too large
QUALITY = ("fid", "kid", "accuracy", "conditional_accuracy")  # metrics that are looked at first


@dataclasses.dataclass(frozen=True)
class Grid:
    """A picture of samples after a round."""

    round: int
    name: str
    path: Path
    client: int | None = None  # whose own model drew them


@dataclasses.dataclass(frozen=True)
class Facts:
    """A run's files as values."""

    path: Path
    manifest: Mapping[str, Any]
    records: Sequence[RoundRecord]
    result: Result | None
    split: Split | None
    evaluation: Mapping[str, Measurement]  # of a later `effuse evaluate`
    told: Mapping[str, Any]  # what the histograms that clients told cost each of them
    audit: Mapping[str, Any] | None
    public: bool = False

    @classmethod
    def of(cls, path: Path) -> "Facts":
        """Read a run folder."""
        folder = RunFolder(path)
        result = folder.read_result() if folder.result.exists() else None
        later, where = _json(path / "evaluation.json").get("metrics") or {}, str(path / "evaluation.json")
        evaluation = {str(name): made(m, Measurement, where) for name, m in later.items()}
        told, audit = _json(path / "ledger.json").get("privacy") or {}, _json(path / "audit" / "audit.json") or None
        records = folder.records()
        split = folder.read_split() or told_by_sites(records)
        return cls(path, read_manifest(path), records, result, split, evaluation, told, audit)

    @property
    def name(self) -> str:
        """What the run is called: its recipe and its folder."""
        return str(self.manifest.get("name") or "a run")

    @property
    def recipe(self) -> dict[str, str]:
        return {str(key): str(value) for key, value in self.manifest["recipe"].items()}

    def short(self, key: str) -> str:
        """A value of the recipe without the keys that are at their defaults, where this version knows it."""
        source = self.recipe.get(key, "")
        try:
            return str(build_text(source, field_hints(Recipe)[key], key))
        except EffuseError:  # of another version, or with hidden names
            return source

    @property
    def algorithm(self) -> str:
        return self.recipe.get("algorithm", "").partition("(")[0] or "an unknown algorithm"

    @property
    def rounds(self) -> int:
        """Federated rounds so far."""
        return max((record.federated for record in self.records), default=0)

    def count(self, key: str) -> int:
        """A whole number of the recipe; 0 where it has none."""
        found = self.recipe.get(key, "")
        return int(found) if found.isascii() and found.isdigit() else 0

    @property
    def diverged(self) -> str | None:
        """The error of a cell of a table that diverged."""
        file = self.path / "diverged.txt"
        return file.read_text(errors="replace").strip() if file.is_file() else None

    @property
    def classes(self) -> list[str]:
        """The names of the classes, or their numbers."""
        wanted = len(self.split.labels[0]) if self.split and self.split.labels else 0
        found = self.manifest.get("classes")
        named = [str(name) for name in found] if isinstance(found, list) else []
        return named if len(named) >= wanted else [str(i) for i in range(wanted)]

    @cached_property
    def measured(self) -> dict[str, list[tuple[RoundRecord, int, float]]]:
        """Every metric: the rounds in which it was measured, the bytes sent by then, and its values."""
        found: dict[str, list[tuple[RoundRecord, int, float]]] = {}
        for record, sent in self.sent:
            for name, value in (record.metrics or {}).items():
                found.setdefault(name, []).append((record, sent, value))
        return dict(sorted(found.items(), key=lambda item: rank(item[0])))

    @cached_property
    def sent(self) -> list[tuple[RoundRecord, int]]:
        """Every round, with the bytes of training sent up to its end."""
        total, found = 0, []
        for record in self.records:
            total += record.traffic.bytes.total
            found.append((record, total))
        return found

    @property
    def clients(self) -> list[int]:
        """All clients that the recipe or a round knows."""
        seen = {int(k) for record in self.records for k in record.traffic.clients or {}}
        return sorted(seen | set(range(min(self.count("clients"), 100_000))))

    def raw(self) -> dict[str, Any]:
        """The values behind a page, as JSON."""
        return {
            "manifest": dict(self.manifest),
            "result": None if self.result is None else self.result.to_json(),
            "partition": None if self.split is None else self.split.to_json(),
            "evaluation": plain(self.evaluation),
            "rounds": [_without_histograms(record).to_json() for record in self.records],
        }


def told_by_sites(records: Iterable[RoundRecord]) -> Split | None:
    """The histograms that clients told their server, without small cells; None where nobody told one."""
    told: dict[int, list[int]] = {}
    for record in records:
        for client, counts in ((record.noted or {}).get(HISTOGRAMS) or {}).items():
            told[int(client)] = [round(n) for n in counts]  # noise makes fractions
    sites = sorted(told)
    return suppressed(Split([told[k] for k in sites], sites=sites)) if told else None


def _without_histograms(record: RoundRecord) -> RoundRecord:
    """The same without what clients told of their labels: a page has that without small cells."""
    kept = {key: value for key, value in (record.noted or {}).items() if key != HISTOGRAMS}
    return dataclasses.replace(record, noted=kept or None)


def grids_of(run: Path) -> list[Grid]:
    """The pictures of samples, by round; of personal models those of a few clients."""
    found = []
    for path in sorted((run / "samples").glob("round-*.png")):
        name = PICTURE.fullmatch(path.name)
        if name is None or path.is_symlink():
            continue
        told = name[2] or name[4]
        client = None if told is None else int(told)
        if client is not None and client >= CLIENTS_SHOWN:
            continue
        words = "the delivered model" if client is None else f"client {client}'s model"
        found.append(Grid(int(name[1]), f"{words}{', averaged over rounds' if name[3] else ''}", path, client))
    return found


def rank(name: str) -> tuple[int, str]:
    """The place of a metric: the usual ones first."""
    base = next((i for i, known in enumerate(QUALITY) if name.startswith(known)), len(QUALITY))
    return base, name


def within_budget(grids: Iterable[Grid], limit: int) -> dict[int, list[Grid]]:
    """Pictures by round: evenly spaced rounds, the first and the last among them, whose files have at most `limit` bytes."""
    rounds: dict[int, list[Grid]] = {}
    for grid in grids:
        rounds.setdefault(grid.round, []).append(grid)
    order = sorted(rounds)
    sizes = {t: sum(grid.path.stat().st_size for grid in rounds[t]) for t in order}
    for wanted in range(min(len(order), 60), 0, -1):
        chosen = (
            [order[round(i * (len(order) - 1) / max(1, wanted - 1))] for i in range(wanted)] if wanted > 1 else order[-1:]
        )
        if sum(sizes[t] for t in chosen) <= limit:
            return {t: rounds[t] for t in chosen}
    return {}


def read_facts(path: Path) -> Facts:
    """The facts of a run that somebody named; errors say what is wrong with the folder."""
    if not path.is_dir():
        raise RunError(f"{path} is not a run folder; give one that `effuse run` wrote")
    with readable(path):
        return Facts.of(path)


@contextlib.contextmanager
def readable(run: Path) -> Iterator[None]:
    """Name the run folder in what its damaged or foreign files raise."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        found = shown(f"{type(error).__name__}: {error}", 200)
        raise RunError(
            f"{run}: a file of this run is damaged or not effuse's ({found}); restore it from a backup"
        ) from error


def _json(file: Path) -> dict[str, Any]:
    """A JSON file's keys and values; none where there is no such file."""
    if not file.is_file():
        return {}
    with reading(file):
        found = parsed(file.read_bytes(), file)
    return found if isinstance(found, dict) else {}
