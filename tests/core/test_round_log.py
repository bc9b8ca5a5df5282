"""The mean of the losses that a round's clients reported."""

from effuse.core.round_log import RoundLog


def test_losses_are_averaged_by_their_weights():
    """(2 * 1 + 5 * 3) / (1 + 3) = 17 / 4."""
    assert RoundLog(losses=[(2.0, 1.0), (5.0, 3.0)]).loss == 4.25


def test_a_round_without_a_loss_has_none():
    assert RoundLog().loss is None
    assert RoundLog(losses=[(2.0, 0.0)]).loss is None, "a client without weight tells nothing of the mean"
