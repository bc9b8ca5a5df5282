"""Croissant metadata of a release (MLCommons, version 1.1), with its fields of responsible AI and of provenance."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effuse.report.facts import Facts
from effuse.report.scorecard import STATED, Contents

TABLE = "data.parquet"  # the file whose columns are described
KINDS = {".parquet": "application/x-parquet", ".npz": "application/zip", ".md": "text/markdown", ".html": "text/html"}
NAMES = (
    "arrayShape citeAs column equivalentProperty extract field fileProperty fileObject fileSet format includes isArray "
    "isLiveDataset jsonPath key md5 parentField path recordSet references regex repeated replace samplingRate separator "
    "source subField transform"
)
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{name: f"cr:{name}" for name in NAMES.split()},
}


def croissant(
    name: str, facts: Facts, held: Contents, stated: Mapping[str, str], folder: Path, files: Sequence[str], made: str
) -> dict[str, Any]:
    """The metadata of a folder's files, as JSON-LD."""
    assert facts.result is not None
    source = stated.get("source") or STATED
    who = f"{facts.count('clients')} clients by {facts.algorithm}"
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": ["http://mlcommons.org/croissant/1.1", "http://mlcommons.org/croissant/RAI/1.0"],
        "name": name,
        "description": f"{held.images:,} synthetic images, drawn by a generator that was trained with {who}.",
        "license": stated.get("license") or STATED,
        "creator": {"@type": "sc:Organization", "name": stated.get("contact") or STATED},
        "datePublished": made,
        "version": "1.0.0",
        "url": stated.get("url") or STATED,
        "citeAs": name,
        "isLiveDataset": False,
        "rai:dataCollection": "No image was collected: every one was drawn by a network.",
        "rai:dataCollectionType": ["Others"],
        "rai:dataLimitations": stated.get("limits") or STATED,
        "rai:dataBiases": "Classes and subgroups that few sites have may be drawn worse. The data sheet has the figures.",
        "rai:personalSensitiveInformation": f"The generator was trained on: {source}.",
        "rai:dataUseCases": stated.get("purpose") or STATED,
        "rai:dataReleaseMaintenancePlan": stated.get("contact") or STATED,
        "prov:wasGeneratedBy": {"@type": "prov:Activity", "prov:label": f"trained with {who}, then drawn"},
        "prov:wasDerivedFrom": {
            "@type": "prov:Entity",
            "prov:label": f"weights with SHA-256 {facts.result.weights_sha256}; real images: {source}",
        },
        "distribution": [_file(folder, place) for place in files],
        "recordSet": [_records(held)] if TABLE in files else [],
    }


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file(folder: Path, place: str) -> dict[str, Any]:
    path = folder / place
    return {
        "@type": "cr:FileObject",
        "@id": place,
        "name": place,
        "contentUrl": place,
        "contentSize": f"{path.stat().st_size} B",
        "encodingFormat": KINDS.get(path.suffix, "application/octet-stream"),
        "sha256": digest(path),
    }


def _records(held: Contents) -> dict[str, Any]:
    fields = [_field("image", "sc:ImageObject", "The image.", {"jsonPath": "bytes"})]
    if held.by_class:
        classes = ", ".join(f"{label} {name}" for label, name in enumerate(held.by_class))
        fields.append(_field("label", "cr:Int64", f"The class that was asked for: {classes}.", None))
    return {"@type": "cr:RecordSet", "@id": "images", "name": "images", "field": fields}


def _field(name: str, kind: str, words: str, transform: Mapping[str, str] | None) -> dict[str, Any]:
    source = {"fileObject": {"@id": TABLE}, "extract": {"column": name}}
    source |= {} if transform is None else {"transform": dict(transform)}
    made = {"@type": "cr:Field", "@id": f"images/{name}", "name": name, "description": words}
    return {**made, "dataType": kind, "source": source}
