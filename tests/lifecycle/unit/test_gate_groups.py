"""Groups at the gate, ten thousand who wait there, and that nobody is woken in vain."""

import anyio
import pytest

from lifecycle import OnStale, StalenessBudget, State, Ticket
from lifecycle.gate import _Sleeper

from .crowd import a_few_turns, until
from .workbench import Workbench, serving_cohort, workbench

pytestmark = pytest.mark.anyio


def _bench(places: int = 4, *, staleness: int = 0, state: State = State.RUNNING, **options: OnStale) -> Workbench:
    budget = StalenessBudget(batch_size=places, max_staleness=staleness, **options)  # type: ignore[arg-type]
    return workbench(cohort=serving_cohort(budget=budget), state=state)


class Queue:
    """Callers of several sizes, and the order in which they went through."""

    def __init__(self, bench: Workbench, tasks: anyio.abc.TaskGroup) -> None:
        self.bench, self.tasks = bench, tasks
        self.tickets: dict[str, Ticket] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}

    async def add(self, **sizes: int) -> None:
        """Let callers come, one after the other."""
        for name, size in sizes.items():
            self.tasks.start_soon(self._wait, name, size)
            await a_few_turns()

    async def _wait(self, name: str, size: int) -> None:
        with anyio.CancelScope() as self.scopes[name]:
            self.tickets[name] = await self.bench.gate.acquire(group_size=size)

    @property
    def through(self) -> list[str]:
        """Who went through, in the order of their tickets."""
        return sorted(self.tickets, key=lambda name: self.tickets[name].id)


async def test_a_group_waits_for_room_for_all_of_it_and_is_not_overtaken() -> None:
    """Small ones that would fit stay behind a big one that does not."""
    bench = _bench(4)
    async with anyio.create_task_group() as tasks:
        queue = Queue(bench, tasks)
        await queue.add(a=2, big=4, b=1, c=1)
        assert queue.through == ["a"]
        assert bench.gate.try_acquire() is None
        queue.tickets["a"].reject()
        await a_few_turns()
        assert queue.through == ["a", "big"]
        queue.tickets["big"].accept(1)
        await a_few_turns()
        assert (queue.through, bench.cohort.budget.capacity()) == (["a", "big", "b", "c"], 1)


async def test_a_group_that_leaves_lets_those_behind_it_go() -> None:
    """At once, with no other event."""
    bench = _bench(4)
    async with anyio.create_task_group() as tasks:
        queue = Queue(bench, tasks)
        await queue.add(a=2, big=4, b=1, c=1, d=1)
        queue.scopes["big"].cancel()
        await a_few_turns()
        assert queue.through == ["a", "b", "c"]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_group_larger_than_the_budget_is_refused_unless_it_is_evaluated(evaluation: bool) -> None:
    """It would wait for ever; outside the budget there is no bound."""
    bench = _bench(4, staleness=1)
    if evaluation:
        assert (await bench.gate.acquire(evaluation=True, group_size=9)).group_size == 9
        return
    with pytest.raises(ValueError, match="a group of 9 rollouts never fits: the budget holds 8 at once"):
        await bench.gate.acquire(group_size=9)


async def test_ten_thousand_callers_go_through_in_order_and_nobody_is_woken_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each returned ticket wakes one, a version as many as it makes room for; every caller is woken once."""
    woken: list[int] = []
    go = _Sleeper.go

    def counted(sleeper: _Sleeper) -> None:
        woken.append(1)
        go(sleeper)

    monkeypatch.setattr(_Sleeper, "go", counted)
    bench, count, places = _bench(100), 10_000, 100
    order: list[int] = []

    async def roll(number: int) -> None:
        ticket = await bench.gate.acquire()
        order.append(number)
        ticket.reject()

    held = [await bench.gate.acquire() for _ in range(places)]
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(roll, number)
        await until(lambda: bench.gate.waiting == count)
        arrived = list(bench.gate._rollouts._queue)
        assert woken == []
        held.pop().reject()
        assert len(woken) == 1
        for ticket in held:
            ticket.reject()
        assert len(woken) == places
    assert (len(woken), len(order), bench.gate.waiting) == (count, count, 0)
    assert [sleeper.ticket.id for sleeper in arrived if isinstance(sleeper, _Sleeper) and sleeper.ticket] == list(
        range(places + 1, places + 1 + count)
    )
    budget = bench.cohort.budget
    assert (budget.running, budget.rejected) == (0, places + count)


async def test_watchers_hear_of_every_change_until_they_leave() -> None:
    """Of state and version; where batches wait for older rollouts, of every ticket that comes back."""
    told: list[str] = []
    for on_stale, expected in ((OnStale.DROP, ["a", "b"]), (OnStale.WAIT, ["a", "b", "a", "b"])):
        told.clear()
        bench = _bench(4, on_stale=on_stale)
        ends = [bench.gate.watch(lambda: told.append("a")), bench.gate.watch(lambda: told.append("b"))]
        bench.move(State.SUSPENDED)
        bench.move(State.RUNNING)
        told.clear()
        (await bench.gate.acquire()).reject()
        bench.gate.wake()
        assert told == expected
        ends[0]()
        ends[0]()
        bench.gate.wake()
        assert told == [*expected, "b"]
