"""Write synthetic images of a run to files, with their provenance."""

import csv
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import effuse
from effuse.algorithms.shared.synthesis import AuxiliarySet
from effuse.core.algorithm import fields_of
from effuse.core.capabilities import Draws
from effuse.core.errors import RunError
from effuse.core.files import write_atomically, writing
from effuse.core.grammar import hidden
from effuse.core.grid import save_grid
from effuse.core.metric import Images
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.sampler import Sampler
from effuse.core.spec import text
from effuse.runs.folder import RunFolder
from effuse.runs.save import Loaded

FORMATS = ("grid", "imagefolder", "npz", "parquet")
# a name without dots stays in the export folder and differs from its files; 60 letters of any alphabet fit in 255 bytes
FOLDER_NAME = re.compile(r"\w([\w ,=+()'-]{0,58}[\w)])?")


def export(
    images: Images,
    form: str,
    where: Path,
    opened: Loaded,
    asked: dict[str, Any],
    seeds: list[dict[str, int]],
    sampler: Sampler | None,
) -> Path:
    """Write images as a picture, a folder with one subfolder per class, or arrays; returns the path."""
    provenance = _made(opened.run, opened.recipe) | {
        "weights_sha256": opened.model.params.digest(),
        "sampler": hidden(text(sampler or opened.recipe.sampler)),
        "asked": asked,
        "batches": seeds,  # plain diffusers draws the same batches from their torch seeds
        "rounds": opened.rounds or opened.recipe.rounds,
        "arithmetic": opened.machine.arithmetic,  # in bf16 the same images up to rounding
    }
    return write(images, form, where, provenance)


def export_auxiliary(run: Path, form: str, where: Path) -> tuple[Path, int]:
    """Write the images that a run's server drew from its clients' models; returns the path and the number."""
    recipe = Recipe.restore(read_manifest(run)["recipe"])
    found = auxiliary_of(run)
    if found is None:
        raise RunError(
            f"{run}: its server holds no images; {recipe.algorithm.name} draws none, or has not drawn them yet; "
            "`effuse sample` draws images from a model"
        )
    algorithm = recipe.algorithm
    assert isinstance(algorithm, Draws)
    labelled = all(arch.conditional for arch, _ in algorithm.drawn_from(recipe))
    sampler = getattr(algorithm, "sampler", None)  # images need not come from a sampler
    provenance = _made(run, recipe) | {
        "sampler": None if sampler is None else hidden(text(sampler)),
        "auxiliary": len(found),
    }
    return write(found.images(labelled), form, where, provenance, found.origin.tolist()), len(found)


def auxiliary_of(run: Path) -> AuxiliarySet | None:
    """The images that a run's server drew from its clients' models, if there are any."""
    checkpoint = RunFolder(run).load_checkpoint()
    values = [] if checkpoint is None else fields_of(checkpoint.server).values()
    return next((value for value in values if isinstance(value, AuxiliarySet)), None)


def _made(run: Path, recipe: Recipe) -> dict[str, Any]:
    """The provenance that every export has."""
    return {
        "made_by": f"effuse {effuse.__version__}",
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "synthetic": not isinstance(recipe.algorithm, Draws) or recipe.algorithm.generated,
        "run": run.resolve().name,  # exports are passed on, so no path is told
        "recipe": {key: hidden(value, key == "data") for key, value in recipe.saved().items()},
        "classes": read_manifest(run).get("classes"),  # the names of the labels, in order
    }


def write(images: Images, form: str, where: Path, provenance: dict[str, Any], origin: list[int] | None = None) -> Path:
    """Write images with their provenance in one of the formats; returns the path."""
    if form == "grid":
        path = _named(where, ".png")
        save_grid(images, path, provenance["classes"] or ())
        _note(path.with_suffix(".json"), provenance)
        return path
    if form == "npz":
        path = _named(where, ".npz")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {"images": images.bytes().permute(0, 2, 3, 1).numpy()}
        if images.labels is not None:
            arrays["labels"] = images.labels.numpy()
        if origin is not None:
            arrays["origin"] = np.array(origin)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays, provenance=np.array(json.dumps(provenance)))
        write_atomically(path, buffer.getvalue())
        return path
    if form == "parquet":
        path = _named(where, ".parquet")
        write_atomically(path, _table(images, provenance, origin))
        return path
    require_empty(where)
    with writing(where):
        _folder(images, where, origin, provenance["classes"])
    _note(where / "provenance.json", provenance)
    return where


def _table(images: Images, provenance: dict[str, Any], origin: list[int] | None) -> bytes:
    """A Parquet file of PNG images, labels and origins, which `datasets` reads with the names of the classes."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise RunError("--format parquet needs the package pyarrow; run pip install 'effuse[release]'") from None

    columns: dict[str, Any] = {"image": [{"bytes": png, "path": None} for png in pngs(images)]}
    kinds: dict[str, Any] = {"image": pa.struct([("bytes", pa.binary()), ("path", pa.string())])}
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    if images.labels is not None:
        columns["label"], kinds["label"] = images.labels.tolist(), pa.int64()
        named = [str(name) for name in provenance["classes"] or ()] or [str(i) for i in range(max(columns["label"]) + 1)]
        features["label"] = {"_type": "ClassLabel", "names": named}
    if origin is not None:
        columns["client"], kinds["client"] = origin, pa.int64()
        features["client"] = {"_type": "Value", "dtype": "int64"}
    notes = {"huggingface": {"info": {"features": features}}, "provenance": provenance}
    schema = pa.schema(list(kinds.items()), metadata={key: json.dumps(value) for key, value in notes.items()})
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), buffer)
    return buffer.getvalue()


def pngs(images: Images) -> Iterator[bytes]:
    """Every image as a PNG file."""
    from PIL import Image

    for image in images.bytes().permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(buffer, "PNG")
        yield buffer.getvalue()


def require_empty(where: Path) -> None:
    """Refuse to mix two exports in one folder."""
    if where.exists() and (not where.is_dir() or any(where.iterdir())):
        raise RunError(f"{where} is not an empty folder; choose another --out, so that two exports do not mix")


def _named(path: Path, suffix: str) -> Path:
    # append the suffix: with_suffix would cut trial-0.5 at its dot
    return path if path.suffix == suffix else path.with_name(path.name + suffix)


def _folder(images: Images, where: Path, origin: list[int] | None, classes: object) -> None:
    where.mkdir(parents=True, exist_ok=True)
    labels = ["images"] * len(images) if images.labels is None else images.labels.tolist()
    folders = class_folders(classes, max(labels, default=0) + 1) if images.labels is not None else {"images": "images"}
    names = []
    for i, (png, label) in enumerate(zip(pngs(images), labels)):
        path = where / folders[label] / f"{i:06d}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png)
        names.append((f"{folders[label]}/{path.name}", label, *([] if origin is None else [origin[i]])))
    head = ("file", "label", *([] if origin is None else ["client"]))
    with open(where / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([head, *names])


def class_folders(classes: object, n: int) -> dict[Any, str]:
    """A folder name for each label below n: its class, or its number if some class cannot name a folder."""
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    distinct = len({name.lower() for name in names}) == len(names)  # some file systems ignore case
    usable = len(names) >= n and distinct and all(map(FOLDER_NAME.fullmatch, names))
    return dict(enumerate(names if usable else map(str, range(n))))


def _note(path: Path, provenance: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(provenance, indent=2) + "\n").encode())
