"""Which rollouts are too old, exactly, and which of their tokens training may use."""

import pytest

from lifecycle import MeasuredFrom, StalenessBudget, Ticket


def _at(version: int, max_staleness: int, **options: MeasuredFrom) -> StalenessBudget:
    return StalenessBudget(batch_size=1, max_staleness=max_staleness, version=version, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_staleness", "current", "usable"),
    [(4, 9, {5, 6, 7, 8, 9}), (0, 8, {8}), (2, 8, {6, 7, 8}), (1, 0, {0}), (3, 2, {0, 1, 2})],
)
def test_the_window_is_exact(max_staleness: int, current: int, usable: set[int]) -> None:
    """A bound of four keeps a lag of four and drops five; a bound of zero keeps only what is equal."""
    budget = _at(current, max_staleness)
    kept = {version for version in range(current + 1) if not budget.is_stale(Ticket(1, version))}
    assert kept == usable
    assert {version for version in range(current + 1) if version >= budget.oldest_allowed} == usable


def test_a_mask_keeps_the_tokens_within_the_window() -> None:
    """One truth value for each token; a version that is not known is never used."""
    budget = _at(8, 2)
    assert budget.mask((5, 6, 7, 8, None)) == (False, True, True, True, False)
    assert budget.mask(()) == ()


def test_staleness_counts_from_admission_or_from_the_oldest_token() -> None:
    """By the oldest token a rollout that began late is younger; one without tokens counts from its admission."""
    by_admission, by_token = _at(8, 2), _at(8, 2, measured_from=MeasuredFrom.OLDEST_TOKEN)
    ticket = Ticket(1, 5)
    assert (by_admission.staleness(ticket), by_token.staleness(ticket)) == (3, 3)
    ticket.saw((8, None, 7))
    ticket.saw(())
    ticket.saw((None,))
    assert (by_admission.staleness(ticket), by_token.staleness(ticket), ticket.oldest_token_version) == (3, 1, 7)
    assert (by_admission.is_stale(ticket), by_token.is_stale(ticket)) == (True, False)
    ticket.saw((6,))
    assert by_token.staleness(ticket) == 2


def test_a_rollout_admitted_before_the_first_version_counts_from_zero() -> None:
    """Where nothing was published yet there is no version to remember."""
    assert _at(2, 1).staleness(Ticket(1, None)) == 2
