"""Pages in headless Chromium, on a phone and a desk: nothing fails or is fetched, and everything works."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from toy import ToyImages, toy_recipe

from effuse.core.data import Dataset
from effuse.core.spec import spec
from effuse.report.compare import comparison, table_page
from effuse.report.facts import Facts
from effuse.report.partition import Division
from effuse.report.writer import write_report
from effuse.tools.release import release
from effuse.tools.ui import Pages

EVIL = "<script>document.title='taken'</script>"


@spec
class OddNames(ToyImages):
    """The toy's images, whose classes try to be markup."""

    def load(self, split):
        data = super().load(split)
        return Dataset(data.images, data.labels, (EVIL, "[red]light[/red]<img src=x onerror=document.title='taken'>"))


@pytest.fixture(scope="module")
def pages(trained, tmp_path_factory):
    """One of each kind, of runs whose names are odd."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [Path(shutil.copytree(trained, folder / name)) for name in ("a", EVIL.replace("/", ""))]
    for run in runs:
        manifest = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps(manifest | {"name": EVIL, "classes": [EVIL, "\x1b[2J"]}))
    found = {"own": write_report(runs[0]), "public": write_report(runs[0], public=True)}
    row = {
        "name": "b",
        "labels": {"method": EVIL},
        "state": "done",
        "metric": "kid",
        "printed": 1.5,
        "ours": 0.5,
        "also": {},
    }
    row |= {"beside": {}, "bytes_sent": 2000, "round_seconds": 1.0, "run": str(runs[1])}
    report = {"table": EVIL, "title": EVIL, "scale": "smoke", "comparable": False, "cells": [row], "means": []}
    division = Division.of(toy_recipe(data=OddNames()), EVIL)
    made = {
        "compare": comparison([Facts.of(run) for run in runs])[0],
        "table": table_page(report),
        "partition": division.page(),
    }
    for name, html in made.items():
        (folder / f"{name}.html").write_text(html)
        found[name] = folder / f"{name}.html"
    found["release"] = release(runs[0], folder / "released", n=4, name=EVIL, metrics=[]).folder / "report.html"
    with Pages(folder, "127.0.0.1", 0) as live:
        threading.Thread(target=live.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield found | {"live": f"http://127.0.0.1:{live.server_address[1]}/"}
        live.shutdown()


@pytest.fixture
def opened(browser, pages):
    """Opens a page at a width; at the end, it must have had no error and no request but for itself."""
    faults, contexts = [], []

    def open_at(name: str, width: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page, place = context.new_page(), pages[name]
        address = place if isinstance(place, str) else place.as_uri()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        outside = (address, "data:", "blob:")
        page.on("request", lambda request: request.url.startswith(outside) or faults.append(request.url))
        page.goto(address)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert faults == []


KINDS = ("own", "public", "compare", "table", "partition", "release", "live")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("width", "scheme"), [(375, "dark"), (1280, "light")])
def test_a_page_fits_its_screen_and_names_are_text(opened, name, width, scheme):
    page = opened(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.title() != "taken" and page.locator("img[src=x]").count() == 0
    assert page.get_by_text("<script>document.title='taken'").count() >= 1


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("width", "scheme"), [(375, "dark"), (1280, "light")])
def test_axe_finds_no_serious_fault(opened, axe, name, width, scheme):
    page = opened(name, width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.evaluate(axe)
    # the live page is there to be renewed, and nobody types into it
    found = page.evaluate("axe.run(document, {rules: {'meta-refresh': {enabled: false}}})")
    assert len(found["passes"]) > 10
    serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert [(v["id"], [node["html"] for node in v["nodes"]][:3]) for v in serious] == []


def test_the_slider_shows_the_samples_of_a_round(opened):
    page = opened("own")
    slider, shown = page.locator("#round"), page.locator("#pictures figure:visible")
    assert shown.count() == 1 and shown.get_attribute("data-name") == "round 3"
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert shown.get_attribute("data-name") == "round 2" == page.locator("#round-told").inner_text()
    page.keyboard.press("Home")
    assert shown.get_attribute("data-name") == "round 1" and shown.count() == 1
    assert slider.get_attribute("aria-valuetext") == "round 1"


def test_a_curve_tells_its_values(opened, pages):
    """At the right end of the loss's curve, the tooltip has the last round's loss."""
    page = opened("own")
    tip, curve = page.locator("#tip"), page.locator(".by-round svg.chart").first
    assert tip.is_hidden()
    box = curve.bounding_box()
    curve.hover(position={"x": box["width"] - 5, "y": box["height"] / 2})
    loss = Facts.of(pages["own"].parent).records[-1].loss
    assert tip.inner_text() == f"round 3\n{loss:.4g}" and curve.locator(".mark").is_visible()
    page.mouse.move(0, 0)
    assert tip.is_hidden()


def test_curves_are_over_rounds_or_traffic(opened):
    page = opened("own")
    by_round, by_traffic = page.locator(".by-round"), page.locator(".by-traffic")
    assert by_round.is_visible() and by_traffic.is_hidden()
    page.get_by_label("traffic", exact=True).check()
    assert by_round.is_hidden() and by_traffic.is_visible()


def test_a_heading_sorts_its_table(opened):
    """By numbers, not by their words; up at first, then down."""
    page = opened("own")
    table = page.get_by_role("region", name="clients", exact=True)
    first, head = table.locator("tbody tr").first.locator("td").first, table.get_by_role("button", name="client")
    head.click()
    assert first.inner_text() == "0" and table.locator("th").first.get_attribute("aria-sort") == "ascending"
    head.click()
    assert first.inner_text() == "2" and table.locator("th").first.get_attribute("aria-sort") == "descending"


def test_the_values_can_be_saved(opened, tmp_path):
    page = opened("own")
    page.get_by_text("the values behind this page").click()
    page.locator("details[data-raw] pre", has_text='"manifest"').wait_for()
    with page.expect_download() as download:
        page.get_by_text("save it as a file").click()
    download.value.save_as(tmp_path / "run.json")
    assert len(json.loads((tmp_path / "run.json").read_text())["rounds"]) == 3


def test_a_page_reads_without_its_script(browser, pages):
    """Somebody may open it where scripts are off: the last samples, curves and tables are there."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["own"].as_uri())
    assert page.locator("#pictures figure").last.is_visible() and page.locator(".by-round svg").first.is_visible()
    context.close()


def test_the_live_page_leads_to_a_report_that_works(opened):
    """Both runs are finished, after three rounds of three; a report's slider works as it does from disk."""
    page = opened("live")
    assert page.get_by_text("3/3").count() == 2
    page.get_by_role("link", name="report").first.click()
    page.locator("#round").wait_for()
    page.locator("#round").focus()
    page.keyboard.press("Home")
    assert page.locator("#pictures figure:visible").get_attribute("data-name") == "round 1"
