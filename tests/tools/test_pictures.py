"""Pictures of features: places and clusters by hand, the same for a seed, for their owner only, and loading nothing."""

import json
import re
import xml.etree.ElementTree as Xml

import numpy as np
import pytest
import torch
from toy import ADAM, SMALL, TOY_GUIDE, TOY_NOISE, toy_recipe

from effuse.algorithms.fed3r import Fed3R
from effuse.algorithms.localonly import LocalOnly
from effuse.core.data import Dataset
from effuse.core.errors import RecipeError
from effuse.core.rng import Stream
from effuse.report.panels import COLOURS, MARKS, SHAPES, Panel, mark, scatter
from effuse.runs.driver import run
from effuse.tasks.classify import Classify
from effuse.tools.pictures import ROWS, WARNING, Seen, along_axes, fused, mapped, nearby, points, shown
from effuse.tools.probe import probe_run

DATA = Dataset(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 2, 2), torch.arange(2), ("a", "b"))


def test_principal_axes_by_hand():
    """Points (0, 0), (4, 0), (0, 2), (4, 2): the centre is (2, 1), the first axis (1, 0) with variance 4, then (0, 1)."""
    x = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0], [4.0, 2.0]])
    np.testing.assert_allclose(along_axes(x, 0), [[-2, -1], [2, -1], [-2, 1], [2, 1]], atol=1e-12)
    np.testing.assert_allclose(along_axes(x[:, :1], 0), [[-2, 0], [2, 0], [-2, 0], [2, 0]], atol=1e-12)


def test_t_sne_keeps_neighbours_together():
    """Two heaps of twenty, ten deviations apart: every image's nearest neighbour is of its own heap; a seed fixes them."""
    x = np.random.default_rng(0).normal(size=(40, 5))
    x[20:] += 10
    places = nearby(x, 0)
    far = np.linalg.norm(places[:, None] - places[None], axis=2) + np.diag([np.inf] * 40)
    assert all((i < 20) == (j < 20) for i, j in enumerate(far.argmin(1)))
    assert np.array_equal(places, nearby(x, 0))
    with pytest.raises(RecipeError, match="2 images have no neighbourhood; raise --share"):
        nearby(x[:2], 0)


def test_every_class_has_its_own_mark_and_neighbours_differ_in_both():
    """Seven colours and five shapes make 35 marks."""
    marks = [(re.search("#[0-9a-f]+", m)[0], m.split("m", 1)[1]) for m in (mark(i, 0, 0) for i in range(MARKS))]
    assert len(set(marks)) == MARKS == len(COLOURS) * len(SHAPES) == 35
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in zip(marks, marks[1:]))


def test_a_panel_fills_its_frame_and_the_key_names_what_is_shown():
    """The lowest place is in the lower left corner, 6 pixels inside; class b has no image and no entry."""
    panel = Panel("stage 1", np.array([[-1.0, 5.0], [1.0, 9.0]]))
    svg = scatter("t", [panel, panel], 1, [0, 2], ["a<b", "b", "c"], ["note"])
    root = Xml.fromstring(svg)
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words == ["t", "stage 1", "stage 1", "a<b", "c", "note"]
    frames = [node.attrib for node in root.iter("{http://www.w3.org/2000/svg}rect") if node.get("class") == "frame"]
    x, y, side = (float(frames[0][key]) for key in ("x", "y", "width"))
    assert f"M{x + 6:.1f} {y + side - 6:.1f}" in svg and f"M{x + side - 6:.1f} {y + 6:.1f}" in svg
    assert frames[1]["x"] == frames[0]["x"] and float(frames[1]["y"]) > y + side, "one in a line"


def test_classes_without_a_mark_are_said():
    names = [str(i) for i in range(40)]
    labels = torch.cat([torch.arange(40), torch.arange(5, 40)])  # the first five classes have one image, the others two
    svg = points("pca", "t", [Seen("features", torch.eye(75))], labels, names, 0)
    assert "35 of 40 classes are shown" in svg and "one of 70 held-out" in svg and ">3</text>" not in svg


def test_images_of_maps_are_one_of_each_class_in_turn():
    """Nine classes of three images: eight rows of eight classes. Two classes: four of each."""
    rows = shown(torch.arange(27) % 9, 9, Stream((0,)))
    assert sorted((rows % 9).tolist()) == list(range(ROWS))
    assert (shown(torch.arange(20) % 2, 2, Stream((0,))) % 2).tolist() == [0, 1] * 4


