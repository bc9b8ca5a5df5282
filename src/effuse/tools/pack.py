"""Split a run into parts of limited size, and restore it on another machine: `effuse pack` and `effuse unpack`."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import effuse
from effuse.core.errors import RunError
from effuse.core.files import parsed, sync_file, write_atomically, writing
from effuse.core.recipe import read_manifest
from effuse.runs.folder import RunFolder

MIB = 2**20
CHUNK = MIB  # bytes in memory at a time
INDEX = "pack.json"
LARGEST_INDEX = 64 * MIB  # bytes; enough for 500,000 files
FORMAT = 1
MANIFEST = "manifest.json"
# the files of a run that a pack may hold: no keys, logs or samples
PACKED = re.compile(
    r"manifest\.json|prepared\.safetensors|rounds\.jsonl|result\.json|ledger\.json|checkpoints/\d+\.safetensors"
    r"|(clients/\d+|server)/[\d_-]+\.state|model(-ema)?/([\w-]+/)?[\w-]+(\.[\w-]+)*"
)
PART = re.compile(r"part-\d{4}\.bin")


@dataclasses.dataclass(frozen=True)
class Piece:
    """The name, size and digest of a file or a part."""

    name: str
    size: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any, allowed: re.Pattern[str], where: Path) -> "Piece":
        kinds = {"name": str, "size": int, "sha256": str}
        if not isinstance(value, dict) or {k: type(v) for k, v in value.items()} != kinds or value["size"] < 0:
            raise RunError(f"{where} is damaged: {str(value)[:80]!r} is not a name with its size and SHA-256")
        if not allowed.fullmatch(value["name"]):
            raise RunError(f"{where} names {value['name'][:80]!r}, which is not a file of a packed run")
        return cls(**value)


def pack(run: Path, to: Path, part: int) -> list[Path]:
    """Write what `effuse resume` needs of a run into a new folder, in parts of at most `part` bytes."""
    if part < 1:
        raise RunError(f"a part of {part} bytes holds nothing; give at least 1")
    read_manifest(run)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunError(f"{to} is not an empty folder; choose another --to")
    folder = RunFolder(run)
    private = run.stat().st_mode & 0o077 == 0
    with folder.locked():
        names = list(needed(folder))
        with writing(to):
            to.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
            if private:
                to.chmod(0o700)  # it may have been there, empty
        files: list[Piece] = []
        parts = list(_cut(_contents(folder, names, files), to, part, private))
    index = {"effuse": effuse.__version__, "format": FORMAT, "private": private, "parts": parts, "files": files}
    blob = json.dumps(index, default=Piece.to_json, indent=1).encode() + b"\n"
    write_atomically(to / INDEX, blob)
    if private:
        (to / INDEX).chmod(0o600)
    return [to / INDEX, *(to / piece.name for piece in parts)]


def needed(folder: RunFolder) -> Iterator[str]:
    """The files that the last checkpoint names, and those that a finished run delivers."""
    checkpoint = folder.load_checkpoint()
    if checkpoint is None:
        raise RunError(f"{folder.path} has no checkpoint yet, so there is nothing to continue from; pack it later")
    yield MANIFEST
    for path in sorted((folder.path / "checkpoints").glob("*.safetensors"))[-1:]:
        yield f"checkpoints/{path.name}"
    for client, snapshot in sorted(checkpoint.snapshots.items()):
        if (folder.path / "clients" / str(client)).is_dir():  # remote sites store their own states
            yield f"clients/{client}/{snapshot}.state"
    if checkpoint.workbench is not None:
        yield f"server/{checkpoint.workbench}.state"
    for name in (folder.prepared.name, "rounds.jsonl", "ledger.json"):
        if (folder.path / name).exists():
            yield name
    if folder.result.exists():
        yield "result.json"
        for model in ("model", "model-ema"):
            yield from sorted(p.relative_to(folder.path).as_posix() for p in (folder.path / model).rglob("*") if p.is_file())


def _contents(folder: RunFolder, names: Iterable[str], files: list[Piece]) -> Iterator[bytes]:
    """The bytes of all files, one after another; appends each finished file to `files`."""
    for name in names:
        if not PACKED.fullmatch(name):
            raise RunError(f"{folder.path / name} has a name that a pack cannot hold; rename or remove it")
        digest, size = hashlib.sha256(), 0
        try:
            with open(folder.path / name, "rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    yield chunk
        except OSError as error:
            raise RunError(f"{folder.path / name} cannot be read: {error.strerror}") from None
        files.append(Piece(name, size, digest.hexdigest()))


def _cut(contents: Iterator[bytes], to: Path, part: int, private: bool) -> Iterator[Piece]:
    """Write a stream of bytes as files of at most `part` bytes."""
    rest, number = b"", 0
    while rest or (rest := next(contents, b"")):
        path = to / f"part-{number:04d}.bin"
        digest, left = hashlib.sha256(), part
        with writing(path), open(path, "wb") as file:
            if private:
                path.chmod(0o600)
            while left and (rest or (rest := next(contents, b""))):
                now, rest = rest[:left], rest[left:]
                file.write(now)
                digest.update(now)
                left -= len(now)
        sync_file(path)
        yield Piece(path.name, part - left, digest.hexdigest())
        number += 1


def unpack(source: Path, run: Path) -> Path:
    """Restore a packed run in a new run folder; checks every part and every file by its digest."""
    files, parts, private = read_index(source / INDEX)
    folder = RunFolder(run)
    folder.require_new()
    if run.exists() and (not run.is_dir() or any(run.iterdir())):  # a checkpoint left there would be mixed in
        raise RunError(f"{run} is not an empty folder; delete it, or choose another --out")
    with folder.locked(private=private):
        stream = _Parts(source, parts)
        manifest = b""
        for piece in files:
            if piece.name == MANIFEST:
                manifest = b"".join(stream.take(piece))
                continue
            path = run / piece.name
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb") as file:
                    for chunk in stream.take(piece):
                        file.write(chunk)
            sync_file(path)
        stream.end()
        # write the manifest last: `effuse resume` refuses an incomplete run without it
        write_atomically(folder.manifest, manifest)
    return run


def read_index(path: Path) -> tuple[list[Piece], list[Piece], bool]:
    """The files and the parts that the index of a pack lists, and whether others may not read the run."""
    try:
        if path.stat().st_size > LARGEST_INDEX:
            raise RunError(f"{path} is too large to be the index of a pack")
        index = parsed(path.read_bytes(), path)
        found = index["format"]
        files, parts, private = (index.get(key) for key in ("files", "parts", "private"))
    except FileNotFoundError:
        raise RunError(f"there is no {path}; give the folder that `effuse pack` wrote") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{path} cannot be read as the index of a pack") from None
    if found != FORMAT:
        raise RunError(f"{path} has format {str(found)[:20]}, and this effuse reads format {FORMAT}")
    if not isinstance(files, list) or not isinstance(parts, list):
        raise RunError(f"{path} cannot be read as the index of a pack")
    read = [Piece.from_json(value, PACKED, path) for value in files]
    names = [piece.name for piece in read]
    if MANIFEST not in names or len({*names}) != len(names):
        raise RunError(f"{path} is damaged: a file is named twice, or the manifest is missing")
    return read, [Piece.from_json(value, PART, path) for value in parts], private is not False


class _Parts:
    """The bytes of all parts as one stream."""

    def __init__(self, source: Path, parts: list[Piece]) -> None:
        self.source, self.rest = source, b""
        self.chunks = self._chunks(parts)

    def _chunks(self, parts: list[Piece]) -> Iterator[bytes]:
        for part in parts:
            path = self.source / part.name
            try:
                with open(path, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
                        raise RunError(f"{path} is not the part that was packed; fetch it again")
                    file.seek(0)
                    while chunk := file.read(CHUNK):
                        yield chunk
            except OSError as error:
                raise RunError(f"{path} cannot be read ({error.strerror}); fetch it again") from None

    def take(self, piece: Piece) -> Iterator[bytes]:
        """The next file, in chunks."""
        digest, left = hashlib.sha256(), piece.size
        while left:
            self.rest = self.rest or next(self.chunks, b"")
            if not self.rest:
                raise RunError(f"{self.source}: the parts end before the files do; fetch them again")
            now, self.rest = self.rest[:left], self.rest[left:]
            digest.update(now)
            left -= len(now)
            yield now
        if digest.hexdigest() != piece.sha256:
            raise RunError(f"{self.source}: {piece.name} is damaged; pack the run again")

    def end(self) -> None:
        """Check that everything has been read."""
        if self.rest or next(self.chunks, b""):
            raise RunError(f"{self.source}: the parts hold more than the files; fetch them again")
