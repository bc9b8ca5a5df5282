"""A run folder in Python."""

import sys
import types
from xml.etree import ElementTree

import pytest

import effuse
from effuse.core.errors import RunError


@pytest.fixture
def without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)


def test_rounds_and_clients_are_flat_records(run, without_pandas):
    """40 images for three clients are 14, 13 and 13; each was asked in three rounds, and sent 388 bytes each way."""
    opened = effuse.Run(run)
    assert [row["t"] for row in opened.rounds] == [0, 1, 2]
    assert [row["bytes_so_far"] for row in opened.rounds] == [2328, 4656, 6984]
    assert [row["kid_pixels"] for row in opened.rounds][-1] == opened.metrics["kid_pixels"]
    for row, images in zip(opened.clients, (14, 13, 13), strict=True):
        assert (row["images"], row["asked"], row["silent"]) == (images, 3, 0)
        assert (row["bytes_up"], row["bytes_down"]) == (3 * 388, 3 * 388) and row["loss"] > 0 and row["seconds"] > 0


def test_records_are_frames_where_pandas_is_there(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=lambda rows: ("frame", len(rows))))
    assert effuse.Run(run).rounds == ("frame", 3) == effuse.Run(run).clients


def test_a_curve_is_an_svg_of_its_own(run, tmp_path):
    """Three points, and over bytes at other places."""
    opened = effuse.Run(str(run))
    opened.plot("kid_pixels").save(tmp_path / "kid.svg")
    root = ElementTree.fromstring((tmp_path / "kid.svg").read_text())
    dots = [e for e in root.iter("{http://www.w3.org/2000/svg}circle") if e.get("class") != "mark"]
    assert root.tag.endswith("svg") and len(dots) == 3
    assert opened.plot(over="bytes")._repr_svg_() != opened.plot()._repr_svg_()
    with pytest.raises(RunError, match="there is no curve of kid_pixel; did you mean kid_pixels"):
        opened.plot("kid_pixel")
    with pytest.raises(RunError, match="over='time': there is no such axis; valid: bytes, round"):
        opened.plot(over="time")


def test_a_notebook_shows_the_run(run):
    shown = effuse.Run(run)._repr_html_()
    assert "Finished: fedavg with 3 clients" in shown and 'src="data:image/png;base64,' in shown and "<script" not in shown


def test_its_page_is_written(run, tmp_path):
    assert effuse.Run(run).report() == run / "report.html"
    assert effuse.Run(run).report(public=True, out=tmp_path / "p.html").read_text().count("may be passed on") == 1


def test_an_unfinished_run_opens_but_has_no_result(run):
    (run / "result.json").unlink()
    opened = effuse.Run(run)
    assert len(opened.rounds) == 3
    with pytest.raises(RunError, match="is not finished and has no result yet; finish it with `effuse resume"):
        _ = opened.metrics
