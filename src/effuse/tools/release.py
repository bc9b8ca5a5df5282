"""Publish what a run made: images, model, documents, checksums, and a report of what was measured and what was not."""

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import effuse
from effuse.core.capabilities import Draws, Personal
from effuse.core.errors import MissingError, RunError
from effuse.core.files import cache_folder, write_atomically, writing
from effuse.core.grid import save_grid, too_young
from effuse.core.metric import Images, Measurement, Metric
from effuse.core.spec import text
from effuse.core.workbench import Workbench
from effuse.report.cards import data_sheet, model_card
from effuse.report.croissant import croissant, digest
from effuse.report.facts import Facts, read_facts
from effuse.report.html import document, paragraph, picture, section, table
from effuse.report.html import text as as_text
from effuse.report.public import measurement, shareable
from effuse.report.scorecard import Contents, Line, Question, not_measured, privacy, scorecard
from effuse.report.words import plural
from effuse.runs.evaluation import Evaluator
from effuse.runs.folder import RunFolder
from effuse.runs.records import plain
from effuse.runs.save import Loaded, load
from effuse.tasks.edm import DENOISERS
from effuse.tools.export import auxiliary_of, require_empty, write
from effuse.transport.device import pick_device

GRID, PICTURE = 100, "grid.png"  # images in the picture, and its file
STATEMENTS = {
    "license": "Licence of the folder, such as CC-BY-4.0.",
    "contact": "Who publishes it, and where questions go.",
    "purpose": "What it is meant for.",
    "limits": "What it is not meant for.",
    "source": "What the real images were, such as 'chest radiographs of three hospitals, 2019 to 2023'.",
    "basis": "Legal basis of training on them.",
    "url": "Where the release will be found.",
}


@dataclasses.dataclass(frozen=True)
class Released:
    """What was written, and what nobody measured."""

    folder: Path
    held: Contents
    missing: Sequence[str]


def release(
    run: Path,
    to: Path,
    *,
    n: int = 1000,
    seed: int = 0,
    name: str = "",
    metrics: Sequence[Metric] | None = None,
    stated: Mapping[str, str] | None = None,
    device: str = "auto",
) -> Released:
    """Write the release of a finished run to an empty folder; real images never enter it.

    The images are those that the server keeps, or `n` drawn by the recipe's sampler. `metrics` are measured on them against
    the recipe's real test images, by default the recipe's own; without those images nothing is measured.
    """
    opened = load(run, device=pick_device(device).type)
    _refuse(opened)
    require_empty(to)
    private, said = read_facts(run), dict(stated or {})
    facts = shareable(private)
    name = name or f"{facts.name} by effuse"
    images, origin = _images(opened, n, seed)
    with writing(to):
        to.mkdir(parents=True, exist_ok=True)
    measured = {} if images is None else _measure(opened, images, metrics)
    classes = [str(name) for name in facts.manifest.get("classes") or ()]
    files = [] if images is None else _write_images(images, classes, to, _provenance(facts, origin, opened, seed))
    shutil.copytree(run / "model", to / "model")
    held = _contents(images, facts, files)
    promise = privacy(dataclasses.replace(facts, audit=private.audit))
    questions = scorecard(facts, measured, held, said)
    missing = not_measured(questions, promise)
    documents = {
        "model_card.md": model_card(name, facts, said, promise),
        "data_sheet.md": data_sheet(name, facts, held, said, questions, missing),
        "report.html": _report(name, held, questions, promise, missing, to / PICTURE if images else None),
        "report.json": _json({"name": name, "stated": said, **_numbers(questions, promise, measured, missing)}),
    }
    for file, words in documents.items():
        write_atomically(to / file, words.encode())
    described = [*(file for file in files if not file.endswith("/")), *documents]
    about = croissant(name, facts, held, said, to, described, time.strftime("%Y-%m-%d", time.gmtime()))
    write_atomically(to / "croissant.json", _json(about).encode())
    _checksums(to)
    return Released(to, held, missing)


def _refuse(opened: Loaded) -> None:
    algorithm = opened.recipe.algorithm
    if not RunFolder(opened.run).result.exists():
        raise RunError(f"{opened.run} is not finished; finish it with `effuse resume {opened.run}`")
    if isinstance(algorithm, Personal):
        raise RunError(
            f"{opened.run}: {algorithm.name} leaves each client a model of its own, so there is no one to release"
        )
    if getattr(algorithm, "real", False):
        raise RunError(f"{opened.run}: algorithm.real=True, so its server holds real images; these are never released")
    if isinstance(algorithm, Draws) and not algorithm.generated:
        raise RunError(
            f"{opened.run}: the images of {algorithm.name} are not drawn by a network, and may be real ones; these are "
            "never released"
        )


def _images(opened: Loaded, n: int, seed: int) -> tuple[Images | None, str]:
    """The images of a release, and where they come from."""
    algorithm = opened.recipe.algorithm
    kept = auxiliary_of(opened.run) if isinstance(algorithm, Draws) else None
    if kept is not None:
        assert isinstance(algorithm, Draws)
        labelled = all(arch.conditional for arch, _ in algorithm.drawn_from(opened.recipe))
        return kept.images(labelled), "kept by the server, drawn from the clients' generators"
    if opened.recipe.sampler is None or not isinstance(opened.recipe.task, DENOISERS):
        return None, ""
    return opened.sample(n, seed=seed), f"drawn by {text(opened.recipe.sampler)}"


