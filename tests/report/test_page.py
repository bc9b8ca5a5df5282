"""The page of a run: what it says, what the public one leaves out, and names that try to be more than text."""

import dataclasses
import json
import re
import stat

import pytest

from effuse.core.errors import RunError
from effuse.core.grammar import hidden
from effuse.core.metric import Measurement
from effuse.core.spec import text
from effuse.data.partition import Shards
from effuse.report.facts import Facts, Grid, within_budget
from effuse.report.page import page, verdict
from effuse.report.public import measurement, shareable
from effuse.report.writer import write_report
from effuse.runs.folder import RunFolder
from effuse.runs.records import Split
from effuse.runs.trackers import numbers

PNG = b"\x89PNG nearest pairs"


def words_of(html: str) -> str:
    """The visible words of a page, without the values behind it."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", " ", html, flags=re.S))


def raw_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="raw">(.*?)</script>', html, re.S)[1])


def test_the_verdict_says_how_it_ended_and_what_came_of_it(run):
    facts = Facts.of(run)
    first, *_, last = facts.measured["kid_pixels"]
    assert verdict(facts) == (
        f"Finished: fedavg with 3 clients, 3 rounds, {facts.sent[-1][1] / 1000:.1f} kB sent. "
        f"kid_pixels is {last[2]:.4g} after round 3 (it was {first[2]:.4g} after round 1)."
    )
    silent = [dataclasses.replace(record, silent=[0, 2]) for record in facts.records]
    assert "6 answers of clients did not come" in verdict(dataclasses.replace(facts, records=silent))
    (run / "result.json").unlink()
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (run / "rounds.jsonl").write_text(lines[0])
    assert verdict(Facts.of(run)).startswith("Unfinished: fedavg with 3 clients, after round 1 of 3, ")
    (run / "diverged.txt").write_text("round 1: not finite\n")
    assert verdict(Facts.of(run)).startswith("Diverged: fedavg with 3 clients, in round 2 of 3, ")


def test_a_page_has_every_part(run):
    html = page(Facts.of(run))
    headings = re.findall(r"<h2 id=[^>]*>(.*?)</h2>", html)
    assert headings == [
        *("Samples", "Curves", "Partition", "Traffic", "Clients"),
        *("Privacy", "Cost", "Protocol", "How it was made", "Raw values"),
    ]
    assert html.count('src="data:image/png;base64,') == 3 and 'type="range"' in html
    assert len(re.findall(r"https?://(?!www\.w3\.org)", html)) == 0


def test_the_raw_values_are_the_files(run):
    raw = raw_of(page(Facts.of(run)))
    assert raw["manifest"] == json.loads((run / "manifest.json").read_text())
    assert raw["rounds"] == [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert raw["result"] == json.loads((run / "result.json").read_text())
    assert raw["partition"] == {"labels": [own.histogram for own in shards_of(run)]}


def shards_of(run):
    from effuse.core.recipe import Recipe, read_manifest

    recipe = Recipe.restore(read_manifest(run)["recipe"])
    return recipe.shards(recipe.data.load("train"))


def test_the_public_page_leaves_single_clients_out(run):
    """A cell of nine is not told, one of ten is, and no sum tells the nine: 9 + 31 images are `31 or more`."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["recipe"] |= {"data": "folder('wards/anna', side=4)", "task": "denoise(path='/home/anna/net')"}
    manifest["trained"] = "/home/anna/runs/first"
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "partition.json").write_text(json.dumps({"labels": [[9, 31], [10, 20], [0, 12]], "groups": [4, 5, 6]}))
    result = json.loads((run / "result.json").read_text())
    result["metrics"]["kid_pixels"] |= {"clients": [0.1230987, 0.25, 0.6230987]}
    result["metrics"]["kid_pixels"]["protocol"] |= {"data": "folder('wards/anna')", "weights": "/home/anna/inception.pt"}
    (run / "result.json").write_text(json.dumps(result))
    own, public = page(Facts.of(run)), page(shareable(Facts.of(run)))
    entries = [entry for record in raw_of(own)["rounds"] for entry in record["clients"].values()]
    secrets = [repr(entry[key]) for entry in entries for key in ("seconds", "loss")]
    secrets += ["anna", "0.1230987", "0.6230987", '>9</td><td class="s5">31<', "loss of clients", ">40<", "groups"]
    assert len(secrets) > 20
    for secret in secrets:
        assert secret in own and secret not in public, secret
    assert "31 or more" in words_of(public) and "&lt;10" in public and ">10<" in public and ">30<" in public
    assert raw_of(public)["partition"] == {"labels": [[-1, 31], [10, 20], [-1, 12]]}
    assert raw_of(public)["manifest"]["recipe"]["data"] == "folder('...', side=4)"
    assert raw_of(public)["result"]["images"] == 0, "the number of images would tell the sum"
    assert "Clients" not in re.findall(r"<h2 id=[^>]*>(.*?)</h2>", public)
    assert all(record.keys() & {"clients", "updates", "silent", "noted"} == set() for record in raw_of(public)["rounds"])


