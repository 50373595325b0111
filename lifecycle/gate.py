"""The submission gate: whether, and in what order, new rollouts may start.

First come, first served, by a turnstile: a publication or a returned ticket wakes exactly those that can go.
"""

import threading
from collections.abc import Callable
from typing import Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from attrs import define, field

from . import events as e
from .checks import whole
from .cohort import Cohort
from .errors import LifecycleClosed, LifecycleError, LifecycleFaulted, WrongEventLoop
from .recorder import Recorder
from .states import MeasuredFrom, OnStale, State
from .ticket import Ticket
from .turnstile import Turnstile, Waiter


@define(eq=False)
class _Sleeper:
    """A task that waits for a ticket."""

    size: int
    issue: Callable[[], Ticket]
    event: anyio.Event = field(factory=anyio.Event)
    ticket: Ticket | None = None
    error: LifecycleError | None = None

    def go(self) -> None:
        self.ticket = self.issue()
        self.event.set()

    def refuse(self, error: LifecycleError) -> None:
        self.error = error
        self.event.set()


class SubmissionGate:
    """Gives out tickets in RUNNING, and outside the budget also in SUSPENDED."""

    def __init__(self, cohort: Cohort, recorder: Recorder, state: Callable[[], State]) -> None:
        self._cohort = cohort
        self._budget = cohort.budget
        self._recorder = recorder
        self._state = state
        self._rollouts = Turnstile(self._has_room)
        self._evaluations = Turnstile(self._evaluates)
        self._outside: set[int] = set()
        self._idle: list[anyio.Event] = []
        self._next_evaluation = 0
        self._budget.rebound = self._rebound
        self._thread = 0
        """Of the event loop that tickets are given out in."""
        self._watchers: tuple[Callable[[], None], ...] = ()

    @property
    def running(self) -> int:
        """Rollouts that hold a ticket, evaluations included."""
        return self._budget.running + len(self._outside)

    @property
    def waiting(self) -> int:
        """Callers at the gate."""
        return len(self._rollouts) + len(self._evaluations)

    async def acquire(self, *, evaluation: bool = False, group_size: int = 1) -> Ticket:
        """Wait for a ticket.

        Raises `LifecycleFaulted` or `LifecycleClosed` where waiting would be in vain, and `ValueError` for a group that
        can never fit.

        Cancellation: no ticket is held; one that was just given out goes back.
        """
        turnstile = self._evaluations if evaluation else self._rollouts
        if turnstile.may_pass(group_size):
            return self._issue(evaluation, group_size)
        self.refuse_what_never_fits(group_size, evaluation=evaluation)
        if (error := hopeless(self._state())) is not None:
            raise error
        sleeper = _Sleeper(group_size, lambda: self._issue(evaluation, group_size))
        turnstile.join(sleeper)
        try:
            await sleeper.event.wait()
        except BaseException:
            turnstile.leave(sleeper)
            if sleeper.ticket is not None:
                sleeper.ticket.reject()
            raise
        if sleeper.ticket is None:
            await checkpoint_if_cancelled()  # who is cancelled, too, gets the cancellation
            raise sleeper.error or LifecycleClosed("the lifecycle was closed while a rollout waited to start")
        return sleeper.ticket

    def try_acquire(self, *, group_size: int = 1) -> Ticket | None:
        """Return a ticket if one is free and nobody waits for it, else `None`."""
        return self._issue(False, group_size) if self._rollouts.may_pass(group_size) else None

    def issue(self, group_size: int = 1) -> Ticket:
        """Give a ticket to the waiter whose turn it is: to be called from its `go()` alone."""
        return self._issue(False, group_size)

    def join(self, waiter: Waiter) -> None:
        """Put a waiter into the queue for rollouts. Its turn is told by `go()`, in vain by `refuse()`."""
        self._rollouts.join(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Take a waiter out of the queue. Idempotent."""
        self._rollouts.leave(waiter)

    def refuse_what_never_fits(self, group_size: int, *, evaluation: bool = False) -> None:
        """Raise `ValueError` for a group that is larger than the budget, empty as that may become."""
        whole("group_size", group_size, 1)
        if not evaluation and group_size > (largest := self._budget.largest_group):
            raise ValueError(f"a group of {group_size} rollouts never fits: the budget holds {largest} at once")

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` after every change of state, version or capacity. Returns what ends that."""
        self._watchers = (*self._watchers, changed)

        def unwatch() -> None:
            self._watchers = tuple(other for other in self._watchers if other != changed)

        return unwatch

    def wake(self) -> None:
        """Let through whoever can go now. Called after every change of state, version or capacity."""
        self._evaluations.wake()
        self._rollouts.wake()
        self._tell()

    def refuse_waiters(self, error: LifecycleError) -> None:
        """Give everybody at the gate `error`."""
        self._rollouts.refuse(error)
        self._evaluations.refuse(error)

    def consume(self, tickets: tuple[Ticket, ...]) -> tuple[int, ...]:
        """Record that training takes these accepted rollouts. Returns the staleness of each, in versions."""
        staleness = self._leave_buffer(e.RolloutConsumed, tickets)
        self._budget.consume(sum(ticket.members for ticket in tickets if not ticket.evaluation))
        return staleness

    def discard(self, tickets: tuple[Ticket, ...]) -> tuple[int, ...]:
        """Record that these accepted rollouts are dropped, and free their capacity. Returns the staleness of each."""
        staleness = self._leave_buffer(e.RolloutDiscarded, tickets)
        self._budget.discard(sum(ticket.members for ticket in tickets if not ticket.evaluation))
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

    def _tell(self) -> None:
        for changed in self._watchers:
            changed()

    def _leave_buffer(
        self, kind: type[e.RolloutConsumed | e.RolloutDiscarded], tickets: tuple[Ticket, ...]
    ) -> tuple[int, ...]:
        if foreign := [ticket.id for ticket in tickets if not ticket.is_of(self._returned)]:
            raise ValueError(f"tickets {foreign[:5]} were given out by somebody else")
        if odd := [ticket.id for ticket in tickets if not ticket.accepted]:
            raise ValueError(f"tickets {odd[:5]} were not accepted")
        if len({id(ticket) for ticket in tickets}) < len(tickets) or any(ticket.left_buffer for ticket in tickets):
            raise ValueError("a ticket leaves the buffer once: it was consumed or discarded before, or is given twice")
        by_token = self._budget.measured_from is MeasuredFrom.OLDEST_TOKEN
        return tuple(self._left_buffer(kind, ticket, by_token=by_token) for ticket in tickets)

    def _left_buffer(
        self, kind: type[e.RolloutConsumed | e.RolloutDiscarded], ticket: Ticket, *, by_token: bool
    ) -> int:
        ticket.left_buffer = True
        since_admission = (self._cohort.version or 0) - (ticket.version or 0)
        since_token = self._budget.staleness(ticket) if by_token else None
        self._recorder.note(kind, ticket=ticket.id, staleness=since_admission, by_token=since_token)
        return since_admission if since_token is None else since_token

    def _rebound(self) -> None:
        if self._state() is State.CLOSED:
            return  # the bounds are told when it opens
        budget = self._budget
        self._recorder.note(
            e.BudgetChanged,
            batch_size=budget.batch_size,
            max_staleness=budget.max_staleness,
            max_concurrent=budget.max_concurrent,
        )
        self.wake()

    def _has_room(self, size: int) -> bool:
        return self._budget.capacity() >= size and self._state() is State.RUNNING and self._cohort.submission_open

    def _evaluates(self, _: int) -> bool:
        return self._state() in {State.RUNNING, State.SUSPENDED}

    def _issue(self, evaluation: bool, group_size: int) -> Ticket:
        self._thread = threading.get_ident()
        if evaluation:
            whole("group_size", group_size, 1)
            # Numbered downwards, so that evaluations never share a number with rollouts of the budget.
            self._next_evaluation -= 1
            ticket = Ticket(self._next_evaluation, self._cohort.version, True, group_size, self._returned)
            self._outside.add(ticket.id)
        else:
            ticket = self._budget.issue(self._returned, version=self._cohort.version, group_size=group_size)
        if self._recorder.heard:
            self._recorder.emit(e.RolloutAdmitted, ticket=ticket.id, evaluation=evaluation, group_size=group_size)
        return ticket

    def _returned(self, ticket: Ticket) -> None:
        if threading.get_ident() != self._thread:
            raise WrongEventLoop(
                f"ticket {ticket.id} belongs to another thread's event loop: settle it there, for instance by "
                "anyio.from_thread.run_sync(ticket.accept)"
            )
        if ticket.evaluation:
            self._outside.discard(ticket.id)
        else:
            self._budget.returned(ticket)
        self._recorder.note(
            e.RolloutSettled,
            ticket=ticket.id,
            accepted=bool(ticket.accepted),
            admitted=ticket.version,
            evaluation=ticket.evaluation,
            members=ticket.members,
        )
        if self._idle and not self.running:
            for event in self._idle:
                event.set()
            self._idle.clear()
        if self._rollouts:
            self._rollouts.wake()
        if self._budget.on_stale is OnStale.WAIT:  # whoever waits for older rollouts: one fewer runs
            self._tell()


class Admission:
    """`async with lifecycle.admit() as ticket`: wait for a ticket, and see to it that it goes back."""

    __slots__ = ("_evaluation", "_gate", "_group_size", "_refuse_elsewhere", "_ticket")

    def __init__(
        self, gate: SubmissionGate, refuse_elsewhere: Callable[[], None], evaluation: bool, group_size: int
    ) -> None:
        self._gate = gate
        self._refuse_elsewhere = refuse_elsewhere
        self._evaluation = evaluation
        self._group_size = group_size
        self._ticket: Ticket | None = None

    async def __aenter__(self) -> Ticket:
        self._refuse_elsewhere()
        self._ticket = await self._gate.acquire(evaluation=self._evaluation, group_size=self._group_size)
        return self._ticket

    async def __aexit__(self, *_: Any) -> None:
        if self._ticket is not None and not self._ticket.settled and not self._ticket.held:
            self._ticket.reject()


def hopeless(state: State) -> LifecycleError | None:
    """Return the error for callers who would wait in vain in `state`."""
    if state is State.FAULTED:
        return LifecycleFaulted("too few engines are left; recover() is the way out once enough answer again")
    if state is State.CLOSED:
        return LifecycleClosed("the lifecycle is closed")
    return None
