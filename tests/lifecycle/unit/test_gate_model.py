"""The gate against a model: callers of any size come, leave, and go through, whatever else happens meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from attrs import define
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lifecycle import StalenessBudget, State, Ticket
from lifecycle.errors import LifecycleClosed, LifecycleFaulted

from .test_staleness_model import examples
from .workbench import serving_cohort, workbench

OPEN = {State.RUNNING}
EVALUATING = {State.RUNNING, State.SUSPENDED}


@define(eq=False)
class Caller:
    """Somebody at the gate."""

    task: "asyncio.Task[Ticket]"
    size: int
    evaluation: bool


class GateModel(RuleBasedStateMachine):
    """Callers wait in a list; the model says who has a ticket after each step, and in which order they got it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.bench = workbench(cohort=serving_cohort(budget=StalenessBudget(batch_size=1, max_staleness=0)))
        self.queue: list[Caller] = []
        self.evaluating: list[Caller] = []
        self.out: list[Ticket] = []

    @initialize(batch=st.integers(1, 4), staleness=st.integers(0, 2), most=st.none() | st.integers(2, 6))
    def begin(self, batch: int, staleness: int, most: int | None) -> None:
        """Choose the sizes."""
        budget = StalenessBudget(batch_size=batch, max_staleness=staleness, max_concurrent=most)
        self.bench = workbench(cohort=serving_cohort(budget=budget))
        budget.consume(0)

    @property
    def budget(self) -> StalenessBudget:
        """The staleness budget."""
        return self.bench.cohort.budget

    def turn(self, action: Callable[[], Any] = lambda: None) -> Any:
        """Do something on the event loop, and let everything follow from it."""

        async def step() -> Any:
            result = action()
            for _ in range(4):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(step())

    @rule(size=st.integers(1, 5), evaluation=st.booleans())
    def come(self, size: int, evaluation: bool) -> None:
        """A caller comes to the gate."""
        size = min(size, self.budget.largest_group)
        task = self.turn(lambda: self.loop.create_task(self.bench.gate.acquire(evaluation=evaluation, group_size=size)))
        (self.evaluating if evaluation else self.queue).append(Caller(task, size, evaluation))

    @precondition(lambda self: self.queue or self.evaluating)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        """A caller is cancelled while it waits."""
        waiting = [*self.queue, *self.evaluating]
        caller = waiting[which % len(waiting)]
        self.turn(caller.task.cancel)
        assert caller.task.cancelled()
        (self.evaluating if caller.evaluation else self.queue).remove(caller)

    @rule(size=st.integers(1, 5))
    def come_and_be_cancelled_before_the_first_step(self, size: int) -> None:
        """A task that never begins takes nothing."""
        size = min(size, self.budget.largest_group)

        def come_and_go() -> "asyncio.Task[Ticket]":
            task = self.loop.create_task(self.bench.gate.acquire(group_size=size))
            task.cancel()
            return task

        assert self.turn(come_and_go).cancelled()

    @precondition(lambda self: self.out)
    @rule(which=st.integers(0, 99), share=st.integers(0, 5), strike=st.booleans())
    def come_back(self, which: int, share: int, strike: bool) -> None:
        """A ticket comes back; perhaps the first who waits is cancelled as it goes."""
        ticket = self.out.pop(which % len(self.out))
        struck = self.queue[0] if strike and self.queue else None

        def back() -> None:
            if members := min(share, ticket.group_size):
                ticket.accept(members)
            else:
                ticket.reject()
            if struck is not None:
                struck.task.cancel()

        self.turn(back)
        if struck is not None:
            assert struck.task.cancelled()
            self.queue.remove(struck)

    @rule(share=st.floats(0, 1), consumed=st.booleans())
    def publish(self, share: float, consumed: bool) -> None:
        """A version is published, or part of the buffer is dropped."""
        buffered = self.budget.max_unconsumed - self.budget.running - self._free
        count = round(share * buffered)

        def advance() -> None:
            if consumed:
                self.budget.consume(count)
                self.budget.advance(self.budget.version + 1)
            else:
                self.budget.discard(count)
            self.bench.gate.wake()

        self.turn(advance)

    @rule(state=st.sampled_from([State.RUNNING, State.SUSPENDED, State.PAUSED, State.UPDATING]))
    def move(self, state: State) -> None:
        """The state changes."""
        self.turn(lambda: self.bench.move(state))

    @rule(error=st.sampled_from([LifecycleFaulted("faulted"), LifecycleClosed("closed")]))
    def refuse(self, error: Exception) -> None:
        """Everybody who waits is told that it is in vain."""
        self.turn(lambda: self.bench.gate.refuse_waiters(error))  # type: ignore[arg-type]
        for caller in (*self.queue, *self.evaluating):
            assert caller.task.exception() is error
        self.queue.clear()
        self.evaluating.clear()

    @property
    def _free(self) -> int:
        budget = self.budget
        return (budget.max_staleness + 1 + budget.version) * budget.batch_size - budget.counted - budget.running

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        """Who went, and what is counted."""
        self.exactly_those_went_who_could_go_in_order()
        self.every_ticket_is_accounted_for()

    def exactly_those_went_who_could_go_in_order(self) -> None:
        """Whoever is first and fits has its ticket; whoever is behind one that does not fit has none."""
        for queue, can in ((self.queue, OPEN), (self.evaluating, EVALUATING)):
            done = [caller for caller in queue if caller.task.done()]
            assert done == queue[: len(done)]
            tickets = [caller.task.result() for caller in done]
            assert [abs(ticket.id) for ticket in tickets] == sorted(abs(ticket.id) for ticket in tickets)
            assert [ticket.group_size for ticket in tickets] == [caller.size for caller in done]
            assert not tickets or self.bench.state in can
            self.out += tickets
            del queue[: len(done)]
            assert all(not caller.task.done() for caller in queue)
        if self.queue and self.bench.state in OPEN:
            assert self.budget.capacity() < self.queue[0].size
        assert not (self.evaluating and self.bench.state in EVALUATING)
        assert self.bench.gate.waiting == len(self.queue) + len(self.evaluating)

    def every_ticket_is_accounted_for(self) -> None:
        """What runs is what is out, evaluations are outside, and the bound holds."""
        budget = self.budget
        rollouts = [ticket for ticket in self.out if not ticket.evaluation]
        assert budget.running == sum(ticket.group_size for ticket in rollouts)
        assert self.bench.gate.running == budget.running + len(self.out) - len(rollouts)
        assert budget.submitted == budget.running + budget.accepted + budget.rejected
        assert self._free >= 0
        assert budget.max_concurrent is None or budget.running <= budget.max_concurrent

    def teardown(self) -> None:
        """Everybody leaves."""
        for caller in (*self.queue, *self.evaluating):
            caller.task.cancel()
        self.turn()
        self.loop.close()


TestGateAgainstItsModel = GateModel.TestCase
TestGateAgainstItsModel.settings = settings(deadline=None, max_examples=examples(), stateful_step_count=30)
TestGateAgainstItsModel = pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")(TestGateAgainstItsModel)