def test_a_round_of_one_client_keeps_its_loss_to_itself(run):
    """The mean of one loss is that loss."""
    folder = RunFolder(run)
    records = folder.records()
    alone = dataclasses.replace(records[0].traffic, clients={"2": {"up": 1, "down": 1}})
    facts = dataclasses.replace(Facts.of(run), records=[dataclasses.replace(records[0], traffic=alone), *records[1:]])
    assert [record.loss is None for record in shareable(facts).records] == [True, False, False]
    silent = [
        dataclasses.replace(records[0], silent=[0, 2]),  # two of three did not answer
        dataclasses.replace(records[1], clients={"1": records[1].clients["1"]}),  # one of three told its loss
        dataclasses.replace(records[2], silent=[0]),
    ]
    facts = dataclasses.replace(facts, records=silent)
    assert [record.loss is None for record in shareable(facts).records] == [True, True, False]
    assert ["loss" in numbers(record) for record in silent] == [False, False, True], "trackers have the same rule"


@pytest.mark.parametrize(
    ("protocol", "told"),
    [
        ({"probe": "linear", "trained_on": 83, "split": "test", "images": 40}, {"probe", "split", "images"}),
        ({"solver": "adam()", "trained_on": 500, "reference": 40}, {"solver", "trained_on", "reference"}),
        ({"split": "train", "reference": 83, "generated": 10}, {"split", "generated"}),
        ({"split": "test", "reference": 83}, {"split", "reference"}),
        ({"subgroup": "a", "test images": 9, "reference": 9, "images": 9, "split": "test"}, {"subgroup", "split"}),
        ({"subgroup": "a", "test images": 10, "reference": 10}, {"subgroup", "test images", "reference"}),
    ],
)
def test_protocols_tell_no_sum_of_training_images_and_no_small_count(protocol, told):
    """Beside a partition with one hidden cell, the sum of all cells would tell it."""
    assert measurement(Measurement(0.5, protocol)).protocol.keys() == told


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("data", "folder('a', classes=[\"b\", 'c\\'d'])", "folder('...', classes=['...', '...'])"),
        ("model", "from_pretrained('/nets/a', target='epsilon')", "from_pretrained('...', target='epsilon')"),
        ("model", 'from_pretrained("C:\\\\nets")', "from_pretrained('...')"),
        ("model", "pretrained(folder='clinic_berlin', kind='a')", "pretrained(folder='...', kind='a')"),
        (
            "task",
            "t(path=\"patients.pt\", groups='anna', attributes = 'b.csv', groups=3)",
            "t(path='...', groups='...', attributes = '...', groups=3)",
        ),
        ("weights", "/home/anna/my inception.pt", "..."),
        ("preprocessing", "uint8, [-1, 1]", "uint8, [-1, 1]"),
    ],
)
def test_names_of_files_are_hidden(key, value, told):
    assert hidden(value, key == "data") == told


def test_real_images_need_a_request(run):
    """The pairs are in no page but the one that was asked for, which its owner alone can read."""
    for public in (False, True):
        with pytest.raises(
            RunError, match="no pictures of nearest pairs; make them with `effuse audit" if not public else "give one of"
        ):
            write_report(run, nearest=True, public=public)
    (run / "audit" / "private").mkdir(parents=True)
    (run / "audit" / "private" / "nearest.png").write_bytes(PNG)
    audit = {"memorisation": None, "membership": {"attacks": {"loss": {"auc": {"value": 0.8125, "low": 0.5, "high": 0.9}}}}}
    (run / "audit" / "audit.json").write_text(json.dumps(audit))
    pages = {name: write_report(run, **{name: True} if name else {}) for name in ("", "public", "nearest")}
    assert [path.relative_to(run).as_posix() for path in pages.values()] == [
        "report.html",
        "public.html",
        "audit/private/report.html",
    ]
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in pages.items()}
    assert modes[""] == modes["nearest"] == 0o600 and modes["public"] & 0o044
    text = {name: path.read_text() for name, path in pages.items()}
    assert [name for name, found in text.items() if "iVBORw" not in found] == []
    from base64 import b64encode

    assert [name for name, found in text.items() if b64encode(PNG).decode() in found] == ["nearest"]
    assert [name for name, found in text.items() if "0.812" in found] == ["", "nearest"], (
        "numbers of an audit are private too"
    )


