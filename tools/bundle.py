"""Pack effuse and the packages it needs into one folder that runs without a network: `python3 bundle/effuse run demo`.

    python tools/bundle.py --python 3.12 --without torch,numpy --out bundle

Wheels are chosen for the Python of the target machine, which may be another than ours; what is listed by --without (and what only that
needs) is expected there already. Versions are those of constraints.txt.
"""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# what a GPU image carries, or what only a corner of effuse needs
WITHOUT = "torch,numpy,pillow,scikit-learn,hf-xet"
NEVER_MISSING = ("torch", "numpy")  # without these nothing runs; the others are missed where they are needed
LIMIT = 50_000_000
# diffusers' pipelines that a saved model names; the others are half of its size and nothing of ours reaches them
KEPT_PIPELINES = ("ddpm", "ddim")
LAUNCHER = '''"""Start effuse from this folder, with a Python of the version that it was packed for."""

import importlib.metadata
import re
import sys
from pathlib import Path

PYTHON, EXPECTED = {python!r}, {expected!r}


def refusal():  # readable to an old Python too, which is to be refused in a sentence
    """Why this machine cannot run the bundle."""
    ours, theirs = (".".join(map(str, v)) for v in (sys.version_info[:2], PYTHON))
    if ours != theirs:
        return f"this bundle is for Python {{theirs}}, not {{ours}}; use python{{theirs}}, or `make bundle PYTHON={{ours}}`"
    for package, least in EXPECTED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"this bundle expects {{package}} on the machine, which has none; install it, or shorten WITHOUT="
        if [int(n) for n in re.findall(r"\\d+", found)[: len(least)]] < least:
            return f"this bundle needs {{package}} {{'.'.join(map(str, least))}} or newer, not {{found}}; install one"
    return None


words = refusal()
if words:
    sys.exit(f"effuse: {{words}}")
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from effuse.cli import main

main()
'''


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required() -> list[str]:
    """What effuse itself needs, without its extras."""
    lines: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return lines


def needed(without: set[str]) -> list[str]:
    """Every package that effuse needs, and theirs, less those that the target has."""
    found: list[str] = []
    queue = required()
    while queue:
        name, _, marker = queue.pop().partition(";")
        package = plain(re.match(r"[\w.-]+", name)[0])
        if "extra" in marker or package in without or package in found or not present(package):
            continue
        found.append(package)
        queue += importlib.metadata.requires(package) or []
    return sorted(found)


def present(package: str) -> bool:
    """Whether it is installed here; what a marker excludes is not."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def launcher(python: str, without: set[str]) -> str:
    """The script that starts a bundle, or says why it cannot."""
    expected = {}
    for line in required():
        name, _, least = line.partition(">=")
        if plain(name) in without and plain(name) in NEVER_MISSING:
            expected[plain(name)] = [int(n) for n in re.findall(r"\d+", least.partition(",")[0])]
    return LAUNCHER.format(python=tuple(map(int, python.split("."))), expected=expected)


def choosing(python: str, platform: str) -> list[str]:
    """pip's options for wheels of another Python than ours, and for nothing but wheels."""
    platforms = [x for p in (platform, "manylinux_2_17_x86_64", "manylinux_2_28_x86_64") for x in ("--platform", p)]
    return ["--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]


def trim(library: Path) -> None:
    """Drop what nothing of ours reaches."""
    for pipeline in (library / "diffusers" / "pipelines").iterdir():
        if pipeline.is_dir() and pipeline.name not in KEPT_PIPELINES:
            shutil.rmtree(pipeline)
    for waste in [*library.rglob("__pycache__"), *library.glob("*.dist-info/RECORD"), library / "bin"]:
        shutil.rmtree(waste) if waste.is_dir() else waste.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=ours, help="version on the target machine")
    parser.add_argument("--without", default=WITHOUT, help="packages that the target machine has")
    parser.add_argument("--platform", default="manylinux2014_x86_64", help="wheel platform of the target machine")
    parser.add_argument("--out", type=Path, default=ROOT / "bundle")
    asked = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", asked.python):
        sys.exit(f"--python {asked.python}: expected a version such as 3.12")
    without = {plain(p) for p in asked.without.split(",")}
    packages = [f"{p}=={importlib.metadata.version(p)}" for p in needed(without)]
    library, starter = asked.out / "lib", asked.out / "effuse"
    if asked.out.exists() and any(asked.out.iterdir()):
        if not (starter.is_file() and library.is_dir()):
            sys.exit(f"--out {asked.out}: there is something else than a bundle in it; name a new folder")
        shutil.rmtree(asked.out)
    library.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(library)]
    subprocess.run([*command, *choosing(asked.python, asked.platform), *packages], check=True)
    shutil.copytree(ROOT / "src" / "effuse", library / "effuse")
    trim(library)
    starter.write_text(launcher(asked.python, without))
    size = sum(f.stat().st_size for f in asked.out.rglob("*") if f.is_file())
    print(
        f"{asked.out}: {size / 1e6:.1f} MB, {len(packages)} packages for Python {asked.python}; expected there: {asked.without}"
    )
    if size > LIMIT:
        sys.exit(f"the bundle is over {LIMIT / 1e6:.0f} MB; name more packages in --without")


if __name__ == "__main__":
    main()
