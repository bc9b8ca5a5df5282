"""Killed at a seeded moment and resumed: weights, rounds.jsonl and ledger are those of the undisturbed run."""


def test_a_run_that_was_struck_ends_as_if_it_had_not_been(proof, number):
    proof.prove(number)