EVIL = "<script>document.title='taken'</script>"
TERMINAL = "\x1b[2J\x07"
RICH = "[red]bold[/red]"


def test_names_are_text(run):
    """Of the recipe, classes, devices and files; in the values behind the page nothing ends its element."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest |= {"name": EVIL + TERMINAL, "classes": [EVIL, RICH], "device": EVIL, "versions": {EVIL: TERMINAL}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    grid = run / "samples" / "round-00003.png"
    grid.rename(grid.with_name("round-00003<script>.png"))
    for facts in (Facts.of(run), shareable(Facts.of(run))):
        html = page(facts)
        assert EVIL not in html and "&lt;script&gt;document.title" in html and RICH in words_of(html)
        assert "\x1b" not in html and "\x07" not in html and r"\x1b[2J\x07" in html
        assert html.count("<script") == html.count("</script>") == 2, "ours, and the values"
        assert raw_of(html)["manifest"]["name"] == facts.name
        assert html.count('src="data:image/png;base64,') == 2, "a picture with another name is not ours"


def test_the_public_page_shows_no_clients_own_model(run):
    """Their samples tell what a single client holds."""
    for name in ("round-00003-client-0.png", "round-00003-ema-client-1.png"):
        (run / "samples" / name).write_bytes(PNG)
    own, public = page(Facts.of(run)), page(shareable(Facts.of(run)))
    assert "client 0&#x27;s model" in own and own.count('src="data:image/png;base64,') == 5
    assert "s model" not in public and public.count('src="data:image/png;base64,') == 3


def test_a_link_is_no_picture(run, tmp_path):
    """A link in samples/ could lead to a file that nobody wants to pass on."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run / "samples" / "round-00004.png").symlink_to(tmp_path / "secret.png")
    assert "round 4" not in page(Facts.of(run))


def test_pictures_are_limited_by_their_size(tmp_path):
    """Of ten rounds of 10 bytes, 45 bytes hold four: the first, the last and two between, evenly."""
    grids = []
    for t in range(1, 11):
        (tmp_path / f"{t}.png").write_bytes(b"x" * 10)
        grids.append(Grid(t, "model", tmp_path / f"{t}.png"))
    assert [*within_budget(grids, 45)] == [1, 4, 7, 10]
    assert [*within_budget(grids, 10)] == [10] and within_budget(grids, 9) == {} and len(within_budget(grids, 1000)) == 10


def test_a_run_of_an_older_version_has_a_page(run):
    """Without a partition, clients' records and classes."""
    (run / "partition.json").unlink()
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["classes"], manifest["versions"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        del line["clients"]
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "What each client holds is not known here." in words_of(page(Facts.of(run)))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="it has no manifest.json"):
        write_report(tmp_path)
    with pytest.raises(RunError, match="is not a run folder; give one that `effuse run` wrote"):
        write_report(tmp_path / "nothing")


def test_a_split_counts_groups():
    assert Split.from_json({"labels": [[1, 2]], "groups": [2]}, "here") == Split([[1, 2]], [2])


def test_a_rule_is_told_without_its_defaults(run):
    """`shards(per_client=3, ...)` has other keys, at their defaults; one that this version does not know stays as it is."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["recipe"]["partition"] = text(Shards(per_client=3))
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "divided by shards(per_client=3)." in words_of(page(Facts.of(run)))
    manifest["recipe"]["partition"] = "by_moon(phase=1)"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "divided by by_moon(phase=1)." in words_of(page(Facts.of(run)))


def test_costs_by_distance_are_told_where_there_are_edges(run):
    """FedPhD's weighted traffic means nothing between clients and one server."""
    result = json.loads((run / "result.json").read_text())
    assert "paper_cost" in result["figures"] and "weighted by distance" not in page(Facts.of(run))
    result["traffic"]["links"]["edge-cloud"] = result["traffic"]["links"]["client-server"]
    (run / "result.json").write_text(json.dumps(result))
    assert words_of(page(Facts.of(run))).count("traffic weighted by distance, ") == 2


def test_numbers_of_a_protocol_are_rounded(run):
    """And the spread is a column only where a number has one."""
    result = json.loads((run / "result.json").read_text())
    result["metrics"]["kid_pixels"]["protocol"]["classifier_accuracy"] = 0.9943661971830986
    (run / "result.json").write_text(json.dumps(result))
    html = page(Facts.of(run))
    assert "classifier_accuracy 0.9944<" in html and ">spread<" not in html
    result["metrics"]["kid_pixels"] |= {"std": 0.25}
    (run / "result.json").write_text(json.dumps(result))
    assert ">spread<" in page(Facts.of(run))
