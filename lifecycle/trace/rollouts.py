"""Rollouts: tickets within the budget, generation where it may go, staleness within the bound."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from lifecycle import events as e
from lifecycle.guards import submission_open
from lifecycle.staleness import Unlimited
from lifecycle.states import State, Trigger
from lifecycle.table import rows

from .known import Known


class Rollouts:
    """Replays admission, generation and consumption."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._out: dict[int, int | None] = {}
        """Version at admission of every ticket that is out."""
        self._buffer: dict[int, int | None] = {}
        """The same of every accepted rollout that training has not taken."""
        self._last = {False: 0, True: 0}
        """The last ticket given out, of rollouts and of evaluations, which are numbered downwards."""
        self._flying: Counter[tuple[int, str]] = Counter()
        self.rules: Mapping[type[e.Event], Callable[[Any], None]] = {
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

    def _admitted(self, event: e.RolloutAdmitted) -> None:
        known, ticket = self._known, event.ticket
        if abs(ticket) <= abs(self._last[event.evaluation]) or event.evaluation is not (ticket < 0):
            known.breach("ticket-once", f"ticket {ticket} is given out after {self._last[event.evaluation]}")
        self._last[event.evaluation] = ticket
        self._out[ticket] = event.version
        if event.evaluation:
            if known.state not in {State.RUNNING, State.SUSPENDED}:
                known.breach("admission", f"evaluation {ticket} is admitted in {known.state.name}")
            return
        if not (candidates := rows(Trigger.ADMIT, known.state)):
            known.breach("admission", f"rollout {ticket} is admitted in {known.state.name}")
        for guard in (submission_open, *(candidates[0].guards if candidates else ())):
            known.demand(guard, f"rollout {ticket} is admitted")
        known.cohort.budget.running += 1

    def _settled(self, event: e.RolloutSettled) -> None:
        known, ticket = self._known, event.ticket
        if ticket not in self._out:
            known.breach("ticket-once", f"ticket {ticket} comes back without being out")
            return
        admitted = self._out.pop(ticket)
        if event.admitted != admitted:
            known.breach("staleness", f"ticket {ticket} was admitted at version {admitted}, not {event.admitted}")
        if event.accepted:
            self._buffer[ticket] = admitted
        if ticket > 0:
            budget = known.cohort.budget
            budget.running -= 1
            budget.accepted += event.accepted
            budget.rejected += not event.accepted

    def _consumed(self, event: e.RolloutConsumed) -> None:
        verdict, budget = self._known.verdict, self._known.cohort.budget
        staleness = self._leave_buffer(event)
        # Evaluations are outside the budget, and so outside its bound.
        if event.ticket > 0 and not isinstance(budget, Unlimited) and staleness > budget.max_staleness:
            self._known.breach(
                "staleness", f"rollout {event.ticket} is {staleness} versions old; {budget.max_staleness} allowed"
            )
        verdict.max_staleness_seen = max(verdict.max_staleness_seen, staleness)

    def _discarded(self, event: e.RolloutDiscarded) -> None:
        self._leave_buffer(event)
        if event.ticket > 0:
            budget = self._known.cohort.budget
            budget.advance(budget.version, consumed=1)

    def _leave_buffer(self, event: e.RolloutConsumed | e.RolloutDiscarded) -> int:
        if event.ticket not in self._buffer:
            self._known.breach("ticket-once", f"rollout {event.ticket} leaves the buffer but was not in it")
            return 0
        staleness = (self._known.cohort.version or 0) - (self._buffer.pop(event.ticket) or 0)
        if staleness != event.staleness:
            self._known.breach(
                "staleness", f"rollout {event.ticket} is {staleness} versions old, not {event.staleness}"
            )
        return staleness

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