def test_stages_of_a_step_are_fused():
    """Maps of 1 x 1 and 2 x 2 with two and one channels: three channels of 2 x 2, each part with a mean square of one."""
    small, large = torch.full((2, 2, 1, 1), 3.0), torch.full((2, 1, 2, 2), 5.0)
    parts = fused([Seen("stage 0, t 1", small), Seen("stage 1, t 1", large), Seen("stage 0, t 2", small)])
    assert [one.title for one in parts] == ["stage 0, t 1", "stage 1, t 1", "fused, t 1", "stage 0, t 2"]
    assert parts[2].features.shape == (2, 3, 2, 2) and torch.equal(parts[2].features, torch.ones(2, 3, 2, 2))


@pytest.mark.parametrize("kind", ["kmeans", "pca"])
def test_equal_positions_have_equal_colours(kind):
    """Two images whose maps are mirrored: the left half of one looks as the right half of the other."""
    x = torch.tensor([[0.0, 9.0]]).repeat(2, 1)[None, None]
    svg = mapped(kind, "t", [Seen("stage 0, t 0", torch.cat([x, x.flip(-1)]))], DATA, 0)
    squares = re.findall(r'href="(data:image/png;base64,[^"]+)"', svg)
    assert len(squares) == 4 and len(set(squares)) == 4
    assert svg == mapped(kind, "t", [Seen("stage 0, t 0", torch.cat([x, x.flip(-1)]))], DATA, 0)
    same = mapped(kind, "t", [Seen("stage 0, t 0", torch.cat([x, x]))], DATA, 0)
    assert len(set(re.findall(r'href="(data:image/png;base64,[^"]+)"', same))) == 3


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures") / "guide"
    run(toy_recipe(model=TOY_GUIDE, task=TOY_NOISE, rounds=1), folder)
    return folder


def test_pictures_of_a_denoiser(denoiser):
    """Three files of two stages and two steps, which only their owner may read, which load nothing and name the danger."""
    kinds = ("tsne", "pca", "kmeans")
    found = probe_run(denoiser, steps=(0, 20), pictures=kinds)
    assert found["pictures"] == [str(denoiser / f"probe-{kind}.svg") for kind in kinds]
    assert json.loads((denoiser / "probe.json").read_text())["pictures"] == found["pictures"]
    first = {}
    for kind in kinds:
        file = denoiser / f"probe-{kind}.svg"
        first[kind] = svg = file.read_text()
        Xml.fromstring(svg)
        assert file.stat().st_mode & 0o777 == 0o600 and WARNING in svg
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|url\(", svg)
        assert ("fused" in svg) == (kind != "tsne") and svg.count("<image") == (0 if kind == "tsne" else 8 * 7)
    assert [probe_run(denoiser, steps=(0, 20), pictures=[kind])["rows"] for kind in kinds] == [found["rows"]] * 3
    assert first == {kind: (denoiser / f"probe-{kind}.svg").read_text() for kind in kinds}, "a seed fixes them"


def test_pictures_of_a_classifier(tmp_path):
    """Its features are one vector: points only."""
    run(toy_recipe(algorithm=Fed3R(), rounds=1), tmp_path / "run")
    probe_run(tmp_path / "run", pictures=["tsne", "pca"])
    assert "<image" not in (tmp_path / "run" / "probe-pca.svg").read_text()
    assert "dark" in (tmp_path / "run" / "probe-tsne.svg").read_text()
    with pytest.raises(RecipeError, match="--picture kmeans: cnn shows features and no maps; choose tsne or pca"):
        probe_run(tmp_path / "run", pictures=["kmeans"])


def test_a_clients_own_model(tmp_path):
    """Local models differ, so each client's picture does; the files name the client."""
    run(toy_recipe(algorithm=LocalOnly(local=ADAM), model=SMALL, task=Classify(), sampler=None), tmp_path / "run")
    for client in (0, 1):
        found = probe_run(tmp_path / "run", pictures=["pca"], client=client)
        assert (found["client"], found["pictures"]) == (client, [str(tmp_path / "run" / f"probe-client{client}-pca.svg")])
    a, b = ((tmp_path / "run" / f"probe-client{client}-pca.svg").read_text() for client in (0, 1))
    assert a.replace("client 0", "client 1") != b
