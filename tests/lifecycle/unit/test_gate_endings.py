"""Evaluations at the gate, waiting in vain, draining, and leaving an admission."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from lifecycle import StalenessBudget, State, Ticket
from lifecycle import events as e
from lifecycle.errors import LifecycleClosed, LifecycleError, LifecycleFaulted
from lifecycle.gate import Admission

from .crowd import Crowd, a_few_turns, until
from .workbench import Workbench, serving_cohort, workbench

pytestmark = pytest.mark.anyio


def _bench(places: int = 1, state: State = State.RUNNING) -> Workbench:
    return workbench(cohort=serving_cohort(budget=StalenessBudget(batch_size=places, max_staleness=0)), state=state)


async def test_evaluations_go_through_when_suspended_and_outside_the_budget() -> None:
    """An evaluation needs no capacity and takes none; its number is none of the budget's."""
    bench = _bench()
    rollout = await bench.gate.acquire()
    bench.move(State.SUSPENDED)
    evaluation = await bench.gate.acquire(evaluation=True)
    assert (evaluation.evaluation, evaluation.id < 0, rollout.id > 0) == (True, True, True)
    assert (bench.cohort.budget.running, bench.gate.running) == (1, 2)
    evaluation.accept()
    assert (bench.cohort.budget.accepted, bench.gate.running) == (0, 1)
    assert [(f.ticket, f.evaluation, f.accepted) for f in bench.told(e.RolloutSettled)] == [(evaluation.id, True, True)]


async def test_evaluations_wait_while_generation_is_stopped_and_pass_rollouts_that_wait() -> None:
    """In PAUSED nobody starts; in SUSPENDED evaluations do, whatever waits for RUNNING."""
    bench = _bench(state=State.PAUSED)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("rollout")
        await crowd.add("evaluation", evaluation=True)
        bench.move(State.SUSPENDED)
        await until(lambda: crowd.through == ["evaluation"])
        bench.move(State.RUNNING)
        await until(lambda: crowd.through == ["evaluation", "rollout"])


@pytest.mark.parametrize(("state", "error"), [(State.FAULTED, LifecycleFaulted), (State.CLOSED, LifecycleClosed)])
@pytest.mark.parametrize("evaluation", [True, False])
async def test_whoever_would_wait_in_vain_is_told_so(
    state: State, error: type[LifecycleError], evaluation: bool
) -> None:
    """A faulted or closed lifecycle gives its error instead of a wait."""
    bench = _bench(state=state)
    with pytest.raises(error):
        await bench.gate.acquire(evaluation=evaluation)
    assert bench.gate.waiting == 0


async def test_everybody_at_the_gate_gets_the_error() -> None:
    """A fault reaches those who wait already, rollouts and evaluations, and leaves nobody there."""
    bench = _bench(state=State.PAUSED)
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a", "b")
        await crowd.add("c", evaluation=True)
        fault = LifecycleFaulted("too few engines are left")
        bench.gate.refuse_waiters(fault)
        await until(lambda: len(crowd.errors) == 3)
    assert crowd.errors == {"a": fault, "b": fault, "c": fault}
    assert (bench.gate.waiting, bench.gate.running) == (0, 0)


async def test_drained_returns_when_the_last_ticket_is_back() -> None:
    """It waits for rollouts and evaluations, and returns at once where there are none."""
    bench = _bench(places=2)
    await bench.gate.drained()
    rollout, evaluation = await bench.gate.acquire(), await bench.gate.acquire(evaluation=True)
    done: list[bool] = []

    async def drain() -> None:
        await bench.gate.drained()
        done.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        tasks.start_soon(drain)
        await a_few_turns()
        rollout.accept()
        await a_few_turns()
        assert done == []
        evaluation.reject()
        await until(lambda: done == [True, True])


async def test_a_drain_that_is_cancelled_leaves_nothing_behind() -> None:
    """Whoever gives up waiting is forgotten."""
    bench = _bench()
    await bench.gate.acquire()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await bench.gate.drained()
    assert (scope.cancelled_caught, bench.gate._idle) == (True, [])


async def _leave_without_a_word(_: Ticket) -> None:
    """Return normally, the ticket unsettled."""


async def _accept(ticket: Ticket) -> None:
    ticket.accept()


async def _fail(_: Ticket) -> None:
    raise ArithmeticError


@pytest.mark.parametrize(
    ("body", "accepted"), [(_leave_without_a_word, 0), (_accept, 1), (_fail, 0)], ids=["silent", "accepted", "raised"]
)
async def test_leaving_an_admission_settles_its_ticket(
    body: Callable[[Ticket], Awaitable[None]], accepted: int
) -> None:
    """Leaving `admit()` rejects a ticket that was not accepted, by whatever way one leaves."""
    bench = _bench()
    try:
        async with Admission(bench.gate, lambda: None, False, 1) as ticket:
            await body(ticket)
    except ArithmeticError:
        pass
    budget = bench.cohort.budget
    assert (budget.running, budget.accepted, budget.submitted, ticket.settled) == (0, accepted, 1, True)


async def test_a_subscriber_may_settle_a_ticket_while_it_is_given_out() -> None:
    """Settling from within an event wakes the next in the same order, and loses nobody."""
    bench = _bench()
    first = await bench.gate.acquire()
    async with anyio.create_task_group() as tasks:
        crowd = Crowd(bench, tasks)
        await crowd.add("a", "b", "c")
        bench.recorder.subscribe(lambda event: first.reject() if isinstance(event, e.SubmissionResumed) else None)
        bench.recorder.emit(e.SubmissionResumed)
        await until(lambda: crowd.through == ["a"])
        tasks.cancel_scope.cancel()
    numbers = [event.seq for event in bench.events]
    assert numbers == sorted(numbers)