def _measure(opened: Loaded, images: Images, metrics: Sequence[Metric] | None) -> dict[str, Measurement]:
    """Metrics of the images against real ones; none where the real ones are not here."""
    recipe = opened.recipe
    if metrics is not None:
        recipe = dataclasses.replace(recipe, evaluate=dataclasses.replace(recipe.evaluate, metrics=tuple(metrics)))
    try:
        train, test = recipe.data.load("train").to(opened.device), recipe.data.load("test")
    except MissingError:
        if metrics is not None:
            raise
        return {}
    if not len(test):
        return {}
    bench = Workbench(opened.machine, recipe.task, recipe.rounds)
    found = Evaluator(recipe, train, test, bench, cache_folder()).evaluate_images(images)
    return {name: measurement(m) for name, m in found.items()}


def _provenance(facts: Facts, origin: str, opened: Loaded, seed: int) -> dict[str, Any]:
    """How the images were made, without a name of a file."""
    return {
        "synthetic": True,
        "made_by": f"effuse {effuse.__version__}",
        "images": origin,
        "seed": seed,
        "arithmetic": opened.machine.arithmetic,
        "weights_sha256": opened.model.params.digest(),
        "classes": facts.manifest.get("classes"),
        "recipe": facts.recipe,
    }


def _write_images(images: Images, classes: Sequence[str], to: Path, provenance: dict[str, Any]) -> list[str]:
    """Images in three formats and a picture of some; returns their names. Folders end in a slash."""
    write(images, "imagefolder", to / "images", provenance)
    write(images, "npz", to / "data.npz", provenance)
    write(images, "parquet", to / "data.parquet", provenance)
    save_grid(picked(images), to / PICTURE, classes)
    return ["images/", "data.npz", "data.parquet", PICTURE]


def picked(images: Images) -> Images:
    """Images for one picture: about as many of each class."""
    if images.labels is None:
        return images.first(GRID)
    places = [(images.labels == k).nonzero()[:, 0] for k in images.labels.unique()]
    return images.rows(torch.cat([own[: max(1, GRID // len(places))] for own in places]))


def _contents(images: Images | None, facts: Facts, files: Sequence[str]) -> Contents:
    if images is None:
        return Contents()
    counts: dict[str, int] = {}
    if images.labels is not None:
        classes = facts.manifest.get("classes")
        top = int(images.labels.max()) + 1
        named = (
            [str(c) for c in classes] if isinstance(classes, list) and len(classes) >= top else list(map(str, range(top)))
        )
        counts = {c: int((images.labels == i).sum()) for i, c in enumerate(named)}
    return Contents(len(images), counts, images.pixels.shape[-1], images.pixels.shape[1], files, too_young(images))


def _report(
    name: str,
    held: Contents,
    questions: Sequence[Question],
    promise: Sequence[Line],
    missing: Sequence[str],
    grid: Path | None,
) -> str:
    """The release report as a page."""
    head = ("what", "value", "how")

    def rows(lines: Sequence[Line]) -> str:
        return f'<div class="lines">{table([[line.what, line.value, line.how] for line in lines], head)}</div>'

    drawn = "" if grid is None else f'<div class="pictures">{picture(grid.read_bytes(), "released images")}</div>'
    private = next(line.value for q in questions for line in q.lines if line.what == "differential privacy")
    classes = f" of {plural(len(held.by_class), 'class', 'classes')}" if held.by_class else ""
    verdict = f"{plural(held.images, 'image')}{classes}, and a model. Differential privacy: {private}. "
    verdict += f"Of what is asked below, {plural(len(missing), 'point')} were not measured."
    verdict += f" Look closely: {held.note}." if held.note else ""
    parts = [
        f"<h1>Release report: {as_text(name)}</h1>",
        paragraph(verdict, "verdict"),
        paragraph(
            "Every image was drawn by a network. Nothing is claimed here that the run or the release did not measure."
        ),
        section("Samples", drawn),
        *(section(q.name, paragraph(q.asked), rows(q.lines)) for q in questions),
        section("Privacy", rows(promise)),
        section("Not measured", table([[words] for words in missing])),
    ]
    return document(f"Release report: {name}", parts)


def _numbers(
    questions: Sequence[Question], promise: Sequence[Line], measured: Mapping[str, Measurement], missing: Sequence[str]
) -> dict[str, Any]:
    return {
        "scorecard": [dataclasses.asdict(q) for q in questions],
        "privacy": [dataclasses.asdict(line) for line in promise],
        "metrics": plain(measured),
        "not_measured": list(missing),
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _checksums(folder: Path) -> None:
    """SHA256SUMS of all files, as `sha256sum --check` reads it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    write_atomically(folder / "SHA256SUMS", "".join(lines).encode())
