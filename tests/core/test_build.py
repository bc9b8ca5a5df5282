"""Specs from text, and their keys set by dotted paths."""

import pytest
from abacus import Abacus, AbacusOfClay, abacus

from effuse.core.build import build_text, replace
from effuse.core.data import Partition, Source
from effuse.core.errors import RecipeError
from effuse.core.model import Arch
from effuse.core.solvers import CosineDecay, Solver
from effuse.core.spec import text
from effuse.data.partition import Shards
from effuse.data.sources import Labels, Union


def test_positional_values_are_own_keys_first():
    assert build_text("shards(3)", Partition, "partition") == Shards(per_client=3)
    assert build_text("abacus_of_clay(7, 8, 9)", Abacus, "here") == AbacusOfClay(clay=7, glaze=8, beads=9)
    with pytest.raises(RecipeError, match="given 'clay' twice"):
        build_text("abacus_of_clay(7, clay=8)", Abacus, "here")
    with pytest.raises(RecipeError, match="at most 11 values, got 12"):
        build_text(f"abacus_of_clay({', '.join('1' * 12)})", Abacus, "here")


def test_an_error_for_an_unknown_name_or_key_suggests_the_nearest():
    with pytest.raises(RecipeError, match="partition: no partition 'lable_skew'; did you mean label_skew"):
        build_text("lable_skew(beta=1.0)", Partition, "partition")
    with pytest.raises(RecipeError, match=r"here: abacus has no key 'bead'; did you mean beads\?"):
        abacus("abacus(bead=1)")
    with pytest.raises(RecipeError, match="no solver 'qqqq'; valid: .*adam.*sgd"):
        build_text("qqqq()", Solver, "local")


def test_a_missing_value_is_named():
    with pytest.raises(RecipeError, match="local.lr: sgd needs a value for 'lr'"):
        build_text("sgd(steps=1)", Solver, "local")


def test_a_failed_check_of_a_spec_is_an_error_of_one_sentence():
    with pytest.raises(RecipeError, match="^local: sgd needs either epochs or steps, and not both$"):
        build_text("sgd(lr=0.1)", Solver, "local")


def test_a_division_by_zero_in_a_check_is_an_error_of_the_recipe():
    """A U-Net checks that its widths are multiples of `groups`, which is zero here."""
    with pytest.raises(RecipeError, match="model"):
        build_text("unet(groups=0)", Arch, "model")


@pytest.mark.parametrize(
    "source",
    [
        "abacus(beads=True)",
        "abacus(beads=1.0)",
        "abacus(beads='1')",
        "abacus(rate='0.5')",
        "abacus(rate=True)",
        "abacus(rate=1e999)",
        "abacus(shut=1)",
        "abacus(note=5)",
        "abacus(sizes=3)",
        "abacus(sizes=['a'])",
        "abacus(mode=medium)",
        "abacus(schedule=None)",
        "abacus(schedule=3)",
        "abacus(beads=iid())",
    ],
)
def test_types_are_strict(source):
    with pytest.raises(RecipeError, match="^here"):
        abacus(source)


def test_an_int_becomes_a_float_where_a_float_is_declared():
    value = abacus("abacus(rate=1)")
    assert value.rate == 1.0 and type(value.rate) is float and "rate=1.0" in text(value)


def test_bare_names_are_choices_and_text():
    assert abacus("abacus(mode=fast)").mode == "fast"
    assert abacus("abacus(mode='fast')").mode == "fast"
    assert abacus("abacus(note=word)").note == "word"
    assert abacus("abacus(note=some.word)").note == "some.word"
    with pytest.raises(RecipeError, match="does not belong here"):
        abacus("abacus(note=word(1))")


def test_a_spec_may_be_written_in_quotes():
    assert abacus("abacus(schedule='cosine_decay(floor=0.5)')").schedule == CosineDecay(floor=0.5)


def test_errors_in_a_list_of_specs_name_the_item():
    union = build_text("union(sources=[labels(sizes=[1, 2]), labels([3, 4])])", Source, "data")
    assert union == Union(sources=(Labels(sizes=(1, 2)), Labels(sizes=(3, 4))))
    with pytest.raises(RecipeError, match=r"data.sources\[1\]: no source 'lables'; did you mean labels"):
        build_text("union(sources=[labels([1, 2]), lables([3])])", Source, "data")


def test_set_follows_dotted_paths():
    value = Abacus(inner=Abacus(beads=1))
    assert replace(value, ["inner"], {"beads": "9"}) == Abacus(inner=Abacus(beads=9))
    assert replace(value, ["inner", "schedule"], {"floor": "0.25"}).inner.schedule == CosineDecay(floor=0.25)
    assert replace(value, [], {"inner": "None"}).inner is None
    assert value.inner.beads == 1, "the old value does not change"


def test_set_takes_paths_as_text():
    """What cannot be parsed is taken as text where text is allowed, and is an error elsewhere."""
    for path in ("/data/my images", "../x.npz", "~/x", "C:\\data", "a-b/c", "name", "hf:name"):
        assert replace(Abacus(), [], {"where": path}).where == path
    assert replace(Abacus(), [], {"where": "'quoted'"}).where == "quoted"
    assert replace(Abacus(), [], {"where": "None"}).where is None
    with pytest.raises(RecipeError, match="cannot read '../x'"):
        replace(Abacus(), [], {"beads": "../x"})


def test_set_names_the_place_of_a_mistake():
    with pytest.raises(RecipeError, match="recipe: no key 'bead'; did you mean beads"):
        replace(Abacus(), [], {"bead": "1"})
    with pytest.raises(RecipeError, match="schedule: no key 'flor'; did you mean floor"):
        replace(Abacus(), ["schedule"], {"flor": "1"})
    with pytest.raises(RecipeError, match="beads: 3 has no keys of its own, so 'beads.x' does not exist"):
        replace(Abacus(), ["beads"], {"x": "1"})
    with pytest.raises(RecipeError, match="^schedule.floor: -1 is wrong"):
        replace(Abacus(), ["schedule"], {"floor": "-1"})


def test_a_value_outside_its_bounds_is_shown():
    with pytest.raises(RecipeError, match="local.lr: -1 is wrong, input should be greater than 0"):
        build_text("sgd(lr=-1, steps=1)", Solver, "local")
