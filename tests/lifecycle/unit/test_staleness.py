"""The staleness budget: capacity by the formula, tickets settled once, and no drift."""

from typing import Any

import pytest

from lifecycle import StalenessBudget, Ticket
from lifecycle.errors import NoCapacity, TicketSettled
from lifecycle.staleness import Unlimited


@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [
        ((100, 4, 2, 0, 0, 0), 12),
        ((1000, 4, 2, 5, 0, 0), 32),
        ((20, 8, 3, 0, 0, 15), 17),
        ((64, 16, 1, 7, 20, 120), 4),
        ((8, 4, 0, 3, 2, 13), 1),
        ((3, 2, 1, 0, 10, 0), -7),
        ((None, 2, 1, 0, 10, 0), -6),
    ],
)
def test_capacity_follows_the_formula(sizes: tuple[Any, ...], capacity: int) -> None:
    """min(max_concurrent - running, (max_staleness + version + 1) * batch_size - (accepted + running))."""
    names = ("max_concurrent", "batch_size", "max_staleness", "version", "running", "accepted")
    assert StalenessBudget(**dict(zip(names, sizes, strict=True))).capacity() == capacity


def test_a_run_taken_up_again_may_run_as_far_ahead_as_a_new_one() -> None:
    """After a checkpoint at version 100 the budget gives a full (max_staleness + 1) * batch_size."""
    budget = StalenessBudget(batch_size=32, max_staleness=2)
    budget.restore(100)
    assert (budget.version, budget.accepted, budget.capacity()) == (100, 3200, 96)


def test_restoring_forgets_the_drift_of_before() -> None:
    """What was consumed before the checkpoint is part of the checkpoint."""
    budget = StalenessBudget(batch_size=4, max_staleness=1)
    budget.advance(1, consumed=9)
    budget.restore(1)
    assert budget.capacity() == 8


@pytest.mark.parametrize(("consumed", "capacity"), [(None, 8), (4, 8), (0, 4), (2, 6), (6, 10)])
def test_a_version_frees_what_it_consumed(consumed: int | None, capacity: int) -> None:
    """With the true number of consumed rollouts the bound follows them; without, a batch a version is assumed."""
    budget = StalenessBudget(batch_size=4, max_staleness=1, accepted=4)
    budget.advance(1, consumed=consumed)
    assert budget.capacity() == capacity


def test_several_versions_at_once_consume_as_many_batches() -> None:
    """A version that is skipped counts as published."""
    budget = StalenessBudget(batch_size=4, max_staleness=0)
    budget.advance(3)
    assert budget.capacity() == 16


def test_rollouts_dropped_between_versions_free_their_places() -> None:
    """Advancing to the same version with `consumed` gives back what the buffer dropped."""
    budget = StalenessBudget(batch_size=2, max_staleness=0, accepted=2)
    before = budget.capacity()
    budget.advance(0, consumed=1)
    assert (before, budget.capacity()) == (0, 1)


@pytest.mark.parametrize(
    ("version", "consumed", "complaint"),
    [
        (4, None, "version 4 goes back from 5"),
        (5.5, None, "version must be an int of at least 0, got 5.5"),
        (6, -1, "consumed must be an int of at least 0, got -1"),
        (6, 1.5, "consumed must be an int of at least 0, got 1.5"),
    ],
)
def test_an_advance_that_makes_no_sense_changes_nothing(version: Any, consumed: Any, complaint: str) -> None:
    """Versions only grow, rollouts are counted in whole numbers, and a refused call leaves the budget as it was."""
    budget = StalenessBudget(batch_size=4, max_staleness=1, version=5)
    with pytest.raises(ValueError, match=complaint):
        budget.advance(version, consumed=consumed)
    assert (budget.version, budget.capacity()) == (5, 28)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"batch_size": 0}, "batch_size must be an int of at least 1, got 0"),
        ({"batch_size": True}, "batch_size must be an int of at least 1, got True"),
        ({"batch_size": 2.0}, "batch_size must be an int of at least 1, got 2.0"),
        ({"max_staleness": -1}, "max_staleness must be an int of at least 0, got -1"),
        ({"max_concurrent": 0}, "max_concurrent must be an int of at least 1, got 0"),
        ({"version": -1}, "version must be an int of at least 0, got -1"),
        ({"running": -1}, "running must be an int of at least 0, got -1"),
        ({"accepted": "3"}, "accepted must be an int of at least 0, got '3'"),
        ({"rejected": None}, "rejected must be an int of at least 0, got None"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, Any], complaint: str) -> None:
    """A size that could never work raises `ValueError` where it is written, naming it and its value."""
    with pytest.raises(ValueError, match=complaint):
        StalenessBudget(**{"batch_size": 1, "max_staleness": 0, **sizes})


