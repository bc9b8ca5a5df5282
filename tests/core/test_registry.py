"""Specs are found by name."""

from typing import ClassVar

import pytest
from abacus import Abacus, AbacusOfClay, abacus

from effuse.core.build import build_text
from effuse.core.data import Partition
from effuse.core.errors import RecipeError
from effuse.core.registry import find, registry
from effuse.core.solvers import SGD, Solver
from effuse.core.spec import Spec
from effuse.data.dirichlet import LabelSkew


@pytest.mark.parametrize("name", ["label_skew", "LabelSkew", "labelskew", "LABEL_SKEW", "l_abel_skew"])
def test_case_and_underscores_do_not_matter(name):
    assert find(Partition, name, "partition") is LabelSkew


def test_a_spec_of_another_kind_is_not_found():
    """`iid` exists, but it is no solver."""
    with pytest.raises(RecipeError, match="no solver 'iid'"):
        build_text("iid()", Solver, "local")
    with pytest.raises(RecipeError, match="no schedule 'iid'"):
        abacus("abacus(schedule=iid())")


def test_an_abstract_spec_is_not_found():
    assert find(Spec, "sgd", "x") is SGD
    for name in ("solver", "partition", "arch"):
        with pytest.raises(RecipeError, match="no name"):
            find(Spec, name, "x")


def test_two_specs_of_one_name_are_an_error(monkeypatch):
    monkeypatch.setattr(AbacusOfClay, "name", "A_BACUS")
    with pytest.raises(RecipeError, match="two Specs are called .*BACUS.*abacus"):
        registry(Spec)


def test_a_class_without_the_decorator_is_an_error():
    class Undeclared(Abacus):
        """Has a key that would be ignored."""

        glass: int = 3

    class Keyless(Abacus):
        """Has no key of its own, so it needs no decorator."""

        shiny: ClassVar[bool] = True

    words = r"test_registry: write @spec above class .*Undeclared; without it, its keys are ignored: glass"
    try:
        with pytest.raises(RecipeError, match=words):
            build_text("undeclared(glass=1)", Abacus, "here")
        Undeclared.__abstract__ = True
        assert build_text("keyless(beads=4)", Abacus, "here") == Keyless(beads=4)
    finally:  # other tests use all specs
        Undeclared.__abstract__ = Keyless.__abstract__ = True
