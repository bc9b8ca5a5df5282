"""What `effuse doctor` finds, and what it says about the rest."""

import torch

from effuse.tools import doctor


def examined(folder) -> dict:
    return {finding.what: finding for finding in doctor.examine(folder)}


def test_what_is_there_needs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    (tmp_path / "inception_fid.safetensors").touch()
    monkeypatch.setattr(doctor, "ROOMY", 0)
    found = examined(tmp_path / "runs" / "not" / "yet")
    assert found["torch"].found == torch.__version__ and found["torch"].remedy is None
    assert found["inception_fid.safetensors"] == doctor.Finding("inception_fid.safetensors", "found")
    assert str(tmp_path) in found["disk for runs"].found and found["disk for runs"].remedy is None
    assert "only needed for CelebA" in found["celeba"].remedy


def test_what_is_missing_has_a_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv("EFFUSE_DATA", raising=False)
    monkeypatch.setattr(doctor, "ROOMY", 2**80)
    monkeypatch.setattr(doctor, "EXTRAS", {"no-such-package": "nothing"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = examined(tmp_path)
    for what in ("EFFUSE_DATA", "no-such-package", "GPU", "disk for runs"):
        assert found[what].remedy, what
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path / "gone"))
    assert "is not a folder" in examined(tmp_path)["EFFUSE_DATA"].found
