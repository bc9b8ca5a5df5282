"""The grammar of specs: what it reads, what it prints, and what it refuses to evaluate."""

import ast
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Literal

import pytest

from effuse.algorithms.fedavg import FedAvg
from effuse.core.data import Partition, Source
from effuse.core.errors import RecipeError
from effuse.core.model import Arch
from effuse.core.solvers import SGD, Adam, AdamW, CosineDecay, Schedule, Solver
from effuse.core.spec import (
    Call,
    Spec,
    accepts_text,
    build,
    build_text,
    field_hints,
    find,
    parse,
    registry,
    replace,
    spec,
    text,
)
from effuse.data.dirichlet import LabelSkew
from effuse.data.partition import Domains, Shards
from effuse.data.sources import Labels, Union
from effuse.metrics.fidelity import FID
from effuse.models.unet import Unet
from effuse.recipes.demo import demo

LOCAL = SGD(lr=0.5, steps=2)
NEEDY = [
    SGD(lr=1e-5, epochs=3, schedule=CosineDecay(floor=0.1)),
    Adam(lr=1, steps=2, betas=(0.5, 0.9)),
    AdamW(lr=0.1, steps=2, clip=1.0, ema=0.999),
    LabelSkew(beta=0.1),
    Domains(per_domain=(1, 2), fraction=0.25),
    Labels(sizes=(6000,) * 10),
    Union(sources=(Labels(sizes=(3, 4)), Labels(sizes=(5, 6)))),
    demo(),
]


@spec
class Abacus(Spec):
    """A spec with one field of every simple kind."""

    beads: int = 3
    rate: float = 0.5
    shut: bool = False
    note: str = "plain"
    where: str | None = None
    mode: Literal["slow", "fast"] = "slow"
    sizes: tuple[int, ...] = ()
    schedule: Schedule = CosineDecay()
    inner: Spec | None = None


@spec
class AbacusOfClay(Abacus):
    """Keys of its own come before those it inherits."""

    clay: int = 1
    glaze: int = 2


def defaults() -> list[Spec]:
    """Every spec of the project that can be made of nothing, or of a solver alone."""
    made = []
    for cls in registry(Spec).values():
        needed = {"local": LOCAL} if "local" in field_hints(cls) else {}
        try:
            made.append(cls(**needed))
        except ValueError:
            continue
    return made


def abacus(source: str) -> Abacus:
    return build_text(source, Abacus, "here")


def test_every_spec_prints_and_parses_to_itself():
    """In full and in short; the bare minimum of the project has more than thirty of them."""
    ours = defaults()
    assert len(ours) > 30 and any(isinstance(s, FedAvg) for s in ours) and any(isinstance(s, FID) for s in ours)
    for value in [*ours, *NEEDY]:
        for shown in (text(value), text(value, full=False), str(value), repr(value)):
            again = build_text(shown, Spec, "here")
            assert type(again) is type(value) and again == value, shown


def test_full_text_names_every_key_and_short_text_only_what_differs():
    assert text(LabelSkew(beta=0.5), full=False) == "label_skew(beta=0.5)"
    assert set(field_hints(LabelSkew)) == {kv.partition("=")[0] for kv in text(LabelSkew(beta=0.5))[11:-1].split(", ")}


@pytest.mark.parametrize(
    "source, value",
    [
        ("3", 3),
        ("-3", -3),
        ("-1.5", -1.5),
        ("1e-3", 0.001),
        ("None", None),
        ("True", True),
        ("'a b'", "a b"),
        ("[1, (2, 'x')]", (1, (2, "x"))),
        ("[6000] * 10", (6000,) * 10),
        ("[1, 2]*2", (1, 2, 1, 2)),
        ("iid", Call("iid")),
        (" iid() ", Call("iid")),
        ("feddiffuse.full(profile='code')", Call("feddiffuse.full", (), (("profile", "code"),))),
        ("a(1, b(2))", Call("a", (1, Call("b", (2,))))),
        ("hf:ylecun/mnist", Call("hf", ("ylecun/mnist",))),
    ],
)
def test_the_grammar(source, value):
    assert parse(source) == value


def test_a_prefix_is_short_for_a_call_with_text():
    assert build_text("hf:ylecun/mnist", Source, "data") == build_text("hf('ylecun/mnist')", Source, "data")


@pytest.mark.parametrize("source", ["[0] * 1000001", "[0, 0] * 500001", "[0] * 1_000_000_000_000", "[[0] * 1000] * 1001"])
def test_a_list_too_long_is_refused_before_it_is_made(source):
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError, match="at most 1000000"):
            parse(source)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "the list of a million would be eight megabytes"
    finally:
        tracemalloc.stop()