def test_a_restored_version_is_a_version() -> None:
    """There is no version below 0 to take up."""
    with pytest.raises(ValueError, match="version must be an int of at least 0, got -1"):
        StalenessBudget(batch_size=1, max_staleness=0).restore(-1)


def test_no_ticket_is_given_out_beyond_the_capacity() -> None:
    """The last place is given, the next is refused with the numbers, and nothing is counted for it."""
    budget = StalenessBudget(batch_size=1, max_staleness=0)
    ticket = budget.admit()
    assert (ticket.version, ticket.evaluation, ticket.settled, budget.running) == (0, False, False, 1)
    with pytest.raises(NoCapacity, match="staleness capacity is 0 at version 0"):
        budget.admit()
    assert (budget.running, budget.submitted) == (1, 1)


def test_a_rejected_rollout_gives_its_place_back_and_an_accepted_one_keeps_it() -> None:
    """Accepted rollouts count against the bound until a version consumes them."""
    budget = StalenessBudget(batch_size=2, max_staleness=0)
    budget.admit().reject()
    after_rejection = budget.capacity()
    budget.admit().accept()
    assert (after_rejection, budget.capacity()) == (2, 1)
    assert (budget.running, budget.accepted, budget.rejected, budget.submitted) == (0, 1, 1, 2)


@pytest.mark.parametrize("verdict", ["accept", "reject"])
def test_saying_the_same_twice_settles_once(verdict: str) -> None:
    """A ticket that is settled again the same way changes nothing."""
    budget = StalenessBudget(batch_size=2, max_staleness=0)
    ticket = budget.admit()
    getattr(ticket, verdict)()
    getattr(ticket, verdict)()
    assert (budget.running, budget.submitted, ticket.settled) == (0, 1, True)


@pytest.mark.parametrize(
    ("first", "second", "told"), [("accept", "reject", "accepted"), ("reject", "accept", "rejected")]
)
def test_a_contradiction_is_an_error(first: str, second: str, told: str) -> None:
    """A ticket that was settled one way cannot be settled the other, and the budget keeps the first verdict."""
    budget = StalenessBudget(batch_size=2, max_staleness=0)
    ticket = budget.admit()
    getattr(ticket, first)()
    with pytest.raises(TicketSettled, match=f"ticket 1 was already {told}"):
        getattr(ticket, second)()
    assert (ticket.accepted, budget.running, budget.submitted) == (first == "accept", 0, 1)


def test_a_ticket_is_itself_and_numbered_from_one() -> None:
    """Tickets are told apart by number, and never equal each other."""
    budget = StalenessBudget(batch_size=2, max_staleness=0)
    first, second = budget.admit(), budget.admit()
    assert ([first.id, second.id], first == second) == ([1, 2], False)
    assert Ticket(1, 0) != Ticket(1, 0)


def test_an_unlimited_budget_is_never_used_up() -> None:
    """A fleet that nothing trains on has no bound, whatever was accepted."""
    budget = Unlimited()
    for _ in range(1000):
        budget.admit().accept()
    budget.admit()
    budget.advance(7)
    assert budget.capacity() > 10**9
    assert (budget.running, budget.accepted, budget.version) == (1, 1000, 7)
