"""Numbers of several clients' audits as one: scales, proportions, ranks and pairs."""

import pytest
import torch
from memoriser import Memoriser, random_images

from effuse.core.data import Shard
from effuse.core.metric import Images
from effuse.core.rng import Stream
from effuse.core.workbench import Workbench
from effuse.machines.eager import Eager
from effuse.privacy.membership import judged
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.tools.audit_model import Target, audit_models
from effuse.tools.audit_numbers import Attacked, Guessed, Memorised, pooled_attacks, pooled_guesses, pooled_scores


def attacked(members, others, labels=None, other_labels=None) -> Attacked:
    labels = torch.zeros(len(members), dtype=torch.int64) if labels is None else torch.tensor(labels)
    other_labels = torch.zeros(len(others), dtype=torch.int64) if other_labels is None else torch.tensor(other_labels)
    return Attacked({"loss": torch.tensor(members)}, {"loss": torch.tensor(others)}, labels, other_labels)


def test_networks_of_different_scales_are_pooled_in_their_own_deviations():
    """Others of 1 and 3 have mean 2 and deviation 1; those of 1000 and 3000 have 2000 and 1000. Every member is two
    deviations below, so all are below all others; as they are, the first client's others are below the second's members.
    """
    parts = [attacked([0.0, 0.0], [1.0, 3.0]), attacked([0.0, 0.0], [1000.0, 3000.0])]
    found = pooled_attacks(parts, torch.Generator())
    assert found.members["loss"].tolist() == [-2.0] * 4 and found.others["loss"].tolist() == [-1.0, 1.0] * 2
    assert judged(found.members["loss"], found.others["loss"]).auc.value == 1.0


def test_every_client_adds_as_many_members_as_others_of_each_label():
    """The first has four members and two others; two of its members, of the others' labels, stay."""
    first = attacked([0.0, 1.0, 2.0, 3.0], [5.0, 7.0], [0, 0, 1, 1], [0, 1])
    found = pooled_attacks([first, attacked([1.0], [1.0])], torch.Generator())
    assert len(found.members["loss"]) == len(found.others["loss"]) == 3
    assert found.member_labels.tolist() == [0, 1, 0] and found.other_labels.tolist() == [0, 1, 0]
    # (x - 6) / 1: the members of label 0 are -6 or -5, those of label 1 -4 or -3; one other alone has no deviation
    low, high, alone = found.members["loss"].tolist()
    assert low in (-6.0, -5.0) and high in (-4.0, -3.0) and alone == 0.0


def test_canaries_are_ranked_within_their_client():
    """Of four and two canaries: ranks 0 to 3 by 4, 0 and 1 by 2, plus a half each. Half of six guesses are each one's."""
    parts = [
        Guessed("pia", torch.tensor([4.0, 1.0, 3.0, 2.0]), torch.tensor([0, 1, 0, 1]).bool()),
        Guessed("pia", torch.tensor([900.0, 800.0]), torch.tensor([0, 1]).bool()),
    ]
    found = pooled_guesses(parts)
    assert found.values.tolist() == [0.875, 0.125, 0.625, 0.375, 0.75, 0.25]
    assert found.coins.tolist() == [False, True, False, True, False, True] and found.attack == "pia"


def test_the_nearest_pairs_of_all_clients():
    """Scores 0.5 and 0.1 of one client, 0.3 of another: pairs come in the order 0.1, 0.3, 0.5."""
    one = Memorised(torch.tensor([0.5, 0.1]), torch.ones(3), torch.tensor([[1.0], [5.0]]), 10, 10)
    other = Memorised(torch.tensor([0.3]), torch.ones(2), torch.tensor([[3.0]]), 90, 50)
    found = pooled_scores([one, other])
    assert found.pairs.flatten().tolist() == [1.0, 3.0, 5.0]
    assert (len(found.made), len(found.real), found.training_images, found.neighbours) == (3, 5, 100, 10)


def test_a_copy_of_another_clients_image_is_no_copy(tmp_path):
    """Both clients' images are copies of ten images of the first."""
    data, held_out = random_images(120, "train", side=8), random_images(90, "test", side=8)
    task = Denoise(schedule=Linear(steps=100))
    bench = Workbench(Eager(torch.device("cpu")), task, 1)
    bench.begin(Stream((0, "site")), 0)
    model = bench.initial(Memoriser().resolved(data.shape))
    copies = Images(data.images[:10].float() / 127.5 - 1)
    targets = [Target(model, Shard(data, torch.arange(60) + 60 * k), held_out, copies, name=str(k)) for k in (0, 1)]
    report = audit_models(targets, task, tmp_path)
    own = {client: found["memorisation"]["generated"]["below"] for client, found in report["clients"].items()}
    assert own == {"0": 10, "1": 0} and report["memorisation"]["generated"]["below"] == 10
    assert report["memorisation"]["generated"]["share"] == pytest.approx(0.5) and report["weights_sha256"] is None
