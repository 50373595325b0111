"""The machine: the transition table on `transitions.Machine`. Synchronous and atomic; there is no await in it.

An attempt is begun (guards), its requests are performed elsewhere, and it is committed (proofs, then the state) or
rolled back. `transitions` holds the graph and moves the state; it is used through this module only, because its
surprises are known by experiment for 0.9.3: the asynchronous machine swallows cancellations, and a definition is
checked only when it fires. Hence the plain machine, a table validated at import, and a model it never sees as its own.
"""

import logging
from functools import cache
from typing import Any

from attrs import define, frozen
from transitions import EventData, Machine

from .cohort import Cohort, Intent
from .errors import Busy, IllegalTransition, TransitionRefused
from .fleet import Fleet
from .guards import Condition
from .states import State, Trigger
from .table import TRANSITIONS, Transition, rows

# It tells at INFO of every step what our own events tell; a level that somebody has set stands.
if (_chatter := logging.getLogger("transitions")).level == logging.NOTSET:
    _chatter.setLevel(logging.WARNING)


@define(slots=True)
class _Model:
    """What `transitions` moves."""

    state: State


@frozen(kw_only=True)
class Attempt:
    """A trigger whose guards passed and whose proofs are still to come."""

    trigger: Trigger
    source: State
    rows: tuple[Transition, ...]
    """In the order in which their proofs are tried."""
    intent: Intent

    @property
    def row(self) -> Transition:
        """The row whose requests are performed first."""
        return self.rows[0]


class LifecycleMachine:
    """Where the cohort is, and what is being attempted. Decides; performs nothing."""

    def __init__(self, cohort: Cohort | None = None, *, state: State = State.CLOSED) -> None:
        self.cohort = cohort if cohort is not None else Cohort(fleet=Fleet(()))
        self._model = _Model(state)
        self._graph = _graph()
        self._attempt: Attempt | None = None

    @property
    def state(self) -> State:
        """What is proven."""
        return self._model.state

    @property
    def in_flight(self) -> Trigger | None:
        """What is being attempted."""
        return self._attempt.trigger if self._attempt else None

    @property
    def allowed(self) -> tuple[Trigger, ...]:
        """The triggers that can be asked for in this state, whatever their guards say. FAULT is not asked for."""
        return tuple(trigger for trigger in Trigger if trigger is not Trigger.FAULT and rows(trigger, self.state))

    def can(self, trigger: Trigger, intent: Intent | None = None) -> bool:
        """Whether `trigger` could begin now. Changes nothing and never raises."""
        return self.why_not(trigger, intent) is None

    def why_not(self, trigger: Trigger, intent: Intent | None = None) -> str | None:
        """Return why `trigger` could not begin now, or `None` if it could. Changes nothing and never raises."""
        intent = intent or Intent()
        candidates = rows(trigger, self.state, resume=intent.resume)
        if not candidates:
            return str(IllegalTransition(trigger, self.state, self.allowed))
        refused = self._first_refusal(candidates[0].guards, intent)
        return refused[1] if refused else None

    def begin(self, trigger: Trigger, intent: Intent | None = None) -> Attempt:
        """Check the guards and set `in_flight`.

        Raises `Busy` while another attempt is in flight, `IllegalTransition` where the table has no such row, and
        `TransitionRefused` with the reason of the guard that refused. CLOSE and FAULT replace an attempt in flight:
        they are the end of it.
        """
        intent = intent or Intent()
        if self._attempt is not None and trigger not in {Trigger.CLOSE, Trigger.FAULT}:
            raise Busy(self._attempt.trigger)
        candidates = rows(trigger, self.state, resume=intent.resume)
        if not candidates:
            raise IllegalTransition(trigger, self.state, self.allowed)
        if refused := self._first_refusal(candidates[0].guards, intent):
            raise TransitionRefused(trigger, self.state, *refused)
        self._attempt = Attempt(trigger=trigger, source=self.state, rows=candidates, intent=intent)
        return self._attempt

    def commit(self, attempt: Attempt, row: Transition | None = None) -> State:
        """Check the proofs of `row` (the attempt's first where not given) and move. Returns the new state.

        Raises `TransitionRefused` with the proof that does not hold, and stays; the attempt is still in flight then.
        """
        row = row or attempt.row
        self.prove(attempt, row)
        self._graph.events[attempt.trigger.name].trigger(self._model, row=row)
        self._attempt = None
        return self.state

    def prove(self, attempt: Attempt, row: Transition) -> None:
        """Check the proofs of `row` and stay. Raises as `commit` does."""
        if self._attempt is not attempt:
            raise Busy(self.in_flight)
        if refused := self._first_refusal(row.proofs, attempt.intent):
            raise TransitionRefused(attempt.trigger, self.state, *refused)

    def roll_back(self, attempt: Attempt) -> None:
        """Give the attempt up; the state stays. Harmless when CLOSE or FAULT has replaced it."""
        if self._attempt is attempt:
            self._attempt = None

    def _first_refusal(self, conditions: tuple[Condition, ...], intent: Intent) -> tuple[str, str] | None:
        for condition in conditions:
            if (reason := condition(self.cohort, intent)) is not None:
                return condition.__name__, reason
        return None


@cache
def _graph() -> Machine:
    """Return the table as a machine. It has no model and no state of its own, so that every lifecycle shares it."""
    graph = Machine(
        model=None,
        states=State,
        initial=State.CLOSED,
        auto_transitions=False,
        send_event=True,
        queued=False,
    )
    for row in TRANSITIONS:
        graph.add_transition(
            row.trigger.name,
            list(row.source),
            row.target,
            conditions=[_is_row(row)],
        )
    return graph


def _is_row(row: Transition) -> Any:
    def chosen(event: EventData) -> bool:
        return event.kwargs["row"] is row

    return chosen
