"""What sites told their server of their labels, in the page of a run whose images are elsewhere."""

import json
import re

import pytest
from toy import ALGORITHMS, toy_recipe

import effuse
from effuse.report.facts import Facts
from effuse.report.page import page
from effuse.report.public import shareable
from effuse.report.run import Run
from effuse.runs.records import Split

EXACT = "fedphd, pruned in the middle"
DISCLOSING = (EXACT, "fedphd, one-shot, with noise", "feddisco", "feddiff, two kinds of networks")


def served(run):
    """The run as a server has it, to which no client's images are known."""
    (run / "partition.json").unlink()
    return Facts.of(run)


def noted(run) -> dict:
    """The histograms in rounds.jsonl."""
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    found = [told for line in lines for told in line.get("noted", {}).get("histograms", {}).items()]
    assert len(found) == len(dict(found)), "nobody tells twice"
    return dict(found)


@pytest.mark.parametrize("name", DISCLOSING)
def test_what_clients_told_is_noted_once(name, tmp_path):
    """Every client tells a histogram of two classes, in one round: its own where it is exact, else one with noise."""
    run = effuse.run(toy_recipe(algorithm=ALGORITHMS[name]), out=tmp_path / "run").path
    true = {str(k): row for k, row in enumerate(json.loads((run / "partition.json").read_text())["labels"])}
    told = noted(run)
    assert told.keys() == true.keys() and {len(row) for row in told.values()} == {2}
    assert (told == true) == (name in (EXACT, "feddisco"))


def test_cells_of_sites_below_ten_are_in_no_page(run):
    """Of 9 and 31 images the 9 is hidden, and so is the sum; noise made 12.4 of a third cell, which is told as 12."""
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines[0]["noted"] = {"histograms": {"2": [12.4, 0.0], "0": [9.0, 31.0]}, "n_e": [777]}
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = served(run)
    assert facts.split == Split([[-1, 31], [12, -1]], sites=[0, 2])
    for html in (page(facts), page(shareable(facts))):
        rows = re.findall(r'<tr><th scope="row">(\d)</th><td>([^<]*)</td><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>', html)
        assert rows == [("0", "31 or more", "&lt;10", "31"), ("2", "12 or more", "12", "&lt;10")]
        assert "as fedavg asked for them and the clients told them. 1 client told nothing." in html
        assert "12.4" not in html and '"histograms"' not in html
    assert "777" in page(facts), "the operator's page keeps what else was noted"
    images = [row.get("images") for row in Run(run).clients.to_dict("records")]
    assert images == [None] * 3, "a sum would tell a hidden cell"


def test_a_run_here_shows_what_clients_hold(tmp_path):
    """Where the images are here, the partition is the true one, whatever was told with noise."""
    run = effuse.run(toy_recipe(algorithm=ALGORITHMS["fedphd, one-shot, with noise"]), out=tmp_path / "run").path
    facts = Facts.of(run)
    assert facts.split.to_json() == json.loads((run / "partition.json").read_text())
    assert served(run).split.sites == [0, 1, 2]
