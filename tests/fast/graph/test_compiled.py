"""Compiled code is cached between processes."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy import ToyUnet, toy_recipe

from effuse.fast.graph.compiled import keep_compiled
from effuse.fast.speed import machines_for

# a matrix product is a kernel of torch's own: compiling it needs no C++ compiler
SCRIPT = """
import json, torch
from effuse.fast.graph.compiled import keep_compiled
keep_compiled(torch.device("cpu"))
compiled = torch.compile(lambda x, w: x @ w)
compiled(torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)).sum().backward()
from torch._dynamo.utils import counters
print(json.dumps({k: dict(counters[k]) for k in ("inductor", "aot_autograd")}))
"""


def counted(cache: Path) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"EFFUSE_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow("compiles in two processes; only another torch or a change to fast/graph/compiled.py breaks it")
def test_a_second_process_compiles_nothing(tmp_path):
    """A product and its gradient are two graphs: both missed by the first process and found by the second."""
    first, second = counted(tmp_path), counted(tmp_path)
    assert first["inductor"]["fxgraph_cache_miss"] == 2 and "fxgraph_cache_hit" not in first["inductor"]
    assert second["inductor"]["fxgraph_cache_hit"] == 2 and "fxgraph_cache_miss" not in second["inductor"]
    assert second["aot_autograd"]["autograd_cache_hit"] == 1
    (folder,) = (tmp_path / "compiled").iterdir()
    assert folder.name.startswith(f"torch-{torch.__version__}-") and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_machine_that_compiles_sets_the_cache_first(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFUSE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")  # restored afterwards
    recipe = toy_recipe(speed="compile", model=ToyUnet()).resolved(toy_recipe().data.load("train"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 (test)")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    machines_for(recipe, torch.device("cuda"), 40)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine", "the user's setting stays"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    machines_for(recipe, torch.device("cuda"), 40)
    chosen = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert chosen == tmp_path / "compiled" / f"torch-{torch.__version__}-NVIDIA-H200-test-" and chosen.is_dir()


def test_a_cache_that_cannot_be_written_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EFFUSE_CACHE", str(tmp_path / "file"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled(torch.device("cpu"))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
