"""Rollouts: tickets within the budget, generation where it may go, staleness within the bound."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from lifecycle import events as e
from lifecycle.guards import submission_open
from lifecycle.staleness import Unlimited
from lifecycle.states import MeasuredFrom, OnStale, State, Trigger
from lifecycle.table import rows

from .known import Known


@frozen
class _Admitted:
    """A rollout, or a group, and the version at its admission."""

    version: int | None
    size: int


@frozen
class _Left:
    """What left the buffer."""

    staleness: int
    size: int


class Rollouts:
    """Replays admission, generation and consumption."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._out: dict[int, _Admitted] = {}
        """Every ticket that is out."""
        self._buffer: dict[int, _Admitted] = {}
        """Every accepted rollout, or group, that training has not taken."""
        self._last = {False: 0, True: 0}
        """The last ticket given out, of rollouts and of evaluations, which are numbered downwards."""
        self._flying: Counter[tuple[int, str]] = Counter()
        self.rules: Mapping[type[e.Event], Callable[[Any], None]] = {
            e.BudgetChanged: self._rebound,
            e.RolloutAdmitted: self._admitted,
            e.RolloutSettled: self._settled,
            e.RolloutConsumed: self._consumed,
            e.RolloutDiscarded: self._discarded,
            e.GenerationSent: self._sent,
            e.SegmentReceived: self._received,
        }

    def begin_anew(self) -> None:
        """Another lifecycle begins, with tickets of its own."""
        self._out.clear()
        self._buffer.clear()
        self._flying.clear()
        self._last = {False: 0, True: 0}

    def _rebound(self, event: e.BudgetChanged) -> None:
        budget = self._known.cohort.budget
        if isinstance(budget, Unlimited):
            self._known.breach("staleness", "a budget changes where there was none")
            return
        for name in ("batch_size", "max_staleness", "max_concurrent"):
            if getattr(event, name) != getattr(budget, name):
                setattr(budget, name, getattr(event, name))

    def _admitted(self, event: e.RolloutAdmitted) -> None:
        known, ticket = self._known, event.ticket
        if abs(ticket) <= abs(self._last[event.evaluation]) or event.evaluation is not (ticket < 0):
            known.breach("ticket-once", f"ticket {ticket} is given out after {self._last[event.evaluation]}")
        self._last[event.evaluation] = ticket
        self._out[ticket] = _Admitted(event.version, event.group_size)
        if event.evaluation:
            if known.state not in {State.RUNNING, State.SUSPENDED}:
                known.breach("admission", f"evaluation {ticket} is admitted in {known.state.name}")
            return
        if not (candidates := rows(Trigger.ADMIT, known.state)):
            known.breach("admission", f"rollout {ticket} is admitted in {known.state.name}")
        for guard in (submission_open, *(candidates[0].guards if candidates else ())):
            known.demand(guard, f"rollout {ticket} is admitted")
        budget = known.cohort.budget
        if event.group_size > max(1, capacity := budget.capacity()):
            known.breach("staleness-capacity", f"{event.group_size} rollouts are admitted where {capacity} fit")
        budget.running += event.group_size

    def _settled(self, event: e.RolloutSettled) -> None:
        known, ticket = self._known, event.ticket
        if ticket not in self._out:
            known.breach("ticket-once", f"ticket {ticket} comes back without being out")
            return
        admitted = self._out.pop(ticket)
        if event.admitted != admitted.version:
            known.breach(
                "staleness", f"ticket {ticket} was admitted at version {admitted.version}, not {event.admitted}"
            )
        members = int(event.accepted) if event.members is None else event.members
        if members > admitted.size or event.accepted is not (members > 0):
            known.breach("ticket-once", f"{members} rollouts of ticket {ticket}, which stands for {admitted.size}")
        if event.accepted:
            self._buffer[ticket] = _Admitted(admitted.version, members)
        if ticket > 0:
            budget = known.cohort.budget
            budget.running -= admitted.size
            budget.accepted += members
            budget.rejected += admitted.size - members

    def _consumed(self, event: e.RolloutConsumed) -> None:
        verdict, budget = self._known.verdict, self._known.cohort.budget
        left = self._leave_buffer(event)
        # Evaluations are outside the budget, and so outside its bound.
        if event.ticket > 0 and not isinstance(budget, Unlimited):
            budget.consume(left.size)
            staleness = left.staleness
            if budget.measured_from is MeasuredFrom.OLDEST_TOKEN and event.by_token is not None:
                staleness = min(staleness, event.by_token)
            # A policy that masks or keeps what is stale takes it; the others never do.
            if staleness > budget.max_staleness and budget.on_stale in {OnStale.DROP, OnStale.WAIT}:
                self._known.breach(
                    "staleness", f"rollout {event.ticket} is {staleness} versions old; {budget.max_staleness} allowed"
                )
        verdict.max_staleness_seen = max(verdict.max_staleness_seen, left.staleness)

    def _discarded(self, event: e.RolloutDiscarded) -> None:
        left = self._leave_buffer(event)
        if event.ticket > 0:
            self._known.cohort.budget.discard(left.size)

    def _leave_buffer(self, event: e.RolloutConsumed | e.RolloutDiscarded) -> "_Left":
        if event.ticket not in self._buffer:
            self._known.breach("ticket-once", f"rollout {event.ticket} leaves the buffer but was not in it")
            return _Left(0, 0)
        admitted = self._buffer.pop(event.ticket)
        staleness = (self._known.cohort.version or 0) - (admitted.version or 0)
        if staleness != event.staleness:
            self._known.breach(
                "staleness", f"rollout {event.ticket} is {staleness} versions old, not {event.staleness}"
            )
        return _Left(staleness, admitted.size)

    def _sent(self, event: e.GenerationSent) -> None:
        known, facts = self._known, self._known.cohort.fleet[event.engine]
        self._flying[event.ticket, event.engine] += 1
        if known.cohort.generation_held:
            known.breach("held", f"a generation goes to {event.engine} while generation is held")
        if not facts.serving or facts.dirty:
            known.breach("routing", f"a generation goes to {event.engine}, which does not serve")
        elif known.cohort.ledger.owed(event.engine) is not None:
            known.breach("routing", f"a generation goes to {event.engine}, whose pause is not matched")
        if event.ticket not in self._out:
            known.breach("admission", f"a generation for ticket {event.ticket}, which is not out")

    def _received(self, event: e.SegmentReceived) -> None:
        verdict, flight = self._known.verdict, (event.ticket, event.engine)
        if not self._flying[flight]:
            self._known.breach("one-segment-a-request", f"{event.engine} answers what ticket {event.ticket} never sent")
        self._flying[flight] -= 1
        if self._flying[flight] <= 0:
            del self._flying[flight]
        verdict.tokens += event.tokens
        verdict.interrupted += event.finish_reason == "abort"
