"""Specs: printed and parsed, frozen and closed."""

from typing import Literal

import pytest
from abacus import Abacus

from effuse.algorithms.fedavg import FedAvg
from effuse.core.build import build, build_text
from effuse.core.errors import RecipeError
from effuse.core.grammar import Call
from effuse.core.model import Arch
from effuse.core.registry import registry
from effuse.core.solvers import SGD, Adam, AdamW, CosineDecay
from effuse.core.spec import Spec, accepts_text, field_hints, text
from effuse.data.dirichlet import LabelSkew
from effuse.data.partition import Domains
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


def defaults() -> list[Spec]:
    """Every spec of the project that needs no values, or only a solver."""
    made = []
    for cls in registry(Spec).values():
        needed = {"local": LOCAL} if "local" in field_hints(cls) else {}
        try:
            made.append(cls(**needed))
        except (ValueError, RecipeError):
            continue
    return made


def test_every_spec_prints_and_parses_to_itself():
    """In full and in short; the project has more than thirty specs that need no values."""
    specs = defaults()
    assert len(specs) > 30 and any(isinstance(s, FedAvg) for s in specs) and any(isinstance(s, FID) for s in specs)
    for value in [*specs, *NEEDY]:
        for shown in (text(value), text(value, full=False), str(value), repr(value)):
            again = build_text(shown, Spec, "here")
            assert type(again) is type(value) and again == value, shown


def test_full_text_names_every_key_and_short_text_only_what_differs():
    assert text(LabelSkew(beta=0.5), full=False) == "label_skew(beta=0.5)"
    assert set(field_hints(LabelSkew)) == {kv.partition("=")[0] for kv in text(LabelSkew(beta=0.5))[11:-1].split(", ")}


def test_specs_are_frozen_keyword_only_and_closed():
    with pytest.raises(AttributeError):
        Abacus().beads = 4
    with pytest.raises(ValueError):
        Abacus(4)
    with pytest.raises(ValueError):
        Abacus(bead=4)
    assert hash(Abacus(sizes=(1,))) == hash(Abacus(sizes=(1,)))


def test_which_annotations_take_text():
    assert accepts_text(str | None) and accepts_text(Literal["a"]) and not accepts_text(int | None)
    assert build(Call("iid"), str, "x") == "iid"
    assert isinstance(build("unet()", Arch, "x"), Unet)
