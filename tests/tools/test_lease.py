"""A plan on a machine that is lent for minutes: lanes, their ends, and what comes home."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent.parent / "tools" / "lease.py"
found = importlib.util.spec_from_file_location("lease", TOOL)
lease = importlib.util.module_from_spec(found)
found.loader.exec_module(lease)

# stands for effuse: writes its words into the folder that --out names, and fails if asked to
FAKE = """
import json, pathlib, sys
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
(out / "result.json").write_text(json.dumps({"metrics": {"fid": {"value": float(words[1])}}}))
print("ran", *words)
sys.exit("fail" in words)
"""


@pytest.fixture
def effuse(tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    return f"{sys.executable} {tmp_path / 'fake.py'}"


def called(*words) -> str:
    return subprocess.run([sys.executable, TOOL, *map(str, words)], capture_output=True, text=True, check=True).stdout


def test_the_runs_of_a_table_are_named_by_its_scale():
    words = lease.command_of("reproduce fedddpm.headline --scale smoke", Path("/r"), ["effuse"])
    assert words == ["effuse", *["reproduce", "fedddpm.headline", "--scale", "smoke", "--out", "/r/fedddpm.headline-smoke"]]
    assert lease.command_of("reproduce x", Path("/r"), ["effuse"])[-1] == "/r/x-paper"
    assert lease.command_of("run 'demo' --out mine", Path("/r"), ["effuse"]) == ["effuse", "run", "demo", "--out", "/r/mine"]


def test_lanes_end_where_a_command_fails_or_a_number_is_too_large(tmp_path, effuse):
    """Lane 0: 9 is below 10, 11 is not, so `c` never runs. Lane 1: `d` fails, so `e` never runs. Lane 2 has no such run."""
    plan, runs = tmp_path / "plan", tmp_path / "runs"
    plan.write_text(
        "# a comment\n[lane]\nrun 9 --out a\nbelow a fid 10\nrun 11 --out b # another\nbelow b fid 10\nrun 1 --out c\n"
        "[lane]\nrun 1 --out d fail\nrun 1 --out e\n[lane]\nbelow nowhere fid 10\nrun 1 --out f\n"
    )
    called("run", plan, "--runs", runs, "--effuse", effuse)
    assert sorted(p.name for p in runs.iterdir() if p.is_dir()) == ["a", "b", "d", "logs"]
    ends = [(runs / "logs" / f"lane-{i}.log").read_text().splitlines()[-1] for i in range(3)]
    assert ends == [
        "== below b fid 10: b has fid 11.0, which is not below 10; the lane ends here",
        "== run 1 --out d fail: exit code 1; the lane ends here",
        "== below nowhere fid 10: nowhere has not finished; the lane ends here",
    ]


@pytest.mark.parametrize("value", [float("nan"), None])
def test_what_is_no_number_is_not_below(tmp_path, value):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "result.json").write_text(json.dumps({"metrics": {"fid": {"value": value}}}))
    with pytest.raises(lease.Ended):
        lease.require_below(tmp_path, "r", "fid", "10")


def test_everything_comes_home_in_parts_and_once(tmp_path):
    """Records come before the model, which waits for the second call: 1.0 MiB and 0.2 do not fit into four parts of 0.3."""
    runs, home = tmp_path / "runs", tmp_path / "home"
    (runs / "r" / "model").mkdir(parents=True)
    (runs / "logs").mkdir()
    (runs / "r" / "result.json").write_bytes(b"r" * 200_000)
    (runs / "r" / "model" / "weights.safetensors").write_bytes(bytes(range(256)) * 4096)
    assert "1 files left" in called("home", runs, "--to", tmp_path / "out1", "--part", 0.3)
    assert "0 files left" in called("home", runs, "--to", tmp_path / "out2", "--part", 0.3)
    nothing = called("home", runs, "--to", tmp_path / "out3", "--part", 0.3)
    assert "0 files left" in nothing and "0.0 MiB" in nothing
    home.mkdir()
    for out in ("out1", "out2"):
        parts = sorted((tmp_path / out).iterdir())
        assert len(parts) <= 4 and max(p.stat().st_size for p in parts) <= 0.3 * 2**20
        subprocess.run(["tar", "x", "-C", home], input=b"".join(p.read_bytes() for p in parts), check=True)
    for file in ("r/result.json", "r/model/weights.safetensors"):
        assert (home / file).read_bytes() == (runs / file).read_bytes()
    (runs / "r" / "result.json").write_bytes(b"again")
    called("home", runs, "--to", tmp_path / "out4")
    subprocess.run(["tar", "x", "-C", home], input=(tmp_path / "out4" / "part-00").read_bytes(), check=True)
    assert (home / "r/result.json").read_bytes() == b"again"


def test_checkpoints_come_home_from_unfinished_runs_only(tmp_path):
    """`a` has a result, `b` has none; the preparation and the models of both come, and pages never."""
    for run in "ab":
        for file in (
            "checkpoints/000003.safetensors",
            "prepared.safetensors",
            "model/unet/weights.safetensors",
            "report.html",
        ):
            (tmp_path / run / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / run / file).touch()
    (tmp_path / "a" / "result.json").write_text("{}")
    found = [str(p.relative_to(tmp_path)) for p in lease.fresh(tmp_path)]
    kept = [f"{run}/{file}" for run in "ab" for file in ("model/unet/weights.safetensors", "prepared.safetensors")]
    assert found == ["a/result.json", *kept, "b/checkpoints/000003.safetensors"]


def test_the_plan_of_the_gpu_ledger_can_be_read(tmp_path):
    """Every line of it names a known command, and its tables and cells exist."""
    plan = Path(__file__).parent.parent.parent / "docs" / "notes" / "gpu.plan"
    from effuse.recipes import find_recipe, find_table

    lines = [line for lane in lease.lanes_of(plan.read_text()) for line in lane]
    assert lines
    for line in lines:
        words = lease.shlex.split(line)
        if words[0] == "reproduce":
            only = words[words.index("--only") + 1] if "--only" in words else None
            find_table(words[1])[1].chosen(only)
        elif words[0] == "run":
            find_recipe(words[1])
        else:
            assert words[0] == "below" and len(words) == 4
