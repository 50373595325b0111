"""The ticket: settled once, whoever does it and however the one who holds it leaves."""

from typing import Any

import anyio
import pytest

from lifecycle import StalenessBudget, Ticket
from lifecycle import events as e
from lifecycle.errors import TicketSettled
from lifecycle.gate import Admission

from .workbench import Workbench, serving_cohort, workbench

pytestmark = pytest.mark.anyio


def _bench(places: int = 4) -> Workbench:
    return workbench(cohort=serving_cohort(budget=StalenessBudget(batch_size=places, max_staleness=0)))


def _admission(bench: Workbench, **options: Any) -> Admission:
    return Admission(bench.gate, lambda: None, **{"evaluation": False, "group_size": 1, **options})


@pytest.mark.parametrize(("members", "counts"), [(None, (0, 3, 0)), (3, (0, 3, 0)), (2, (0, 2, 1)), (1, (0, 1, 2))])
async def test_a_group_is_accepted_with_those_that_are_left(members: int | None, counts: tuple[int, int, int]) -> None:
    """The others count as rejected."""
    bench = _bench()
    async with _admission(bench, group_size=3) as ticket:
        ticket.accept(members)
    budget = bench.cohort.budget
    assert (budget.running, budget.accepted, budget.rejected) == counts
    assert [fact.members for fact in bench.told(e.RolloutSettled)] == [counts[1]]


@pytest.mark.parametrize("members", [0, 4, -1, 1.5, True])
def test_a_number_of_members_that_the_group_does_not_have_changes_nothing(members: Any) -> None:
    """It is refused, and the ticket is out still."""
    budget = StalenessBudget(batch_size=4, max_staleness=0)
    ticket = budget.admit(3)
    with pytest.raises(ValueError, match="members must be an int from 1 to 3"):
        ticket.accept(members)
    assert (ticket.settled, budget.running) == (False, 3)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2", None])
def test_a_group_of_a_size_that_makes_no_sense_is_not_admitted(size: Any) -> None:
    """However much room there is."""
    budget = StalenessBudget(batch_size=4, max_staleness=0)
    with pytest.raises(ValueError, match="group_size must be an int of at least 1"):
        budget.admit(size)
    assert budget.submitted == 0


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("size", [0, -2, 1.5])
async def test_the_gate_lets_no_group_through_of_a_size_that_makes_no_sense(size: Any, evaluation: bool) -> None:
    """Neither as a rollout nor as an evaluation."""
    bench = _bench()
    with pytest.raises(ValueError, match="group_size must be an int of at least 1"):
        await bench.gate.acquire(evaluation=evaluation, group_size=size)
    assert (bench.gate.running, bench.cohort.budget.submitted) == (0, 0)


@pytest.mark.parametrize("verdict", ["accept", "reject"])
async def test_a_held_ticket_keeps_its_capacity_until_its_fate_is_known(verdict: str) -> None:
    """Leaving `admit()` does not return it; whoever learns what became of it does."""
    bench = _bench()
    budget = bench.cohort.budget
    with anyio.CancelScope() as scope:
        async with _admission(bench) as ticket:
            ticket.hold()
            scope.cancel()
            await anyio.sleep_forever()
    assert (ticket.settled, budget.running, budget.submitted, budget.capacity()) == (False, 1, 1, 3)
    getattr(ticket, verdict)()
    getattr(ticket, verdict)()
    assert (budget.running, budget.accepted, budget.submitted) == (0, int(verdict == "accept"), 1)


async def test_a_task_cancelled_before_it_starts_takes_nothing() -> None:
    """Or gives it back: what was submitted is running, accepted or rejected."""
    bench = _bench()
    budget = bench.cohort.budget

    async def roll() -> None:
        async with _admission(bench):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(roll)
        tasks.cancel_scope.cancel()
    assert (budget.running, budget.accepted, budget.submitted) == (0, 0, budget.rejected)


async def test_a_subscriber_that_raises_after_accept_leaves_the_verdict() -> None:
    """The rollout is accepted, counted once, and the next in the queue goes."""
    bench = _bench(places=1)

    def broken(event: e.Event) -> None:
        raise ZeroDivisionError

    bench.recorder.subscribe(broken)
    async with _admission(bench) as ticket:
        ticket.accept()
    budget = bench.cohort.budget
    assert (ticket.accepted, budget.running, budget.accepted, budget.submitted) == (True, 0, 1, 1)


async def test_an_exception_after_accept_does_not_take_it_back() -> None:
    """Accepted is accepted."""
    bench = _bench()
    admission = _admission(bench)
    ticket = await admission.__aenter__()
    ticket.accept()
    await admission.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(TicketSettled, match="ticket 1 was already accepted"):
        ticket.reject()
    assert bench.cohort.budget.accepted == 1


def test_a_foreign_ticket_is_refused_and_ours_of_the_same_number_stays_out() -> None:
    """Numbers are a budget's own: the object counts."""
    ours, theirs = (StalenessBudget(batch_size=2, max_staleness=0) for _ in range(2))
    ticket, foreign = ours.admit(), theirs.admit()
    assert ticket.id == foreign.id
    with pytest.raises(ValueError, match="ticket 1 is not out: it is another budget's"):
        ours.settle(foreign, True)
    with pytest.raises(ValueError, match="ticket 1 is not out: it is another budget's"):
        ours.returned(foreign)
    ticket.accept()
    foreign.reject()
    assert ((ours.running, ours.accepted), (theirs.running, theirs.rejected)) == ((0, 1), (0, 1))


@pytest.mark.parametrize("verdict", [True, False])
def test_a_budget_settles_its_own_tickets(verdict: bool) -> None:
    """As the ticket itself does, and twice the same changes nothing."""
    budget = StalenessBudget(batch_size=2, max_staleness=0)
    ticket = budget.admit(2)
    budget.settle(ticket, verdict)
    budget.settle(ticket, verdict)
    with pytest.raises(TicketSettled):
        budget.settle(ticket, not verdict)
    assert (budget.running, budget.accepted, budget.rejected) == ((0, 2, 0) if verdict else (0, 0, 2))


def test_a_ticket_that_stands_alone_can_be_settled() -> None:
    """Nobody need be told."""
    ticket = Ticket(1, 0)
    ticket.accept()
    assert (ticket.accepted, ticket.members) == (True, 1)
