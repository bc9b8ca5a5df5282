"""Write deploy/requirements.lock: what the container installs, to the version and the hash.

    python tools/lock.py [--check]

Packages are those that effuse[flower] needs on Linux with Python 3.12; versions are those of constraints.txt; hashes are
of the wheels of a version, as https://pypi.org/simple lists them. With --check nothing is written: the command fails if the
file is not what it would write. torch is left out: its builds for CPUs are not on PyPI and have other hashes, so
deploy/Containerfile takes the address and hash of its wheel as an argument.
"""

import argparse
import importlib.metadata
import re
import sys
import urllib.request
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "deploy" / "requirements.lock"
INDEX = "https://pypi.org/simple"
TARGET = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "platform_system": "Linux"}
# for Python 3.12, or for all or older ones by a stable interface, on any machine or on Linux
PYTHON = re.compile(r"(py3(12)?-none|cp312-cp312|cp3([2-9]|1[0-2])-abi3)-(any|manylinux\w*_(x86_64|aarch64))")
FOR_GPUS = ("nvidia-", "cuda-", "triton")  # what only torch's builds for GPUs need
BUILD = {"setuptools": "80.9.0"}  # builds effuse itself, without a download of its own


def pinned() -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def needed(roots: list[str]) -> list[str]:
    """The packages that these requirements lead to, as the installed ones declare them."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or name.startswith(FOR_GPUS):
            continue
        seen.add((name, extras))
        waiting += [r for line in importlib.metadata.requires(name) or [] if _applies(r := Requirement(line), extras)]
    return sorted({name for name, _ in seen} - {"effuse", "torch", *BUILD})


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate(TARGET | {"extra": extra}) for extra in extras | {""})


def hashes(name: str, version: str) -> list[str]:
    """The SHA-256 of every wheel of a version that the target may install."""
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as answer:
        return fitting(answer.read().decode(), version)


def fitting(page: str, version: str) -> list[str]:
    """The SHA-256 of every such wheel on a page of the index."""
    listed = re.findall(r'href="[^"]*/([^"/]+\.whl)#sha256=([0-9a-f]{64})"', page)
    return sorted({digest for file, digest in listed if _fits(file, version)})


def _fits(file: str, version: str) -> bool:
    try:
        _, found, _, tags = parse_wheel_filename(file)
    except (InvalidWheelFilename, InvalidVersion):
        return False
    return str(found) == version and any(PYTHON.fullmatch(str(tag)) for tag in tags)


def lock(names: list[str], versions: dict[str, str]) -> str:
    """The content of the file."""
    lines = [
        "# written by tools/lock.py; pip install --require-hashes --only-binary :all: --no-deps -r deploy/requirements.lock"
    ]
    for name in names:
        digests = hashes(name, versions[name])
        if not digests:
            raise SystemExit(f"{INDEX} has no wheel of {name} {versions[name]} for the container; change constraints.txt")
        lines.append(" \\\n".join([f"{name}=={versions[name]}", *(f"    --hash=sha256:{digest}" for digest in digests)]))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the file would change")
    arguments = parser.parse_args()
    versions = pinned() | BUILD
    try:
        made = lock(sorted([*needed(["effuse[flower]"]), *BUILD]), versions)
    except OSError as error:
        raise SystemExit(f"{INDEX} cannot be reached ({error}); nothing was checked or written") from None
    if not arguments.check:
        LOCK.write_text(made)
    elif made != LOCK.read_text():
        raise SystemExit(f"{LOCK} is not what constraints.txt and {INDEX} lead to; run python tools/lock.py")
    print(f"{LOCK.relative_to(ROOT)}: {made.count('==')} packages, {made.count('--hash=')} wheels", file=sys.stderr)


if __name__ == "__main__":
    main()
