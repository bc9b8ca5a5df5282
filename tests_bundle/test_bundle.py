"""Real bundles for two Pythons: right wheels, small, and running beside only torch and similar (`make test-bundle`)."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"
WITHOUT = ("torch", "numpy", "pillow", "scikit-learn")


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """A bundle for a Python, made once."""
    made: dict[str, Path] = {}

    def get(python: str) -> Path:
        if python not in made:
            made[python] = tmp_path_factory.mktemp("bundle") / python
            command = [sys.executable, str(ROOT / "tools" / "bundle.py"), "--python", python, "--out", str(made[python])]
            subprocess.run(command, check=True)
        return made[python]

    return get


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Path:
    """The packages of a machine: those that a bundle leaves out, and their dependencies."""
    folder, queue, seen = tmp_path_factory.mktemp("machine"), list(WITHOUT), set()
    while queue:
        name = queue.pop()
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # what a marker excludes
        if package.name in seen:
            continue
        seen.add(package.name)
        for top in {Path(f).parts[0] for f in package.files or [] if ".." not in Path(f).parts}:
            if not (folder / top).exists():
                (folder / top).symlink_to(package.locate_file(top))
        wanted = [line for line in package.requires or [] if "extra" not in line]
        queue += [re.match(r"[\w.-]+", line)[0] for line in wanted]
    return folder


def effuse(bundle: Path, machine: Path, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(machine), "PATH": os.environ["PATH"], "HOME": str(machine), "HF_HUB_OFFLINE": "1"}
    command = [python, "-S", str(bundle / "effuse"), *arguments]
    return subprocess.run(command, env=environment, cwd=machine, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_a_bundle_is_small_and_its_wheels_are_the_targets(bundled, python):
    bundle = bundled(python)
    assert sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file()) < 50_000_000
    binaries = [f.name for f in bundle.rglob("*.so")]
    tag = python.replace(".", "")
    assert binaries and all(f"cpython-{tag}-" in n or "abi3" in n for n in binaries), binaries


def test_a_bundle_runs_where_only_torch_and_the_like_are_installed(bundled, machine):
    bundle = bundled(OURS)
    shown = effuse(bundle, machine, "--help")
    assert shown.returncode == 0 and "Usage: effuse" in shown.stdout, shown.stderr
    options = ["--rounds", "1", "--set", "evaluate.metrics=[]", "--set", "sampler.steps=2", "--json"]
    ran = effuse(bundle, machine, "run", "demo", *options, "--out", "run")
    assert ran.returncode == 0 and "weights_sha256" in ran.stdout, ran.stderr
    workers = effuse(bundle, machine, "run", "demo", *options, "--out", "workers", "--workers", "2")
    digest = r'"weights_sha256": "(\w+)"'
    assert re.search(digest, workers.stdout)[1] == re.search(digest, ran.stdout)[1], workers.stderr


def test_a_bundle_for_another_python_refuses(bundled, machine):
    other = "3.12" if OURS == "3.11" else "3.11"
    refused = effuse(bundled(other), machine, "--help")
    assert refused.returncode == 1 and refused.stdout == ""
    assert refused.stderr.startswith(f"effuse: this bundle is for Python {other}, not {OURS}; use python{other}")
