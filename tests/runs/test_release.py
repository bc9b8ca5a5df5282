"""Which effuse a run was made with."""

import shutil
from pathlib import Path

import torch

import effuse
from effuse.runs.release import source, versions


def digest_of(monkeypatch, package: Path) -> str:
    monkeypatch.setattr(effuse, "__file__", str(package / "__init__.py"))
    source.cache_clear()
    return source()


def test_a_source_is_known_by_its_files(tmp_path, monkeypatch):
    """Copies and compiled files do not change the digest; a comment or a renamed file does."""
    here = digest_of(monkeypatch, Path(effuse.__file__).parent)
    copy = tmp_path / "elsewhere"
    shutil.copytree(Path(effuse.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "core" / "__pycache__").mkdir()
    (copy / "core" / "__pycache__" / "left.pyc").write_bytes(b"over")
    assert digest_of(monkeypatch, copy) == here and len(here) == 16
    (copy / "core" / "rng.py").write_text((copy / "core" / "rng.py").read_text() + "# more\n")
    commented = digest_of(monkeypatch, copy)
    (copy / "core" / "rng.py").rename(copy / "core" / "rng2.py")
    assert len({here, commented, digest_of(monkeypatch, copy)}) == 3
    source.cache_clear()


def test_a_manifest_names_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a fast one at {device}")
    assert versions("cuda")["gpu"] == "a fast one at cuda"
    assert versions("cpu").keys() == {"python", "torch", "machine", "source"}
