"""Every reader of foreign bytes, with valid inputs to mutate; those of data files are in `data_readers.py`."""

import contextlib
import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

from data_readers import archives, idx, pictures, tables, written
from fake import EVERYONE, FakeChannel, run_over
from fuzz import Reader, mutated
from toy import ADAM, ALGORITHMS, SMALL, ToyStateful, toy_recipe

from effuse.core.algorithm import Algorithm
from effuse.core.build import build_text
from effuse.core.data import Partition, Shape, Source
from effuse.core.errors import EffuseError
from effuse.core.federation import Order
from effuse.core.files import parsed
from effuse.core.model import Arch
from effuse.core.privacy import Budget, Release
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.registry import registry
from effuse.core.spec import field_hints, text
from effuse.core.wire import decode, encode
from effuse.metrics import store
from effuse.models.saved import load_model, write_plain
from effuse.privacy.ledger import Ledger
from effuse.runs.folder import RunFolder
from effuse.tools.audit_beside import read_audit
from effuse.tools.pack import pack, unpack
from effuse.transport.flower import keys
from effuse.transport.flower.consent import Consent, read_as_shown
from effuse.transport.flower.messages import (
    ENROLMENT,
    HEAD_LIMIT,
    INVITATION,
    ORDER,
    REFUSAL,
    Enrolment,
    Invitation,
    Packet,
    Refusal,
    reason_of,
    refusal,
)
from effuse.transport.flower.site import Site
from effuse.transport.state import Snapshots, bound_to, frame, sealed, unframe
from effuse.transport.worker import Receipt

KINDS = (Algorithm, Source, Partition, Arch)
BUDGET = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")


def grammar(folder: Path) -> Reader:
    """Specs of four kinds, as a manifest or `--set` has them."""
    valid = [text(a).encode() for a in list(ALGORITHMS.values())[:24]] + [text(SMALL).encode()]
    names = [name for kind in KINDS for name in registry(kind)]
    keys = [key for kind in KINDS for cls in registry(kind).values() for key in field_hints(cls)]
    literals = [
        "1",
        "-1",
        "0.5",
        "1e999",
        "None",
        "True",
        "'x'",
        "''",
        "[]",
        "[1]*3",
        "10**9",
        "[[1]]",
        "adam",
        "x.y",
        "\ud800",
        "²",
    ]

    def expression(draw: random.Random, depth: int = 0) -> str:
        if depth > 3 or draw.random() < 0.4:
            return draw.choice(literals)
        inner = [expression(draw, depth + 1) for _ in range(draw.randrange(4))]
        named = [f"{draw.choice(keys)}={word}" if draw.random() < 0.7 else word for word in inner]
        return f"[{', '.join(inner)}]" if draw.random() < 0.3 else f"{draw.choice(names)}({', '.join(named)})"

    def read(blob: bytes, base: int) -> None:
        for kind in KINDS:
            with contextlib.suppress(EffuseError):
                text(build_text(blob.decode(errors="surrogateescape"), kind, "key"))

    return Reader(valid, read, lambda draw, base: expression(draw).encode(errors="surrogatepass"))


STATEFUL = ("client state",)
SENT = ("client state", "scaffold, adam", "fedphd, pruned in the middle", "fedddpm", "localaug")


def recorded_run(folder: Path, algorithms: tuple[str, ...] = STATEFUL) -> tuple[Path, list[tuple[Any, bytes]]]:
    """Runs over a fake grid: the folder of the first, and every message that crossed it with its type."""
    seen: list[tuple[Any, bytes]] = []

    class Listening(FakeChannel):
        def reply(self, node: int, packet: Packet) -> Packet | None:
            answer = super().reply(node, packet)
            if packet.kind == INVITATION:
                seen.append((Invitation, packet.head))
            if answer is not None and answer.kind == ENROLMENT:
                seen.append((Enrolment, answer.head))
            if packet.kind == ORDER:
                order, job = decode(packet.head, Order), recipe.algorithm.jobs[decode(packet.head, Order).job]
                assert answer is not None and order.client == node - 100
                seen.extend([(Order, packet.head), (job.arguments, packet.body), (Receipt, answer.head)])
                seen.append((job.returns, answer.body))
            return answer

    for number, name in enumerate(algorithms):
        recipe = toy_recipe(algorithm=ALGORITHMS[name], rounds=1, reproducible=True)
        run_over(Listening(folder / f"sites-{number}", 3), recipe, folder / f"run-{number}", EVERYONE)
    return folder / "run-0", seen


