"""The grammar: what it parses and what it refuses."""

import ast
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from effuse.core.build import build_text
from effuse.core.data import Partition, Source
from effuse.core.errors import RecipeError
from effuse.core.grammar import Call, parse


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
def test_a_list_that_is_too_long_is_refused_before_it_is_built(source):
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError, match="at most 1000000"):
            parse(source)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "a list of a million items would take eight megabytes"
    finally:
        tracemalloc.stop()


def test_nested_and_adjacent_lists_are_limited_together():
    """Nested repetitions multiply, adjacent ones add up, and empty lists count too."""
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


def test_a_name_that_looks_like_python_is_only_a_name():
    assert parse("__import__('os')") == Call("__import__", ("os",))
    with pytest.raises(RecipeError, match="no partition '__import__'"):
        build_text("__import__('os')", Partition, "partition")


def test_one_thread_at_a_time_parses(monkeypatch):
    """Parallel clients decode messages at the same time; see PARSING."""
    parse_source, busy, most = ast.parse, [], []

    def watched(*args, **options):
        busy.append(0)
        most.append(len(busy))
        time.sleep(0.005)
        busy.pop()
        return parse_source(*args, **options)

    monkeypatch.setattr(ast, "parse", watched)
    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(parse, ["abacus(beads=4)"] * 12)} == {Call("abacus", (), (("beads", 4),))}
    assert most == [1] * 12
