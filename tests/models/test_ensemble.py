"""Several classifiers as one network."""

import pytest
import torch
from torch import Tensor, nn
from toy import ToyScores

from effuse.core.build import build
from effuse.core.data import Shape
from effuse.core.errors import RecipeError
from effuse.core.grammar import parse
from effuse.core.model import Arch
from effuse.core.rng import Stream
from effuse.core.spec import text
from effuse.machines.eager import Eager
from effuse.models.ensemble import Ensemble, Together, together
from effuse.models.resnet import Cnn, Resnet
from effuse.models.saved import load_model

DIGITS = Shape(8, 1, 3)
MEMBERS = (ToyScores(), Cnn(widths=(4,), norm="batch"), Resnet(widths=(4,), blocks=(1,), groups=2))
MODELS = [arch.resolved(DIGITS).initial(Stream((k,))) for k, arch in enumerate(MEMBERS)]
EAGER = Eager(torch.device("cpu"))


class Says(nn.Module):
    """Returns these logits for every image."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def answer(vote, *logits):
    (one,) = Together([Says(*each) for each in logits], vote)(torch.zeros(1, 1, 2, 2)).tolist()
    return one


def test_the_mean_of_logits():
    """(2, 0, -1) and (0, 1, 0): (1, 1/2, -1/2)."""
    assert answer("logits", (2.0, 0.0, -1.0), (0.0, 1.0, 0.0)) == [1.0, 0.5, -0.5]


def test_a_majority_is_not_outvoted_by_a_loud_member():
    """Two votes for class 1 against one for class 0, whose mean logit is by far the highest."""
    says = (100.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0)
    votes = answer("majority", *says)
    assert votes.index(max(votes)) == 1 and [int(v) for v in votes] == [1, 2, 0]
    loud = answer("logits", *says)
    assert loud.index(max(loud)) == 0


def test_a_tie_goes_to_the_mean_of_the_logits():
    """Classes 0 and 1 have a vote each, and class 2 the highest mean but no vote: (1, 3, 5/2) of means decides for 1."""
    votes = answer("majority", (6.0, -4.0, 5.0), (-4.0, 10.0, 0.0))
    assert votes.index(max(votes)) == 1 and [int(v) for v in votes] == [1, 1, 0]


def test_members_of_different_architectures_keep_their_values():
    """Parameter p of member k is 'k.p'; the answer is the mean of the members' own."""
    model = together(MODELS)
    assert model.arch.shape == DIGITS and model.params.numel == sum(m.params.numel for m in MODELS)
    assert torch.equal(model.params["2.stem.0.weight"], MODELS[2].params["stem.0.weight"])
    assert set(model.buffers) == {f"1.{k}" for k in MODELS[1].buffers}
    x = torch.randn(5, 1, 8, 8)
    alone = [EAGER.load(m).eval()(x) for m in MODELS]
    torch.testing.assert_close(EAGER.load(model).eval()(x), sum(alone) / 3)


def test_an_ensemble_is_saved_and_opened(tmp_path):
    model = together(MODELS[1:], "majority")  # a toy network cannot be saved alone
    net = EAGER.load(model)
    model.arch.save(net.module, tmp_path, None)
    opened, schedule = load_model(tmp_path)
    assert opened.arch == model.arch and schedule is None
    assert opened.params.digest() == model.params.digest() and opened.buffers.digest() == model.buffers.digest()


def test_an_ensemble_is_resolved_with_its_members():
    arch = Ensemble(members=MEMBERS).resolved(DIGITS)
    assert [m.shape for m in arch.members] == [DIGITS] * 3 and build(parse(text(arch)), Arch, "model") == arch


@pytest.mark.parametrize("source", ["ensemble_of(members=[])", "ensemble_of(members=[cnn(), unet()])"])
def test_impossible_ensembles_are_refused(source):
    with pytest.raises(RecipeError, match="needs at least one classifier|unet returns images; an ensemble joins"):
        build(parse(source), Arch, "model")
