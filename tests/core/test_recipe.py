"""Recipes: saved, restored, changed by key, and completed from the data."""

import json
from pathlib import Path

import pytest
import torch

from effuse.core.data import Dataset, Shape
from effuse.core.errors import PartitionError, RecipeError, RunError
from effuse.core.privacy import Budget
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.solvers import SGD
from effuse.core.spec import field_hints
from effuse.data.dirichlet import LabelSkew
from effuse.data.partition import Iid
from effuse.metrics.accuracy import ConditionalAccuracy
from effuse.recipes import find_recipe
from effuse.recipes.demo import demo


def grey(n: int = 12, classes: int = 3) -> Dataset:
    return Dataset(torch.zeros(n, 1, 8, 8, dtype=torch.uint8), torch.arange(n) % classes, tuple("abc"[:classes]))


@pytest.mark.parametrize("settings", [[], ["sampler=None", "ema=0.9", "wire=bf16", "evaluate.metrics=[]"]], ids=str)
def test_a_saved_recipe_is_restored_as_it_was(settings):
    recipe = demo().changed(settings)
    saved = json.loads(json.dumps(recipe.saved()))
    assert saved.keys() == field_hints(Recipe).keys() and all(isinstance(v, str) for v in saved.values())
    assert Recipe.restore(saved) == recipe


def test_a_saved_recipe_names_every_key():
    """A later change of a default must not change the meaning of an old manifest."""
    saved = demo().saved()
    assert saved["speed"] == "'auto'" and saved["sampler"].startswith("dpm_solver(") and "batch=500" in saved["sampler"]
    assert "weight_decay=0.0" in saved["algorithm"] and "warmup=0" in saved["algorithm"]


def test_a_resolved_recipe_is_restored_as_it_was():
    resolved = demo().resolved(grey())
    assert resolved.model.shape == Shape(8, 1, 3) and demo().model.side is None
    assert Recipe.restore(resolved.saved()) == resolved


def test_settings_apply_in_order():
    settings = ["rounds=2", "rounds=3", "algorithm.local.lr=0.5", "partition=iid", "speed=eager", " clients = 7"]
    recipe = demo().changed([*settings, "evaluate.metrics=[conditional_accuracy(n=9)]"])
    assert (recipe.rounds, recipe.clients, recipe.speed, recipe.partition) == (3, 7, "eager", Iid())
    assert recipe.algorithm.local.lr == 0.5 and recipe.algorithm.local.batch == 64, "other keys do not change"
    assert recipe.evaluate.metrics == (ConditionalAccuracy(n=9),) and recipe.evaluate.every == 20
    assert demo().rounds == 40 and demo().changed([]) == demo()


def test_a_value_may_hold_an_equals_sign():
    assert demo().changed(["partition=label_skew(beta=0.1)"]).partition == LabelSkew(beta=0.1)
    assert demo().changed(["algorithm.local=sgd(lr=1.0, steps=2)"]).algorithm.local == SGD(lr=1.0, steps=2)


def test_adjacent_settings_of_one_spec_are_applied_together():
    """A solver has epochs or steps. Each of the two settings alone would give it both or neither."""
    settings = ["algorithm.local.epochs=None", "algorithm.local.steps=3", "algorithm.local.steps=4"]
    local = demo().changed(settings).algorithm.local
    assert (local.epochs, local.steps) == (None, 4), "the last setting of a key counts"


@pytest.mark.parametrize(
    "setting, words",
    [
        ("rounds", "--set rounds: expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("round=3", "no key 'round'; did you mean rounds"),
        ("algorithm.locl.lr=1.0", "algorithm: no key 'locl'; did you mean local"),
        ("algorithm.local.lr=fast", "algorithm.local.lr: 'fast' does not belong here"),
        ("algorithm.local.lr=-1.0", "algorithm.local.lr: -1.0 is wrong"),
        ("rounds=0", "rounds: 0 is wrong"),
        ("rounds=2.5", "rounds: 2.5 is wrong"),
        ("rounds=True", "rounds: True is wrong"),
        ("rounds.x=1", "rounds: 40 has no keys of its own"),
        ("speed=warp", "speed: 'warp' is wrong"),
        ("partition=iiid", "partition: no partition 'iiid'; did you mean iid"),
        ("partition=digits", "no partition 'digits'"),
        ("algorithm.local.steps=3", "algorithm.local: adam needs either epochs or steps"),
        ("ema=1.0", "ema: 1.0 is wrong"),
        ("threads=0", "threads: 0 is wrong"),
        ("data=None", "data"),
    ],
)
def test_an_error_of_a_setting_names_place_and_remedy(setting, words):
    with pytest.raises(RecipeError, match=words):
        demo().changed([setting])


def test_a_manifest_with_a_wrong_key_or_value_is_refused():
    saved = demo().saved()
    with pytest.raises(RecipeError, match="manifest: no key 'round'; did you mean rounds"):
        Recipe.restore({**saved, "round": "3"})
    with pytest.raises(RecipeError, match="'rounds' must be text in the grammar, not int"):
        Recipe.restore({**saved, "rounds": 3})
    with pytest.raises(RecipeError, match="data: recipe needs a value for 'data'"):
        Recipe.restore({k: v for k, v in saved.items() if k != "data"})
    with pytest.raises(RecipeError, match="manifest.rounds: '3' is wrong"):
        Recipe.restore({**saved, "rounds": "'3'"})
    with pytest.raises(RecipeError):
        Recipe.restore({**saved, "data": "__import__('os').system('true')"})


def test_keys_that_a_setting_resets_are_reported():
    """The demo has adam(lr=2e-3, batch=64, epochs=2, clip=1.0, schedule=cosine_decay()) and dpm_solver(guidance=1.0)."""
    sentences = demo().forgotten(
        ["algorithm=fedprox(local=adam(lr=1.0, epochs=2))", "algorithm.local.batch=8", "sampler=ddim()"]
    )
    lost = {"algorithm": "local.clip=None (was 1.0), local.schedule=constant() (was cosine_decay())"}
    lost |= {"sampler": "guidance=0.0 (was 1.0)"}
    assert sentences == [f"{k} was set as a whole, so these are at their defaults: {v}" for k, v in lost.items()]
    local = "local=adam(lr=1e-3, batch=64, epochs=2, clip=1.0, schedule=cosine_decay())"
    for named in (
        "algorithm.local.clip=None",
        f"algorithm=fedprox(mu=0.1, {local})",
        f"algorithm.{local}",
        "partition=iid()",
    ):
        assert demo().forgotten([named]) == []


def test_a_manifest_is_read_from_its_folder_or_its_file(tmp_path: Path):
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({"name": "mine", "recipe": demo().saved()}))
    assert read_manifest(tmp_path) == read_manifest(file)
    assert find_recipe(str(file)) == find_recipe(str(tmp_path)) == ("mine", demo())
    assert find_recipe("demo") == find_recipe("demo()") == ("demo", demo())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"recipe": []}', '{"recipe": null}', "\0", "{"])
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, content: str):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises((RunError, RecipeError), match="not a manifest"):
        read_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="is not a run folder"):
        read_manifest(tmp_path / "empty")