def test_no_detour_to_a_long_list():
    """Nested repetitions multiply, neighbours add up, and empty lists take room too."""
    half = "[0] * 600000"
    nested, empty = "[[[0] * 1000] * 1000] * 1000", "[[]] * 1000001"
    for source in (nested, empty, f"[{half}, {half}]", f"f({half}, x={half})", f"f(g({half}), {half})"):
        with pytest.raises(RecipeError, match="at most 1000000"):
            parse(source)
    assert len(parse("[[0] * 1000] * 1000")) == 1000


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os').system('true')",
        "lambda: 1",
        "f'{1}'",
        "[x for x in [1]]",
        "(x for x in [1])",
        "'a'.upper()",
        "f()()",
        "f[0]",
        "1 + 1",
        "2 ** 9999999",
        "'a' * 9",
        "(1,) * 3",
        "[1] * -1",
        "[1] * [2]",
        "+1",
        "not True",
        "1 if True else 2",
        "1 < 2",
        "{1: 2}",
        "{1}",
        "b'x'",
        "1j",
        "...",
        "f(*[1])",
        "f(**{'a': 1})",
        "(x := 1)",
        "0x" + "f" * 17,
        "-0x" + "f" * 9999,
        "[1] * 0x" + "f" * 9999,
        "import os",
        "",
        "(" * 5000,
        "-" * 50000 + "1",
        "a" + ".a" * 50000,
        "\0",
        "\ud800",
    ],
    ids=lambda s: ascii(s)[:24],
)
def test_nothing_is_evaluated(source):
    with pytest.raises(RecipeError):
        parse(source)


def test_a_name_that_looks_like_python_is_a_name_and_no_more():
    assert parse("__import__('os')") == Call("__import__", ("os",))
    with pytest.raises(RecipeError, match="no partition '__import__'"):
        build_text("__import__('os')", Partition, "partition")


def test_positional_values_are_own_keys_first():
    assert build_text("shards(3)", Partition, "partition") == Shards(per_client=3)
    assert build_text("abacus_of_clay(7, 8, 9)", Abacus, "here") == AbacusOfClay(clay=7, glaze=8, beads=9)
    with pytest.raises(RecipeError, match="given 'clay' twice"):
        build_text("abacus_of_clay(7, clay=8)", Abacus, "here")
    with pytest.raises(RecipeError, match="at most 11 values, got 12"):
        build_text(f"abacus_of_clay({', '.join('1' * 12)})", Abacus, "here")


@pytest.mark.parametrize("name", ["label_skew", "LabelSkew", "labelskew", "LABEL_SKEW", "l_abel_skew"])
def test_case_and_underscores_do_not_matter(name):
    assert find(Partition, name, "partition") is LabelSkew


def test_an_unknown_name_or_key_is_answered_with_the_nearest():
    with pytest.raises(RecipeError, match="partition: no partition 'lable_skew'; did you mean label_skew"):
        build_text("lable_skew(beta=1.0)", Partition, "partition")
    with pytest.raises(RecipeError, match=r"here: abacus has no key 'bead'; did you mean beads\?"):
        abacus("abacus(bead=1)")
    with pytest.raises(RecipeError, match="no solver 'qqqq'; valid: .*adam.*sgd"):
        build_text("qqqq()", Solver, "local")


def test_a_spec_of_another_kind_is_not_found():
    """`iid` exists, but it is no solver."""
    with pytest.raises(RecipeError, match="no solver 'iid'"):
        build_text("iid()", Solver, "local")
    with pytest.raises(RecipeError, match="no schedule 'iid'"):
        abacus("abacus(schedule=iid())")


def test_an_abstract_kind_is_no_name():
    assert find(Spec, "sgd", "x") is SGD
    for name in ("solver", "partition", "arch"):
        with pytest.raises(RecipeError, match="no name"):
            find(Spec, name, "x")


def test_a_missing_value_is_named():
    with pytest.raises(RecipeError, match="local.lr: sgd needs a value for 'lr'"):
        build_text("sgd(steps=1)", Solver, "local")


def test_a_check_of_the_spec_itself_is_told_as_one_sentence():
    with pytest.raises(RecipeError, match="^local: sgd needs either epochs or steps, and not both$"):
        build_text("sgd(lr=0.1)", Solver, "local")


def test_values_that_break_the_arithmetic_of_a_check_are_an_error_of_the_recipe():
    """A U-Net asks whether its widths are multiples of `groups`, which here means dividing by 0."""
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