def wire(folder: Path) -> Reader:
    """Orders, arguments, receipts, replies, enrolments, terms and refusals."""
    _, seen = recorded_run(folder, SENT)
    seen.append((Refusal, refusal("no").head))

    def read(blob: bytes, base: int) -> None:
        hint = seen[base][0]
        if hint is Refusal:
            assert isinstance(reason_of(Packet(REFUSAL, blob)), str)
        value = decode(blob, hint, HEAD_LIMIT if hint in (Receipt, Enrolment) else None)
        encode(value, hint)
        if hint is Invitation:
            read_as_shown(value)

    valid = [blob for _, blob in seen]
    return Reader(valid, read, lambda draw, base: with_header(valid[base], draw))


def with_header(blob: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header is mutated, and has the length that it says."""
    end = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:end])
    part = draw.choice([*header])
    if part == "__metadata__":
        tree = mutated(header[part]["effuse"].encode(), blob[8:end], draw).decode(errors="replace")
        header[part]["effuse"] = tree
    else:
        header[part][draw.choice([*header[part]])] = draw.choice(
            [0, -1, [], [0, 1], [2**63], "F64", "I8", "BOOL", "BF16", None]
        )
    made = json.dumps(header).encode()
    return len(made).to_bytes(8, "little") + made + blob[end:]


def records(folder: Path) -> Reader:
    """result.json, rounds.jsonl, a manifest and an audit of a run."""
    run, _ = recorded_run(folder)
    held = RunFolder(run)
    (run / "audit").mkdir()
    names = ["result.json", "rounds.jsonl", "manifest.json", "audit/audit.json", "ledger.json"]
    (run / "audit" / "audit.json").write_text(json.dumps({"membership": {}, "memorisation": [1.0]}))
    valid = [(run / name).read_bytes() for name in names]

    def manifest() -> None:
        found = read_manifest(run)
        bound_to(run)
        Recipe.restore(found["recipe"])

    reads = [held.read_result, held.records, manifest, lambda: read_audit(run), lambda: parsed(valid[4], "ledger.json")]

    def read(blob: bytes, base: int) -> None:
        (run / names[base]).write_bytes(blob)
        reads[base]()

    return Reader(valid, read)


def states(folder: Path) -> Reader:
    """A client's state and a checkpoint: damaged, or sealed again so that they pass for whole."""
    run, _ = recorded_run(folder)
    held = RunFolder(run)
    snapshots = Snapshots(folder / "sites-0" / "0")
    state, checkpoint = next(snapshots.folder.glob("*.state")), held._checkpoints()[-1]
    valid = [state.read_bytes(), checkpoint.read_bytes()] * 2

    def read(blob: bytes, base: int) -> None:
        if base > 1:
            with contextlib.suppress(ValueError):  # the place of its digest is gone
                blob = sealed(blob, held.digest)
        if base % 2:
            checkpoint.write_bytes(blob)
            held.load_checkpoint()
        else:
            state.write_bytes(blob)
            snapshots.read(state.stem)

    return Reader(valid, read)


def frames(folder: Path) -> Reader:
    """Several blobs in one."""
    return Reader([frame(b"abc", b"", b"x" * 99)], lambda blob, base: unframe(blob))


def packs(folder: Path) -> Reader:
    """The index and the parts of a packed run."""
    run, _ = recorded_run(folder)
    index, part = pack(run, folder / "pack", 1 << 30)

    def read(blob: bytes, base: int) -> None:
        kept = (index, part)[base].read_bytes()
        (index, part)[base].write_bytes(blob)
        try:
            unpack(folder / "pack", folder / "unpacked")
        finally:
            shutil.rmtree(folder / "unpacked", ignore_errors=True)
            (index, part)[base].write_bytes(kept)

    return Reader([index.read_bytes(), part.read_bytes()], read)


def key_files(folder: Path) -> Reader:
    """A private key, a client's public key, both certificates and a signature."""
    keys.init(folder / "keys", 2)
    server, site = folder / "keys" / "server", folder / "keys" / "client-0"
    offered = keys.ServerKeys(server).sign(Invitation("toy", {}, (), "", ""), 7)
    paths = [site / "client.key", server / "clients" / "0.pub", site / "ca.crt"]
    valid = [*(path.read_bytes() for path in paths), offered.certificate.encode(), offered.signature.encode()]

    def read(blob: bytes, base: int) -> None:
        if base < 3:
            paths[base].write_bytes(blob)
        try:
            if base == 1:
                keys.ServerKeys(server).clients()
            else:
                words = {3: {"certificate": blob.decode("latin-1")}, 4: {"signature": blob.decode("latin-1")}}.get(base, {})
                keys.ClientKeys(site, 0).verify(dataclasses.replace(offered, **words), 7)
        finally:
            if base < 3:
                paths[base].write_bytes(valid[base])

    return Reader(valid, read)


def ledgers(folder: Path) -> Reader:
    """A site's ledger: one charge, and a charge with its nonce and its reply."""
    path = folder / "ledger.jsonl"
    path.touch(0o600)
    book = Ledger(path, BUDGET, "run")
    book.charge("ab" * 32, "round 0", [Release("fit", noise=1.0)])
    one = path.read_bytes()
    book.nonce("ab" * 32)
    book.store("ab" * 32, b"reply")
    return Reader([one, path.read_bytes()], written(path, Ledger(path, BUDGET).spent, 0o600))


def models(folder: Path) -> Reader:
    """A saved model: its configuration and its weights; and a file of the cache."""
    arch = SMALL.resolved(Shape(channels=1, side=4, classes=2))
    write_plain(arch, arch.build(), folder / "model", None)
    paths = [folder / "model" / "config.json", folder / "model" / "model.safetensors"]
    valid = [path.read_bytes() for path in paths]

    def read(blob: bytes, base: int) -> None:
        paths[base].write_bytes(blob)
        try:
            load_model(folder / "model")
            if base:
                store._read(paths[1])
        finally:
            paths[base].write_bytes(valid[base])

    return Reader(valid, read)


def sites(folder: Path) -> Reader:
    """What a site has kept: the manifest that it agreed to, and the names of snapshots to keep."""
    recipe = toy_recipe(algorithm=ToyStateful(local=ADAM))
    offered = Invitation("toy", recipe.resolved(recipe.data.load("train")).saved(), ("dark", "light"), "", "")
    site = Site(folder / "site", 0, None, Consent(), "cpu", lambda words: None)
    site.agree(offered)
    paths = [site.folder / "manifest.json", site.folder / "durable"]
    valid = [paths[0].read_bytes(), b"1_0 2_0"]

    def read(blob: bytes, base: int) -> None:
        paths[base].write_bytes(blob)
        if base == 0:
            site.agree(offered)
        else:
            Snapshots(site.folder).prune({None}, "3_0")

    return Reader(valid, read)


READERS = {
    reader.__name__: reader
    for reader in (
        grammar,
        wire,
        records,
        states,
        frames,
        packs,
        archives,
        idx,
        pictures,
        tables,
        key_files,
        ledgers,
        models,
        sites,
    )
}
