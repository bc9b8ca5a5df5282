"""Pack effuse and the packages it needs into one folder that runs without a network: `python3 bundle/effuse run demo`.

    python tools/bundle.py --python 3.12 --without torch,numpy --out bundle

Wheels are chosen for the Python of the target machine, which may differ from this one. The target must already have the
packages in --without, and those that only they need. Versions are those of constraints.txt.
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
# packages that GPU images contain, or that few parts of effuse need
WITHOUT = "torch,numpy,pillow,scikit-learn,scipy,hf-xet"
NEVER_MISSING = ("torch", "numpy")  # the launcher checks these; the others fail where they are used
LIMIT = 50_000_000
# the pipelines of diffusers that saved models use; the others are half of its size
KEPT_PIPELINES = ("ddpm", "ddim")
LAUNCHER = '''"""Start effuse from this folder, with a Python of the version that it was packed for."""

import importlib.metadata
import re
import sys
from pathlib import Path

PYTHON, EXPECTED = {python!r}, {expected!r}


def refusal():  # without new syntax, so that an old Python prints the refusal
    """Why this machine cannot run the bundle."""
    running, wanted = (".".join(map(str, v)) for v in (sys.version_info[:2], PYTHON))
    if running != wanted:
        remedy = f"use python{{wanted}}, or `make bundle PYTHON={{running}}`"
        return f"this bundle is for Python {{wanted}}, not {{running}}; {{remedy}}"
    for package, least in EXPECTED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"this bundle needs {{package}} on the machine; install it, or shorten WITHOUT="
        if [int(n) for n in re.findall(r"\\d+", found)[: len(least)]] < least:
            return f"this bundle needs {{package}} {{'.'.join(map(str, least))}} or newer, not {{found}}; install one"
    return None


reason = refusal()
if reason:
    sys.exit(f"effuse: {{reason}}")
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from effuse.cli import main

main()
'''


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required() -> list[str]:
    """The dependencies of effuse, without its extras."""
    lines: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return lines


def needed(without: set[str]) -> list[str]:
    """Every package that effuse needs, directly or indirectly, except those of the target."""
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
    """Whether a package is installed here; one that a marker excludes is not."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def launcher(python: str, without: set[str]) -> str:
    """The script that starts a bundle, or reports why it cannot."""
    expected = {}
    for line in required():
        name, _, least = line.partition(">=")
        if plain(name) in without and plain(name) in NEVER_MISSING:
            expected[plain(name)] = [int(n) for n in re.findall(r"\d+", least.partition(",")[0])]
    return LAUNCHER.format(python=tuple(map(int, python.split("."))), expected=expected)


def choosing(python: str, platform: str) -> list[str]:
    """pip's options to install only wheels, for the target's Python."""
    platforms = [x for p in (platform, "manylinux_2_17_x86_64", "manylinux_2_28_x86_64") for x in ("--platform", p)]
    return ["--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]


def trim(library: Path) -> None:
    """Delete files that effuse does not use."""
    for pipeline in (library / "diffusers" / "pipelines").iterdir():
        if pipeline.is_dir() and pipeline.name not in KEPT_PIPELINES:
            shutil.rmtree(pipeline)
    tests = [*library.rglob("tests"), *library.rglob("*_test.py")]
    records = [*library.rglob("__pycache__"), *library.glob("*.dist-info/RECORD")]
    for unused in [*tests, *records, library / "bin", library / "diffusers" / "modular_pipelines"]:
        shutil.rmtree(unused) if unused.is_dir() else unused.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=running, help="Python version of the target machine")
    parser.add_argument("--without", default=WITHOUT, help="packages that are installed on the target machine")
    parser.add_argument("--platform", default="manylinux2014_x86_64", help="wheel platform of the target machine")
    parser.add_argument("--out", type=Path, default=ROOT / "bundle")
    options = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", options.python):
        sys.exit(f"--python {options.python}: expected a version such as 3.12")
    without = {plain(p) for p in options.without.split(",")}
    packages = [f"{p}=={importlib.metadata.version(p)}" for p in needed(without)]
    library, starter = options.out / "lib", options.out / "effuse"
    if options.out.exists() and any(options.out.iterdir()):
        if not (starter.is_file() and library.is_dir()):
            sys.exit(f"--out {options.out}: this folder is not a bundle; name a new folder")
        shutil.rmtree(options.out)
    library.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(library)]
    subprocess.run([*command, *choosing(options.python, options.platform), *packages], check=True)
    trim(library)
    shutil.copytree(ROOT / "src" / "effuse", library / "effuse", ignore=shutil.ignore_patterns("__pycache__"))
    starter.write_text(launcher(options.python, without))
    size = sum(f.stat().st_size for f in options.out.rglob("*") if f.is_file())
    print(f"{options.out}: {size / 1e6:.1f} MB, {len(packages)} packages for Python {options.python}")
    print(f"the target machine must have {options.without}")
    if size > LIMIT:
        sys.exit(f"the bundle is over {LIMIT / 1e6:.0f} MB; name more packages in --without")


if __name__ == "__main__":
    main()
