"""Several runs on one page, and the page of a reproduced table."""

import json
import re
import shutil

import pytest

from effuse.core.errors import RunError
from effuse.report.compare import comparison, sorted_rows, table_page
from effuse.report.facts import Facts

ROWS = [{"run": "a", "loss": 0.5, "fid": 20.0}, {"run": "b", "loss": 0.25, "fid": 10.0}, {"run": "c", "loss": 0.1}]


def test_rows_are_sorted_best_first():
    """Less is better of a distance, more of an accuracy; runs without the number come last."""
    rows, by = sorted_rows(ROWS[:2], None)
    assert by == "fid" and [row["run"] for row in rows] == ["b", "a"]
    assert [row["run"] for row in sorted_rows(ROWS, "fid")[0]] == ["b", "a", "c"]
    assert [row["run"] for row in sorted_rows(ROWS, "loss")[0]] == ["c", "b", "a"]
    better = [{"run": "a", "accuracy": 0.5, "fid": 1.0}, {"run": "b", "accuracy": 0.75}]
    assert sorted_rows(better, None) == ([better[1], better[0]], "accuracy")
    with pytest.raises(RunError, match="--by fidd: no run has it; did you mean fid"):
        sorted_rows(ROWS, "fidd")


def test_the_page_has_every_run(run, tmp_path):
    """The second run has half the rounds' traffic, so its point lies elsewhere."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    lines = (other / "rounds.jsonl").read_text().splitlines(keepends=True)
    (other / "rounds.jsonl").write_text(lines[0])
    html, rows = comparison([Facts.of(run), Facts.of(other)])
    assert {row["run"]: row["bytes"] for row in rows} == {"run": 6984, "other": 2328}
    assert html.count('src="data:image/png;base64,') == 2 and "kid_pixels against traffic" in html
    assert re.search(r"2.3 kB sent\\nother ", html) and re.search(r"7.0 kB sent\\nrun ", html)


def test_runs_of_one_name_are_told_apart(run, tmp_path):
    again = shutil.copytree(run, tmp_path / "b" / "run")
    rows = comparison([Facts.of(run), Facts.of(again)])[1]
    assert {row["run"] for row in rows} == {str(run), str(again)}


def report(**changes):
    row = {"name": "fedavg-1", "labels": {"method": "fedavg"}, "state": "done", "metric": "fid", "printed": 12.5}
    row |= {"ours": 13.25, "also": {"kid": 0.125}, "beside": {"kid": 0.25}, "bytes_sent": 1000, "round_seconds": 2.0}
    missing = {**row, "name": "full-1", "labels": {"method": "full"}, "state": "missing", "ours": None, "bytes_sent": None}
    cells = [{**row, "run": "nowhere"}, {**missing, "run": "nowhere"}]
    mean = {"labels": {"method": "fedavg"}, "printed": 12.5, "mean": 13.25, "std": None, "done": 1, "of": 3}
    return {
        "table": "t",
        "title": "Table 1",
        "scale": "smoke",
        "comparable": False,
        "cells": cells,
        "means": [mean],
    } | changes


def test_a_tables_page_has_the_papers_numbers():
    words = re.sub(r"<[^>]+>", " ", table_page(report()))
    assert "1 of 2 cells are done. At scale smoke, ours cannot be compared with the printed numbers." in words
    for number in ("12.5", "13.25", "0.125", "kid, printed", "0.25", "1.0 kB", "1 of 3"):
        assert number in words
    assert "may be compared" in table_page(report(comparable=True))


def test_names_in_a_table_are_text():
    evil = "<script>alert(1)</script>"
    html = table_page(report(title=evil, table=evil))
    assert evil not in html and html.count("&lt;script&gt;alert") == 2


def test_the_raw_manifest_is_not_needed(run):
    """A recipe of another version, which this one cannot read, is compared all the same."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["recipe"]["algorithm"] = "fedfuture(x=1)"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert comparison([Facts.of(run)])[1][0]["algorithm"] == "fedfuture"
