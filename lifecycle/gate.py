"""The submission gate: whether, and in what order, new rollouts may start.

First come, first served. Uncontended it is a comparison and a counter; contended, each waiter has an event of its own,
so that a publication or a returned ticket wakes exactly those that can go.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
from attrs import define, field

from . import events as e
from .cohort import Cohort
from .errors import LifecycleClosed, LifecycleError, LifecycleFaulted
from .recorder import Recorder
from .staleness import Ticket
from .states import State


@define(eq=False)
class _Waiter:
    """Somebody at the gate."""

    event: anyio.Event = field(factory=anyio.Event)
    ticket: Ticket | None = None
    error: LifecycleError | None = None
    gone: bool = False


class SubmissionGate:
    """Gives out tickets in RUNNING, and outside the budget also in SUSPENDED."""

    def __init__(self, cohort: Cohort, recorder: Recorder, state: Callable[[], State]) -> None:
        self._cohort = cohort
        self._recorder = recorder
        self._state = state
        self._waiting: deque[_Waiter] = deque()
        self._evaluations: deque[_Waiter] = deque()
        self._outside: set[int] = set()
        self._idle: list[anyio.Event] = []
        self._next_evaluation = 0

    @property
    def running(self) -> int:
        """Rollouts that hold a ticket, evaluations included."""
        return self._cohort.budget.running + len(self._outside)

    @property
    def waiting(self) -> int:
        """Callers at the gate."""
        return sum(not w.gone for w in (*self._waiting, *self._evaluations))

    async def acquire(self, *, evaluation: bool = False) -> Ticket:
        """Wait for a ticket.

        Raises `LifecycleFaulted` or `LifecycleClosed` where waiting would be in vain.

        Cancellation: no ticket is held; one that was just given out goes back.
        """
        queue = self._evaluations if evaluation else self._waiting
        if not queue and self._passable(evaluation=evaluation):
            return self._issue(evaluation=evaluation)
        if (error := hopeless(self._state())) is not None:
            raise error
        waiter = _Waiter()
        queue.append(waiter)
        try:
            await waiter.event.wait()
        except BaseException:
            waiter.gone = True
            if waiter.ticket is not None:
                waiter.ticket.reject()
            raise
        if waiter.ticket is None:
            raise waiter.error or LifecycleClosed("the lifecycle was closed while a rollout waited to start")
        return waiter.ticket

    def wake(self) -> None:
        """Let through whoever can go now. Called after every change of state, version or capacity."""
        for queue, evaluation in ((self._evaluations, True), (self._waiting, False)):
            while queue and (queue[0].gone or self._passable(evaluation=evaluation)):
                waiter = queue.popleft()
                if not waiter.gone:
                    waiter.ticket = self._issue(evaluation=evaluation)
                    waiter.event.set()

    def refuse_waiters(self, error: LifecycleError) -> None:
        """Give everybody at the gate `error`."""
        for queue in (self._waiting, self._evaluations):
            while queue:
                waiter = queue.popleft()
                waiter.error = error
                waiter.event.set()

    def consume(self, tickets: tuple[Ticket, ...]) -> tuple[int, ...]:
        """Record that training takes these accepted rollouts. Returns the staleness of each, in versions."""
        return self._leave_buffer(e.RolloutConsumed, tickets)

    def discard(self, tickets: tuple[Ticket, ...]) -> tuple[int, ...]:
        """Record that these accepted rollouts are dropped, and free their capacity. Returns the staleness of each."""
        staleness = self._leave_buffer(e.RolloutDiscarded, tickets)
        budget = self._cohort.budget
        budget.advance(budget.version, consumed=sum(not ticket.evaluation for ticket in tickets))
        self.wake()
        return staleness

    async def drained(self) -> None:
        """Wait until no rollout holds a ticket.

        Cancellation: nothing is changed.
        """
        while self.running:
            event = anyio.Event()
            self._idle.append(event)
            try:
                await event.wait()
            finally:
                if event in self._idle:
                    self._idle.remove(event)

    def _leave_buffer(
        self, kind: type[e.RolloutConsumed | e.RolloutDiscarded], tickets: tuple[Ticket, ...]
    ) -> tuple[int, ...]:
        if odd := [ticket.id for ticket in tickets if not ticket.accepted]:
            raise ValueError(f"tickets {odd[:5]} were not accepted")
        if len({id(ticket) for ticket in tickets}) < len(tickets) or any(ticket.left_buffer for ticket in tickets):
            raise ValueError("a ticket leaves the buffer once: it was consumed or discarded before, or is given twice")
        version = self._cohort.version or 0
        staleness = tuple(version - (ticket.version or 0) for ticket in tickets)
        for ticket, versions in zip(tickets, staleness, strict=True):
            ticket.left_buffer = True
            self._recorder.emit(kind, ticket=ticket.id, staleness=versions)
        return staleness

    def _passable(self, *, evaluation: bool) -> bool:
        if evaluation:
            return self._state() in {State.RUNNING, State.SUSPENDED}
        return self._state() is State.RUNNING and self._cohort.submission_open and self._cohort.budget.capacity() >= 1

    def _issue(self, *, evaluation: bool) -> Ticket:
        if evaluation:
            # Numbered downwards, so that evaluations never share a number with rollouts of the budget.
            self._next_evaluation -= 1
            ticket = Ticket(self._next_evaluation, self._cohort.version, evaluation=True, settle=self._returned)
            self._outside.add(ticket.id)
        else:
            ticket = self._cohort.budget.issue(self._returned, version=self._cohort.version)
        self._recorder.emit(e.RolloutAdmitted, ticket=ticket.id, evaluation=evaluation)
        return ticket

    def _returned(self, ticket: Ticket, accepted: bool) -> None:
        if ticket.evaluation:
            self._outside.discard(ticket.id)
        else:
            self._cohort.budget.settle(ticket, accepted)
        self._recorder.emit(
            e.RolloutSettled,
            ticket=ticket.id,
            accepted=accepted,
            admitted=ticket.version,
            evaluation=ticket.evaluation,
        )
        if not self.running:
            for event in self._idle:
                event.set()
            self._idle.clear()
        self.wake()


class Admission:
    """`async with lifecycle.admit() as ticket`: wait for a ticket, and see to it that it goes back."""

    def __init__(self, gate: SubmissionGate, refuse_elsewhere: Callable[[], None], *, evaluation: bool) -> None:
        self._gate = gate
        self._refuse_elsewhere = refuse_elsewhere
        self._evaluation = evaluation
        self._ticket: Ticket | None = None

    async def __aenter__(self) -> Ticket:
        self._refuse_elsewhere()
        self._ticket = await self._gate.acquire(evaluation=self._evaluation)
        return self._ticket

    async def __aexit__(self, *_: Any) -> None:
        if self._ticket is not None and not self._ticket.settled:
            self._ticket.reject()


def hopeless(state: State) -> LifecycleError | None:
    """Return the error for callers who would wait in vain in `state`."""
    if state is State.FAULTED:
        return LifecycleFaulted("too few engines are left; recover() is the way out")
    if state is State.CLOSED:
        return LifecycleClosed("the lifecycle is closed")
    return None
