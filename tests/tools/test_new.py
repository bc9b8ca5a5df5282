"""A recipe file for one's own images works from the first try, and holds nothing that is executed."""

import numpy as np
import pytest
import torch
from PIL import Image

from effuse.core.errors import EffuseError, RecipeError
from effuse.recipes import find_recipe
from effuse.recipes.images import images
from effuse.tools.check import check
from effuse.tools.new import fitting, new_recipe


def scans(folder, side: int, mode: str = "L", n: int = 12):
    for label in ("benign", "malignant"):
        (folder / label).mkdir(parents=True)
        for i in range(n):
            pixels = np.full((side, side + 9) + (() if mode == "L" else (3,)), 20 * i, np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{i}.png")


def test_a_new_recipe_fits_its_images_and_can_be_checked(tmp_path, monkeypatch):
    """40 x 49 grey pixels become 32 x 32; 12 images a class, a fifth held out, are dealt to two sites."""
    monkeypatch.chdir(tmp_path)
    scans(tmp_path / "data" / "scans", 40)
    (tmp_path / "files").mkdir()
    path, found = new_recipe("files/mine", tmp_path.joinpath("data/scans").relative_to(tmp_path), 2, None)
    assert (found["side"], found["chosen"], found["channels"], found["images"], found["classes"]) == (40, 32, 1, 24, 2)
    name, recipe = find_recipe(str(path))
    assert name == "mine" and recipe.clients == 2 and str(recipe.data.path) == "files/../data/scans"
    report = check(recipe.changed(["rounds=1"]), name)
    assert sum(report["partition"]["sizes"]) == 20 and report["partition"]["classes"] == ["benign", "malignant"]
    monkeypatch.chdir(tmp_path / "files")
    assert find_recipe("mine.toml")[1].data.load("train").shape.side == 32, "the path is relative to the file"
    with pytest.raises(EffuseError, match=r"mine.toml exists; choose another name"):
        new_recipe("mine", tmp_path / "data/scans", 2, None)


def test_colours_and_sizes():
    assert [fitting(side) for side in (8, 28, 31, 63, 64, 500)] == [28, 28, 28, 32, 64, 128]
    widths = {side: len(images("x", side=side).model.widths) for side in (28, 32, 64, 96, 128)}
    assert widths == {28: 3, 32: 3, 64: 4, 96: 4, 128: 4}
    for side in widths:
        model = images("x", side=side, channels=3).model.resolved(torch_shape(side))
        assert model.side == side
    with pytest.raises(RecipeError, match="28 to 128 pixels"):
        images("x", side=256)


def torch_shape(side: int):
    from effuse.core.data import Dataset

    return Dataset(torch.zeros(1, 3, side, side, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), ("a",)).shape


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("rounds = 3", "needs a value for 'data'"),
        ("ronds = 3", "no key 'ronds'; did you mean rounds"),
        ("rounds = [3]", "rounds must be text in the grammar, a number, true or false"),
        ("rounds: 3", "is not a recipe file"),
        ("data = \"__import__('os').system('true')\"", "data: "),
        ("[algorithm]\nname = 1", "algorithm must be text"),
    ],
)
def test_what_a_recipe_file_may_not_be(tmp_path, source, words):
    (tmp_path / "a.toml").write_text(source)
    with pytest.raises(RecipeError, match="a.toml") as error:
        find_recipe(str(tmp_path / "a.toml"))
    assert words in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecipeError, match="there is no such recipe file; `effuse new"):
        find_recipe(str(tmp_path / "none.toml"))


def test_paths_in_a_manifest_are_looked_for_beside_it(tmp_path, monkeypatch):
    """A manifest that was copied with its data works from any folder."""
    import json

    scans(tmp_path / "there" / "scans", 28)
    saved = images("scans", side=28).saved()
    (tmp_path / "there" / "manifest.json").write_text(json.dumps({"name": "x", "recipe": saved}))
    monkeypatch.chdir(tmp_path)
    assert find_recipe("there/manifest.json")[1].data.path == "there/scans"
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "x", "recipe": saved}))
    assert find_recipe("./manifest.json")[1].data.path == "scans"
