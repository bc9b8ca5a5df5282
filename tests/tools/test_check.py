"""`effuse check` is exact: it matches the published numbers and the ledger of every run."""

import pytest

from effuse.recipes import find_recipe
from effuse.tools.check import check

FASHION = [
    "data=labels(sizes=[6000]*10, side=28, channels=1)",
    "model=convnext_unet()",
    "evaluate.metrics=[]",
    "sampler=ancestral()",
    "rounds=15",
]


def report(*settings):
    return check(find_recipe("demo")[1].changed([*FASHION, *settings]))


def test_parameters_of_the_feddiffuse_network():
    parts = report("rounds=1")["parameters"]
    assert parts == {"total": 2_996_315, "encoder": 1_280_642, "bottleneck": 999_376, "decoder": 716_297}


def test_parameters_and_cost_of_the_cifar_network():
    found = report("data=labels(sizes=[5000]*10, side=32, channels=3)", "model=cifar_unet()", "rounds=1")
    assert found["parameters"]["total"] == 35_746_307
    assert found["parameters"]["decoder"] == 22_334_595


def test_label_skew_of_feddiffuse():
    split = report("partition=label_skew(beta=0.5, mask=True, seed=2023, legacy=True)", "rounds=1")["partition"]
    assert split["sizes"] == [13446, 7913, 12357, 13838, 12446]
    assert split["labels"][0] == [4888, 1316, 378, 936, 146, 1177, 96, 2944, 1565, 0]
    assert split["labels"][4] == [866, 325, 816, 87, 2466, 5, 373, 844, 3707, 2957]


def test_quantity_skew_of_feddiffuse():
    split = report("partition=quantity_skew(beta=0.5, seed=2023, legacy=True)", "rounds=1")["partition"]
    assert split["sizes"] == [529, 13, 46087, 11898, 1473]


def test_long_tail_of_cifar10():
    found = report(
        "data=labels(sizes=[5000]*10, side=32, channels=3)",
        "partition=long_tail(rho=10, then=iid())",
        "model=cifar_unet()",
        "rounds=1",
    )
    totals = [sum(column) for column in zip(*found["partition"]["labels"])]
    assert totals == [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]


@pytest.mark.parametrize(("clients", "total"), [(5, 449_447_250), (10, 898_894_500)])
def test_traffic_of_fedavg(clients, total):
    """2 R K |theta|: 2 x 15 x 5 x 2,996,315 = 449,447,250 parameters, four bytes each."""
    traffic = report(f"clients={clients}")["traffic"]
    assert traffic["exact"] and traffic["parameters"]["total"] == total
    assert traffic["bytes"]["total"] == 4 * total and traffic["links"]["client-server"]["up"] == 2 * total
    assert len(traffic["per_round"]) == 15
    assert report(f"clients={clients}", "wire=bf16")["traffic"]["bytes"]["total"] == 2 * total


def test_steps_are_counted():
    """Sizes 354, 261, 415, 159, 253 in batches of 64 are 6 + 5 + 7 + 3 + 4 = 25 steps an epoch, two epochs, three rounds."""
    found = check(find_recipe("demo")[1].changed(["rounds=3", "evaluate.metrics=[]"]))
    assert found["partition"]["sizes"] == [354, 261, 415, 159, 253]
    assert found["steps"] == {"client": 150, "server": 0}
