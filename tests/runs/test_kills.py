"""A few cases of `make test-faults`: each engine is struck at a seeded moment, and ends as if it had not been."""

import pytest
from kill_cases import CASES, ENGINES, Proof

SEED, EACH = 3, 2


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    return Proof(tmp_path_factory.mktemp("proof"), SEED)


@pytest.mark.parametrize("number", range(len(ENGINES) * EACH))
def test_a_run_that_was_struck_ends_as_if_it_had_not_been(proof, number):
    proof.prove(number)


def test_the_cases_come_from_every_algorithm_and_engine():
    assert {engine for _, engine in CASES} == {*ENGINES} and len(CASES) == len(set(CASES))
    assert all((name, engine) in CASES for name, _ in CASES for engine in ("simulator", "loopback"))
