"""The submission gate: who may start a rollout, and in what order."""

import asyncio

import anyio
import pytest

from lifecycle import StalenessBudget, State
from lifecycle import events as e

from .crowd import Crowd, a_few_turns, until
from .workbench import Workbench, serving_cohort, workbench

pytestmark = pytest.mark.anyio


def _bench(places: int = 1, state: State = State.RUNNING) -> Workbench:
    return workbench(cohort=serving_cohort(budget=StalenessBudget(batch_size=places, max_staleness=0)), state=state)


async def test_an_open_gate_with_room_lets_through_at_once() -> None:
    """Uncontended, a ticket carries the published version and is told to the world."""
    bench = workbench(
        cohort=serving_cohort(version=3, budget=StalenessBudget(batch_size=2, max_staleness=0, version=3))
    )
    ticket = await bench.gate.acquire()
    assert (ticket.version, ticket.evaluation, bench.gate.running, bench.gate.waiting) == (3, False, 1, 0)
    [admitted] = bench.told(e.RolloutAdmitted)
    assert (admitted.ticket, admitted.evaluation, admitted.version) == (ticket.id, False, 3)


async def test_waiters_go_through_first_come_first_served() -> None:
    """Each ticket that comes back lets through the one who has waited longest, and only that one."""
    bench = _bench()
    first = await bench.gate.acquire()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a", "b", "c")
        first.reject()
        await a_few_turns()
        assert crowd.through == ["a"]
        crowd.tickets["a"].reject()
        await a_few_turns()
        assert crowd.through == ["a", "b"]
        crowd.tickets["b"].reject()
        await until(lambda: crowd.through == ["a", "b", "c"])


@pytest.mark.parametrize("places", [1, 2, 3])
async def test_exactly_as_many_go_through_as_there_are_places(places: int) -> None:
    """A published version wakes one waiter a place, at once, and leaves the others asleep."""
    bench = _bench(places)
    for _ in range(places):
        (await bench.gate.acquire()).accept()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a", "b", "c", "d")
        bench.cohort.budget.advance(1)
        bench.gate.wake()
        await a_few_turns()
        assert (sorted(crowd.through), bench.gate.waiting, bench.cohort.budget.running) == (
            ["a", "b", "c", "d"][:places], 4 - places, places,
        )  # fmt: skip
        bench.gate.wake()
        await a_few_turns()
        assert len(crowd.through) == places
        tasks.cancel_scope.cancel()


async def test_nobody_overtakes_those_who_wait() -> None:
    """A newcomer queues behind them even where there is room: a budget may be widened while callers wait."""
    bench = _bench()
    (await bench.gate.acquire()).accept()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a")
        bench.cohort.budget.batch_size = 2
        await crowd.add("b")
        bench.gate.wake()
        await until(lambda: crowd.through == ["a"])
        crowd.tickets["a"].reject()
        await until(lambda: crowd.through == ["a", "b"])


@pytest.mark.parametrize("state", [State.SUSPENDED, State.PAUSED, State.UPDATING])
async def test_the_gate_opens_with_running(state: State) -> None:
    """Callers wait in every state between, and go through when submission opens again."""
    bench = _bench(state=state)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a")
        bench.gate.wake()
        await a_few_turns()
        assert crowd.through == []
        bench.move(State.RUNNING)
        await until(lambda: crowd.through == ["a"])


async def test_a_closed_gate_in_running_lets_nobody_through() -> None:
    """While SUSPEND is under way the state is still RUNNING, and submission is already closed."""
    bench = _bench()
    bench.move(State.RUNNING, submission_open=False)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a")
        await a_few_turns()
        assert crowd.through == []
        tasks.cancel_scope.cancel()


async def test_a_caller_cancelled_while_it_waits_gives_its_place_to_the_next() -> None:
    """Whoever gave up is passed over, and no ticket is made for it."""
    bench = _bench()
    first = await bench.gate.acquire()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a", "b")
        crowd.scopes["a"].cancel()
        await a_few_turns()
        assert bench.gate.waiting == 1
        first.reject()
        await until(lambda: crowd.through == ["b"])
    assert (bench.cohort.budget.submitted, bench.cohort.budget.running) == (2, 1)


async def test_a_cancellation_that_meets_a_ticket_on_its_way_leaks_no_place() -> None:
    """Whether the caller still got its ticket or not: what is counted as running is held by somebody."""
    bench = _bench()
    first = await bench.gate.acquire()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a", "b")
        first.reject()
        crowd.scopes["a"].cancel()
        await until(lambda: bool(crowd.through))
        await a_few_turns()
        assert bench.cohort.budget.running == len(crowd.through)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_ticket_given_to_a_task_that_asyncio_cancels_goes_back() -> None:
    """`Task.cancel()` may strike between the ticket and its receiver; the next caller gets the place."""
    bench = _bench()
    first = await bench.gate.acquire()
    struck, following = (asyncio.create_task(bench.gate.acquire()) for _ in range(2))
    await until(lambda: bench.gate.waiting == 2)
    first.reject()
    struck.cancel()
    with anyio.fail_after(5):
        ticket = await following
    assert (struck.cancelled(), ticket.settled, bench.cohort.budget.running, bench.cohort.budget.rejected) == (
        True, False, 1, 2,
    )  # fmt: skip