def test_an_int_where_a_float_is_asked_becomes_one():
    value = abacus("abacus(rate=1)")
    assert value.rate == 1.0 and type(value.rate) is float and "rate=1.0" in text(value)


def test_bare_names_are_choices_and_text():
    assert abacus("abacus(mode=fast)").mode == "fast"
    assert abacus("abacus(mode='fast')").mode == "fast"
    assert abacus("abacus(note=word)").note == "word"
    assert abacus("abacus(note=some.word)").note == "some.word"
    with pytest.raises(RecipeError, match="does not belong here"):
        abacus("abacus(note=word(1))")


def test_text_of_a_spec_within_quotes_is_that_spec():
    assert abacus("abacus(schedule='cosine_decay(floor=0.5)')").schedule == CosineDecay(floor=0.5)


def test_lists_of_specs_carry_their_place_into_errors():
    union = build_text("union(sources=[labels(sizes=[1, 2]), labels([3, 4])])", Source, "data")
    assert union == Union(sources=(Labels(sizes=(1, 2)), Labels(sizes=(3, 4))))
    with pytest.raises(RecipeError, match=r"data.sources\[1\]: no source 'lables'; did you mean labels"):
        build_text("union(sources=[labels([1, 2]), lables([3])])", Source, "data")


def test_set_follows_dotted_paths():
    value = Abacus(inner=Abacus(beads=1))
    assert replace(value, ["inner"], {"beads": "9"}) == Abacus(inner=Abacus(beads=9))
    assert replace(value, ["inner", "schedule"], {"floor": "0.25"}).inner.schedule == CosineDecay(floor=0.25)
    assert replace(value, [], {"inner": "None"}).inner is None
    assert value.inner.beads == 1, "the old value stays as it was"


def test_set_takes_paths_as_text():
    """What cannot be parsed is the text itself where text is welcome, and an error where it is not."""
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
    with pytest.raises(RecipeError, match="beads: 3 has no keys of its own, so 'beads.x' leads nowhere"):
        replace(Abacus(), ["beads"], {"x": "1"})
    with pytest.raises(RecipeError, match="^schedule.floor: -1 is wrong"):
        replace(Abacus(), ["schedule"], {"floor": "-1"})


def test_two_specs_of_one_name_are_an_error(monkeypatch):
    monkeypatch.setattr(AbacusOfClay, "name", "A_BACUS")
    with pytest.raises(RecipeError, match="two Specs are called .*BACUS.*test_spec"):
        registry(Spec)


def test_a_class_without_spec_is_told_and_not_ignored():
    class Undeclared(Abacus):
        """Its beads of glass would be nobody's key."""

        glass: int = 3

    class Keyless(Abacus):
        """Works as its parent does."""

        shiny: ClassVar[bool] = True

    told = r"test_spec: write @spec above class .*Undeclared; without it, what it says of glass is ignored"
    try:
        with pytest.raises(RecipeError, match=told):
            build_text("undeclared(glass=1)", Abacus, "here")
        Undeclared.__abstract__ = True
        assert build_text("keyless(beads=4)", Abacus, "here") == Keyless(beads=4)
    finally:  # other tests look at all specs
        Undeclared.__abstract__ = Keyless.__abstract__ = True


def test_one_thread_at_a_time_parses(monkeypatch):
    """Clients at work side by side decode their messages: see PARSING."""
    whole, busy, most = ast.parse, [], []

    def watched(*args, **options):
        busy.append(0)
        most.append(len(busy))
        time.sleep(0.005)
        busy.pop()
        return whole(*args, **options)

    monkeypatch.setattr(ast, "parse", watched)
    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(parse, ["abacus(beads=4)"] * 12)} == {Call("abacus", (), (("beads", 4),))}
    assert most == [1] * 12


def test_specs_are_frozen_keyword_only_and_closed():
    with pytest.raises(AttributeError):
        Abacus().beads = 4
    with pytest.raises(ValueError):
        Abacus(4)
    with pytest.raises(ValueError):
        Abacus(bead=4)
    assert hash(Abacus(sizes=(1,))) == hash(Abacus(sizes=(1,)))


def test_a_value_outside_its_bounds_is_shown():
    with pytest.raises(RecipeError, match="local.lr: -1 is wrong, input should be greater than 0"):
        build_text("sgd(lr=-1, steps=1)", Solver, "local")


def test_which_annotations_take_text():
    assert accepts_text(str | None) and accepts_text(Literal["a"]) and not accepts_text(int | None)
    assert build(Call("iid"), str, "x") == "iid"
    assert isinstance(build("unet()", Arch, "x"), Unet)
