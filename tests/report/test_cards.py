"""What a model card says of a run."""

import dataclasses

from effuse.report.cards import model_card
from effuse.report.facts import Facts


def test_images_stayed_with_clients_unless_they_were_pooled(run):
    facts = Facts.of(run)
    assert "Trained by fedavg with 3 clients, whose images stayed with them." in model_card("x", facts, {}, [])
    for algorithm in ("centralised(local=adam())", "feddiff(filter=oracle())", "feddiff(real=True)"):
        pooled = dict(facts.manifest) | {"recipe": facts.recipe | {"algorithm": algorithm}}
        card = model_card("x", dataclasses.replace(facts, manifest=pooled), {}, [])
        assert "with 3 clients, whose images were all in one place." in card and "stayed" not in card


def test_the_card_names_what_was_chosen(run):
    """Of the toy's solver lr=0.01, batch=8 and epochs=1; the other keys are at their defaults."""
    card = model_card("x", Facts.of(run), {}, [])
    assert "| algorithm | fedavg(local=adam(lr=0.01, batch=8, epochs=1)) |" in card
