"""`effuse report`, `compare` and `partition`, and the pages that other commands leave."""

import json
from pathlib import Path

import pytest
from toy import ToyImages

from effuse.core.data import Dataset
from effuse.core.spec import spec

EVIL = "<script>alert(1)</script>"


@spec
class RichNames(ToyImages):
    """The toy's images, whose classes are markup of the terminal and of pages."""

    def load(self, split):
        data = super().load(split)
        return Dataset(data.images, data.labels, ("[red]dark[/red]", EVIL))


@pytest.fixture
def ran(effuse, toy_file):
    assert effuse(f"run {toy_file()} --out run --quiet").code == 0
    return Path("run")


def test_a_run_leaves_its_page_and_a_command_writes_others(effuse, ran):
    assert "Finished: fedavg with 3 clients" in (ran / "report.html").read_text()
    (ran / "report.html").unlink()
    told = effuse("report run")
    assert told.out == "the page is run/report.html; only you can read it, and --public writes one to pass on\n"
    assert effuse("report run --public --out p/page.html --json").json == {"run": "run", "page": "p/page.html"}
    assert "may be passed on: it has no real image" in Path("p/page.html").read_text()
    assert effuse("report run --public --quiet") == (0, "", "") and (ran / "public.html").is_file()


def test_a_page_is_refused_in_a_sentence(effuse, ran):
    assert effuse("report nowhere").sentence == "RunError: nowhere is not a run folder; give one that `effuse run` wrote"
    assert effuse("report run --nearest").sentence.endswith("make them with `effuse audit run`")
    assert "a public page shows no real images" in effuse("report run --nearest --public").sentence
    (ran / "rounds.jsonl").write_text("{\n")
    assert "rounds.jsonl is damaged" in effuse("report run").sentence


def test_a_resumed_run_and_every_seed_have_pages(effuse, toy_file, ran):
    for name in ("result.json", "report.html"):
        (ran / name).unlink()
    assert effuse("resume run --quiet").code == 0 and (ran / "report.html").is_file()
    assert effuse(f"run {toy_file()} --seeds 0,1 --out seeds --quiet").code == 0
    assert len([*Path("seeds").glob("*/report.html")]) == 2


def test_compare_prints_a_sorted_table_and_writes_a_page(effuse, toy_file, ran):
    assert effuse(f"run {toy_file()} --rounds 1 --out short --quiet").code == 0
    answer = effuse("compare run short")
    assert answer.out.index("run ") < answer.out.index("short") < answer.out.index("the page is compare.html")
    found = effuse("compare short run --by bytes --out c.html --json").json
    assert [row["run"] for row in found["runs"]] == ["short", "run"] and Path("c.html").is_file()
    assert "--by fid: no run has it" in effuse("compare run short --by fid").sentence
    assert "is not a run folder" in effuse("compare run nowhere").sentence


def test_partition_draws_who_would_hold_what(effuse, toy_file):
    answer = effuse(f"partition {toy_file()} --clients 4 --out p.html")
    rows = [line.split() for line in answer.out.splitlines() if line[:8].strip().isdigit()]
    assert [row[:2] for row in rows] == [["0", "10"], ["1", "10"], ["2", "10"], ["3", "10"]]
    assert all(int(total) == int(dark) + int(light) for _, total, dark, light in rows)
    assert "40 images in 2 classes, 4 clients" in Path("p.html").read_text()
    assert "not found; give a folder of images" in effuse(f"partition {toy_file()} --data nowhere").sentence
    found = effuse(f"partition {toy_file()} --json").json
    assert found["classes"] == ["dark", "light"] and [sum(row) for row in found["labels"]] == [14, 13, 13]


def test_names_are_text_in_the_terminal_too(effuse, toy_file):
    answer = effuse(f"partition {toy_file(data=RichNames())} --out p.html")
    assert "[red]dark[/red]" in answer.out and EVIL in answer.out
    html = Path("p.html").read_text()
    assert EVIL not in html and "[red]dark[/red]" in html
    folder = Path("[red]a")
    assert effuse(f"run {toy_file()} --out '{folder}' --quiet").code == 0
    assert "[red]a" in effuse(f"compare '{folder}'").out
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["recipe"]["algorithm"] = "\x1b[2J(x=1)"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shown = effuse(f"compare '{folder}'").out
    assert "\x1b" not in shown and r"\x1b[2J" in shown