def test_an_error_for_an_unknown_recipe_suggests_the_nearest():
    for source, words in (
        ("dmo", "neither a recipe 'dmo' nor a run folder or file of that name"),
        ("dmo()", "no recipe 'dmo'"),
    ):
        with pytest.raises(RecipeError, match=rf"{words}; did you mean .*demo"):
            find_recipe(source)
    with pytest.raises(RecipeError, match="recipe demo has no argument 'fast'"):
        find_recipe("demo(fast=True)")
    with pytest.raises(RecipeError, match="neither a recipe '3'"):
        find_recipe("3")


def test_shards_cover_the_data_and_follow_the_seed():
    recipe = demo().changed(["partition=iid", "clients=4"])
    shards = recipe.shards(grey(40))
    assert sorted(torch.cat([s.rows for s in shards]).tolist()) == list(range(40)) and len(shards) == 4
    rows = [s.rows.tolist() for s in shards]
    assert rows == [s.rows.tolist() for s in recipe.shards(grey(40))]
    assert rows != [s.rows.tolist() for s in recipe.changed(["seed=1"]).shards(grey(40))]


def test_canaries_are_left_out_by_coins_and_change_nothing_else():
    """Of 400 images 100 are canaries; about half are out. The other rows stay with their clients, in their order."""
    plain = demo().changed(["partition=iid", "clients=4"])
    recipe, train = plain.changed(["canaries=100"]), grey(400)
    rows, coins = recipe.canaries_in(train)
    assert rows.tolist() == sorted(set(rows.tolist())) and len(rows) == len(coins) == 100 and coins.dtype == torch.bool
    assert 30 <= int(coins.sum()) <= 70, "five deviations of 100 fair coins are 25"
    out = set(rows[~coins].tolist())
    expected = [[row for row in shard.rows.tolist() if row not in out] for shard in plain.shards(train)]
    assert [shard.rows.tolist() for shard in recipe.shards(train)] == expected
    again, tossed = recipe.canaries_in(train)
    assert torch.equal(again, rows) and torch.equal(tossed, coins)
    other, others = recipe.changed(["seed=1"]).canaries_in(train)
    assert not torch.equal(other, rows) and not torch.equal(others, coins)
    none, no_coins = plain.canaries_in(train)
    assert len(none) == len(no_coins) == 0


def test_canaries_leave_every_client_an_image():
    """Four clients of two images: four canaries at most, whatever the coins say."""
    recipe = demo().changed(["partition=iid", "clients=4", "canaries=4"])
    for seed in range(10):
        shards = recipe.changed([f"seed={seed}"]).shards(grey(8))
        assert all(1 <= len(shard) <= 2 for shard in shards)
    with pytest.raises(PartitionError, match="canaries: 5, but each client keeps one image, so 4 can be set aside"):
        recipe.changed(["canaries=5"]).shards(grey(8))


def test_a_budget_stands_in_the_manifest():
    recipe = demo().changed(["budget=budget(epsilon=10.0)"])
    assert recipe.budget == Budget(epsilon=10.0, delta=1e-5, accountant="pld") and demo().budget is None
    assert Recipe.restore(recipe.saved()) == recipe


def test_a_bare_algorithm_keeps_the_solver_of_the_one_before():
    """Only what it must have and does not name; a solver of its own wins, and keys with defaults are not taken over."""
    demo = find_recipe("demo")[1]
    for words in ("scaffold", "fedprox(mu=0.1)"):
        assert demo.changed([f"algorithm={words}"]).algorithm.local == demo.algorithm.local
    assert demo.changed(["algorithm=scaffold(local=sgd(lr=0.5, epochs=1))"]).algorithm.local.lr == 0.5
    part = demo.changed(["algorithm.cohort=2"])
    assert part.changed(["algorithm=fedprox"]).algorithm.cohort is None


def test_true_and_false_are_written_as_elsewhere():
    assert find_recipe("demo")[1].changed(["reproducible=true"]).reproducible is True
    assert find_recipe("demo")[1].changed(["reproducible=true", "reproducible=false"]).reproducible is False
