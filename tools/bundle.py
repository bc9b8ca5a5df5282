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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# what a GPU image carries, or what only a corner of effuse needs
WITHOUT = "torch,numpy,pillow,scikit-learn,hf-xet"
LIMIT = 50_000_000
# diffusers' pipelines that a saved model names; the others are half of its size and nothing of ours reaches them
KEPT_PIPELINES = ("ddpm", "ddim")
LAUNCHER = '''"""Start effuse from this folder, whatever Python runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from effuse.cli import main

main()
'''


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(without: set[str]) -> list[str]:
    """Every package that effuse needs, and theirs, less those that the target has."""
    found: list[str] = []
    queue = ["effuse"]
    while queue:
        for line in importlib.metadata.requires(queue.pop()) or []:
            name, _, marker = line.partition(";")
            package = plain(re.match(r"[\w.-]+", name)[0])
            if "extra" in marker or package in without or package in found or not present(package):
                continue
            found.append(package)
            queue.append(package)
    return sorted(found)


def present(package: str) -> bool:
    """Whether it is installed here; what a marker excludes is not."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="version on the target machine"
    )
    parser.add_argument("--without", default=WITHOUT, help="packages that the target machine has")
    parser.add_argument("--platform", default="manylinux2014_x86_64", help="wheel platform of the target machine")
    parser.add_argument("--out", type=Path, default=ROOT / "bundle")
    asked = parser.parse_args()
    packages = [f"{p}=={importlib.metadata.version(p)}" for p in needed({plain(p) for p in asked.without.split(",")})]
    library = asked.out / "lib"
    shutil.rmtree(asked.out, ignore_errors=True)
    library.mkdir(parents=True)
    platforms = [x for p in (asked.platform, "manylinux_2_17_x86_64", "manylinux_2_28_x86_64") for x in ("--platform", p)]
    choose = ["--no-deps", "--only-binary=:all:", "--python-version", asked.python, *platforms]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(library)]
    subprocess.run([*command, *choose, *packages], check=True)
    shutil.copytree(ROOT / "src" / "effuse", library / "effuse")
    for pipeline in (library / "diffusers" / "pipelines").iterdir():
        if pipeline.is_dir() and pipeline.name not in KEPT_PIPELINES:
            shutil.rmtree(pipeline)
    for waste in [*library.rglob("__pycache__"), *library.glob("*.dist-info/RECORD"), library / "bin"]:
        shutil.rmtree(waste) if waste.is_dir() else waste.unlink(missing_ok=True)
    (asked.out / "effuse").write_text(LAUNCHER)
    size = sum(f.stat().st_size for f in asked.out.rglob("*") if f.is_file())
    print(
        f"{asked.out}: {size / 1e6:.1f} MB, {len(packages)} packages for Python {asked.python}; expected there: {asked.without}"
    )
    if size > LIMIT:
        sys.exit(f"the bundle is over {LIMIT / 1e6:.0f} MB; name more packages in --without")


if __name__ == "__main__":
    main()
