"""The bundle's contents and launcher; `make test-bundle` packs and runs real bundles, which needs downloads."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
found = importlib.util.spec_from_file_location("bundle", ROOT / "tools" / "bundle.py")
bundle = importlib.util.module_from_spec(found)
found.loader.exec_module(bundle)
WITHOUT = set(bundle.WITHOUT.split(","))


def test_the_bundle_holds_what_effuse_needs_and_no_extras():
    packages = bundle.needed(WITHOUT)
    assert {"diffusers", "safetensors", "pydantic-core", "typer", "rich", "torch-pruning", "dp-accounting"} <= set(packages)
    assert not {"torch", "numpy", "pillow", "scikit-learn", "scipy", "flwr", "matplotlib", "pytest"} & set(packages)
    assert "numpy" in bundle.needed(WITHOUT - {"numpy"})


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.13.0"])
def test_torch_of_gpu_images_is_accepted(version):
    (torch,) = (r for r in map(Requirement, bundle.required()) if r.name == "torch")
    assert torch.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_wheels_are_those_of_the_target(python):
    options = bundle.choosing(python, "manylinux2014_x86_64")
    assert options[options.index("--python-version") + 1] == python and "--only-binary=:all:" in options


def started(tmp_path, python: str, versions: dict[str, str]) -> subprocess.CompletedProcess:
    """Start a bundle whose effuse prints hello, on a machine with only these packages."""
    (tmp_path / "lib" / "effuse").mkdir(parents=True)
    (tmp_path / "lib" / "effuse" / "__init__.py").write_text("")
    (tmp_path / "lib" / "effuse" / "cli.py").write_text("def main():\n    print('hello')\n")
    (tmp_path / "effuse").write_text(bundle.launcher(python, WITHOUT))
    for name, version in versions.items():
        info = tmp_path / "machine" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    environment = {"PYTHONPATH": str(tmp_path / "machine"), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", str(tmp_path / "effuse")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


OURS = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize("torch", ["2.11.0a0+git", "2.13.0"])
def test_the_launcher_starts_effuse(tmp_path, torch):
    done = started(tmp_path, OURS, {"torch": torch, "numpy": "2.1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


@pytest.mark.parametrize(
    ("python", "versions", "words"),
    [
        ("3.99", {}, f"this bundle is for Python 3.99, not {OURS}; use python3.99, or `make bundle PYTHON={OURS}`"),
        (OURS, {"torch": "2.11"}, "this bundle needs numpy on the machine; install it"),
        (OURS, {"torch": "2.9.1", "numpy": "2.1"}, "this bundle needs torch 2.11 or newer, not 2.9.1; install one"),
    ],
)
def test_the_launcher_refuses_in_a_sentence(tmp_path, python, versions, words):
    done = started(tmp_path, python, versions)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith(f"effuse: {words}")
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_is_no_bundle_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("years of work")
    monkeypatch.setattr(sys, "argv", ["bundle.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="this folder is not a bundle; name a new folder"):
        bundle.main()
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
