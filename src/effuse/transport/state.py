"""Client state on disk: copy-on-write snapshots, so that a lost or killed round rolls back by itself.

Checkpoints and client states carry their own digest and that of the run's manifest, so neither is read damaged or elsewhere.
"""

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor

import effuse
from effuse.core.errors import FederationError, WireError
from effuse.core.files import sync_file, write_atomically, writing
from effuse.core.message import MESSAGES, is_message, message_name
from effuse.core.params import Buffers, Params
from effuse.core.recipe import manifest_digest, read_manifest
from effuse.core.visit import each_params
from effuse.core.wire import decode, encode, marks_in

FORMAT = "3"  # of checkpoints and client states; raised when this version cannot read what older ones saved
MARKS = {"format": FORMAT, "version": effuse.__version__}  # in the header of both
SEALS = {"run": "0" * 64, "digest": "0" * 64}  # filled in by `sealed`: of the manifest, and of the file with zeros here
KINDS: dict[str, Any] = {"params": Params, "buffers": Buffers, "tensor": Tensor, "scalar": bool | int | float | str | None}


def saved_by_another(blob: bytes, what: object) -> str | None:
    """Why a checkpoint or a client state cannot be read, by its header; None where it can."""
    marks = marks_in(blob)
    if marks.get("format") == FORMAT:
        return None
    return (
        f"{what} was saved by effuse {marks.get('version', '0.1.0 or older')}, and this is effuse {effuse.__version__}, "
        "which cannot read it; use that version for this run, or start a new one"
    )


def sealed(blob: bytes, run: str = "") -> bytes:
    """An encoded file, bound to the manifest of a run and with its own digest; both replace what stands there."""
    made = bytearray(blob)
    for name, value in (("run", run or SEALS["run"]), ("digest", SEALS["digest"])):
        at = _place_of(made, name)
        made[at : at + 64] = value.encode()
    at = _place_of(made, "digest")
    made[at : at + 64] = hashlib.sha256(made).hexdigest().encode()
    return bytes(made)


def damaged(blob: bytes, what: object, run: str = "") -> str | None:
    """Why a sealed file is not what was written, or belongs to another run than `run`; None where it is and does."""
    try:
        at, bound = _place_of(blob, "digest"), _place_of(blob, "run")
    except ValueError:
        return f"{what} is damaged: its header is not the one that was written"
    view, made = memoryview(blob), hashlib.sha256()
    for part in (view[:at], SEALS["digest"].encode(), view[at + 64 :]):
        made.update(part)
    if made.hexdigest().encode() != view[at : at + 64]:
        return f"{what} is damaged: its digest is not the one that was written"
    owner = bytes(view[bound : bound + 64]).decode()
    if run and owner != run:
        return (
            f"{what} belongs to the manifest {owner[:12]}, and manifest.json here is {run[:12]}; "
            "restore manifest.json as it was, or start a new run"
        )
    return None


def _place_of(blob: bytes | bytearray, mark: str) -> int:
    """Where a seal's 64 digits begin; the marks come first in a header."""
    key = f'"{mark}":"'.encode()
    return blob.index(key, 0, 1000) + len(key)


def bound_to(run: Path) -> str:
    """The hash of a run folder's manifest, which its checkpoints and states are bound to; empty where there is none."""
    if not (run / "manifest.json").exists():
        return ""
    manifest = read_manifest(run)
    return manifest_digest(manifest["recipe"], manifest.get("classes", ()))


def kind_of(value: Any, where: str) -> str:
    """The kind of a state value; only these kinds can be saved."""
    if is_message(type(value)):
        return message_name(type(value))
    for kind, types in (("buffers", Buffers), ("params", Params), ("tensor", Tensor)):
        if isinstance(value, types):
            return kind
    if value is None or isinstance(value, (bool, int, float, str)):
        return "scalar"
    raise WireError(f"{where} is {type(value).__name__}; state holds numbers, text, tensors, Params and messages only")


