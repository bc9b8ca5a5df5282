"""Pages that are written while a run goes on."""

import contextlib
import json
import re
import stat

import pytest
from toy import toy_recipe

import effuse
from effuse.core.errors import RunError
from effuse.core.recipe import Evaluate
from effuse.diffusion.samplers import Ancestral
from effuse.report import writer
from effuse.report.compare import comparison
from effuse.report.facts import read_facts
from effuse.runs import driver
from effuse.runs.observer import Observer

EVERY = {"evaluate": Evaluate(grid=4, every=1), "sampler": Ancestral(batch=4)}


class Heard(Observer):
    """Keeps what was said."""

    def __init__(self):
        self.words, self.closings = [], 0

    def said(self, words):
        self.words.append(words)

    def closed(self, record):
        self.closings += 1


def written(monkeypatch) -> list:
    """The verdicts of all pages that are written from now on."""
    found, page = [], writer.page

    def seen(facts):
        html = page(facts)
        found.append(re.search(r'<p class="verdict">(.*?)[:,]', html)[1])
        return html

    monkeypatch.setattr(writer, "page", seen)
    return found


def test_a_page_follows_every_evaluation_and_the_end(tmp_path, monkeypatch):
    """With a share of everything, none is skipped; its owner alone can read it."""
    pages, heard = written(monkeypatch), Heard()
    monkeypatch.setattr(writer, "SHARE", 1e9)
    driver.run(toy_recipe(rounds=3, **EVERY), tmp_path / "run", observer=writer.Reporting(heard))
    assert pages == ["Unfinished", "Unfinished", "Unfinished", "Finished"] and heard.closings == 3
    assert stat.S_IMODE((tmp_path / "run" / "report.html").stat().st_mode) == 0o600


def test_short_rounds_skip_pages_but_not_the_last(tmp_path, monkeypatch):
    """The first page is free; after it, a share of nothing allows no other before the end."""
    pages = written(monkeypatch)
    monkeypatch.setattr(writer, "SHARE", 0.0)
    driver.run(toy_recipe(rounds=3, **EVERY), tmp_path / "run", observer=writer.Reporting(Observer()))
    assert pages == ["Unfinished", "Finished"]


def test_a_page_that_cannot_be_written_stops_no_run(tmp_path, monkeypatch):
    heard = Heard()
    monkeypatch.setattr(writer, "page", lambda facts: 1 / 0)
    result = driver.run(toy_recipe(), tmp_path / "run", observer=writer.Reporting(heard))
    assert result.rounds == 2 and heard.words[-1] == "warning: the report was not written: division by zero"
    assert not (tmp_path / "run" / "report.html").exists()


def test_pages_change_no_number(tmp_path):
    plain = driver.run(toy_recipe(**EVERY), tmp_path / "plain")
    told = effuse.run(toy_recipe(**EVERY), out=tmp_path / "told")
    assert plain.weights_sha256 == told.weights_sha256 and (told.path / "report.html").is_file()
    assert not (tmp_path / "plain" / "report.html").exists()


def test_an_observer_is_entered_and_left(tmp_path):
    """Through the one that writes pages, also when a run fails."""
    seen = []

    class Watched(Observer):
        def __enter__(self):
            seen.append("in")
            return self

        def __exit__(self, *exception):
            seen.append(exception[0])

    with pytest.raises(ZeroDivisionError), writer.Reporting(Watched()):
        raise ZeroDivisionError
    assert seen == ["in", ZeroDivisionError]


def test_every_event_is_passed_on():
    """Those of `Observer` that pages do not need reach the inner one themselves."""
    inner = Heard()
    outer = writer.Reporting(inner)
    events = [name for name in vars(Observer) if not name.startswith("_")]
    assert {"phase", "replied", "said"} <= set(events)
    for name in set(events) - {"started", "closed", "finished"}:
        assert getattr(outer, name) == getattr(inner, name)


DAMAGE = [
    ("evaluation.json", lambda found: found.update(metrics=[1])),
    ("ledger.json", lambda found: found.update(privacy=[1])),
    ("result.json", lambda found: found.update(privacy={"unit": "image"})),
    ("partition.json", lambda found: found.update(labels=[[1, 2]] * 3, groups=[4])),
    ("partition.json", lambda found: found.update(labels=[[1, 2]] * 9)),
    ("rounds.jsonl", lambda found: found["traffic"]["clients"].update(x={"up": 1, "down": 1})),
    ("rounds.jsonl", lambda found: found.update(silent=[999])),
    ("rounds.jsonl", lambda found: found["traffic"].update(links={"cloud": {"up": {}}})),
    ("audit/audit.json", lambda found: found.update(memorisation=None)),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGE)
def test_a_damaged_run_is_named(run, file, damage):
    """In its own page; a public page leaves some of it out, and a comparison uses less of it."""
    path = run / file
    first, *others = (
        path.read_text().splitlines() if file == "rounds.jsonl" else [path.read_text() if path.exists() else "{}"]
    )
    damage(found := json.loads(first))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([json.dumps(found), *others]) + "\n")
    words = re.escape(f"{run}: a file of this run is damaged or not effuse's (")
    with pytest.raises(RunError, match=words):
        writer.write_report(run)
    for other in (lambda: writer.write_report(run, public=True), lambda: comparison([read_facts(run)])):
        with contextlib.suppress(RunError):
            other()
    if file in ("evaluation.json", "result.json"):
        with pytest.raises(RunError, match=words):
            comparison([read_facts(run)])