class Snapshots:
    """One client's snapshots in a folder of its own; they reach the disk when written, or with `wait=False` by `settle`."""

    on_disk = True

    def __init__(self, folder: Path, wait: bool = True, run: str = "") -> None:
        self.folder, self.wait, self.run = folder, wait, run

    def read(self, name: str | None) -> dict[str, Any]:
        """The state of that snapshot; the name of a client without a snapshot is None, and its state is empty."""
        if name is None:
            return {}
        path, blob = self._path(name), self.blob(name)
        table = blob[8 : 8 + int.from_bytes(blob[:8], "little")]
        try:
            if (refusal := saved_by_another(table, path)) is not None:
                raise FederationError(refusal)
        except WireError as error:
            raise FederationError(f"{path} is damaged ({error}); restore the folder from a backup") from None
        if (why := damaged(blob, path, self.run)) is not None:
            raise FederationError(f"{why}; restore the folder from a backup, or start a new run")
        return unpack_state(blob)

    def blob(self, name: str) -> bytes:
        """The content of a snapshot's file."""
        try:
            return self._path(name).read_bytes()
        except OSError:
            raise FederationError(
                f"client folder {self.folder} has no snapshot '{name}' that the server expects; "
                "restore the folder from a backup, or start a new run"
            ) from None

    def write(self, name: str, state: dict[str, Any]) -> None:
        self.put(name, sealed(pack_state(state), self.run))

    def put(self, name: str, blob: bytes) -> None:
        """Write a snapshot's file."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(name), blob, self.wait)

    def settle(self, name: str) -> None:
        """Wait until the disk holds that snapshot, so that it survives a power cut."""
        with writing(self.folder):
            sync_file(self._path(name))
            sync_file(self.folder)

    def prune(self, keep: set[str | None], durable: str | None = None) -> None:
        """Delete all snapshots but these, and those that the last two checkpoints name; `durable` is the last one's."""
        if self.folder.is_dir():
            keep = keep | self._durable(durable)
            for path in self.folder.glob("*.state"):
                if path.stem not in keep:
                    path.unlink(missing_ok=True)

    def adopt(self, run: str) -> None:
        """Bind all snapshots to another run, which continues from them."""
        for path in self.folder.glob("*.state"):
            blob = self.blob(path.stem)
            if (why := damaged(blob, path)) is not None:
                raise FederationError(f"{why}; run it again")
            write_atomically(path, sealed(blob, run), self.wait)

    def _durable(self, newest: str | None) -> set[str | None]:
        """The snapshots of the last two checkpoints, as orders have named them; a file, since processes come and go."""
        path = self.folder / "durable"
        # a torn file may name a snapshot too few, which only a damaged checkpoint could miss
        known = path.read_bytes().decode(errors="replace").split() if path.exists() else []
        if newest is not None and known[-1:] != [newest]:
            known = [*known[-1:], newest]
            write_atomically(path, " ".join(known).encode(), wait=False)
        return set(known)

    def _path(self, name: str) -> Path:
        if not all(c.isdigit() or c in "-_" for c in name):
            raise FederationError(f"'{name}' is not the name of a snapshot")
        return self.folder / f"{name}.state"


class MemorySnapshots(Snapshots):
    """Snapshots in memory, for the rehearsal."""

    on_disk = False

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}
        self.nbytes = 0  # of the newest snapshot on disk, without its header

    def read(self, name: str | None) -> dict[str, Any]:
        return {} if name is None else dict(self._states[name])

    def write(self, name: str, state: dict[str, Any]) -> None:
        self._states[name] = dict(state)
        self.nbytes = bytes_in(list(state.values()))

    def prune(self, keep: set[str | None], durable: str | None = None) -> None:
        self._states = {k: v for k, v in self._states.items() if k in keep}


def bytes_in(value: Any) -> int:
    """The bytes of all tensors within messages or containers of them."""
    return sum(item.nbytes for item in each_params(value))


def pack_state(state: dict[str, Any]) -> bytes:
    """State as framed blobs: a table of kinds, then one blob a value."""
    kinds = {key: kind_of(value, f"state['{key}']") for key, value in state.items()}
    return frame(encode(kinds, dict[str, str], marks=MARKS | SEALS), *(encode(v, _hint(kinds[k])) for k, v in state.items()))


def unpack_state(blob: bytes) -> dict[str, Any]:
    table, *blobs = unframe(blob) or [b""]
    kinds = decode(table, dict[str, str])
    if len(blobs) != len(kinds):
        raise WireError(f"a state has {len(blobs)} values, and its table names {len(kinds)}")
    return {key: decode(b, _hint(kind)) for (key, kind), b in zip(kinds.items(), blobs)}


def _hint(kind: str) -> Any:
    hint = KINDS.get(kind) or MESSAGES.get(kind)
    if hint is None:
        raise WireError(f"state of the unknown kind '{kind}'")
    return hint


def frame(*blobs: bytes) -> bytes:
    """Several blobs in one, each behind its length."""
    return b"".join(part for blob in blobs for part in (len(blob).to_bytes(8, "little"), blob))


def unframe(blob: bytes | bytearray) -> list[bytes]:
    view, parts, at = memoryview(blob), [], 0
    while at < len(view):
        size = int.from_bytes(view[at : at + 8], "little")
        if at + 8 + size > len(view):
            raise WireError(f"a message is cut off: {size} bytes announced, {len(view) - at - 8} received")
        parts.append(bytes(view[at + 8 : at + 8 + size]))
        at += 8 + size
    return parts
