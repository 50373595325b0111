"""One pass over a trace: every event is checked against everything before it."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from lifecycle import events as e
from lifecycle.journal import read

from .debts import Debts
from .known import Known
from .rollouts import Rollouts
from .transitions import Transitions
from .verdict import Verdict
from .weights import Weights

_TRANSITIONS = (e.TransitionBegun, e.TransitionCommitted, e.TransitionRolledBack)


def verify_file(path: str | os.PathLike[str]) -> Verdict:
    """Replay the journal at `path`. Raises `JournalUnreadable` naming the line, and `OSError`."""
    return verify(read(path))


def verify(trace: Iterable[tuple[int, e.Event]]) -> Verdict:
    """Replay (line number, event) pairs and return the verdict."""
    replay = _Replay()
    for line, event in trace:
        replay.take(line, event)
    return replay.end()


class _Replay:
    """Hands each event to the rules that concern it."""

    def __init__(self) -> None:
        self._known = Known()
        self._seq = 0
        self._monotonic = float("-inf")
        self._transitions = Transitions(self._known)
        self._debts = Debts(self._known)
        self._weights = Weights(self._known)
        self._rollouts = Rollouts(self._known)
        self._rules: dict[type[e.Event], list[Callable[[Any], None]]] = {}
        for replayed in (self._transitions, self._debts, self._weights, self._rollouts):
            for kind, rule in replayed.rules.items():
                self._rules.setdefault(kind, []).append(rule)

    def take(self, line: int, event: e.Event) -> None:
        """Check one event."""
        known = self._known
        known.line = line
        known.verdict.events += 1
        if event.seq != self._seq + 1:
            known.breach("gapless-seq", f"seq {event.seq} follows {self._seq}")
        self._seq = event.seq
        if isinstance(event, e.LifecycleOpened):
            self._begin_anew(event)
        elif event.monotonic < self._monotonic:
            known.breach("time-order", f"it happened {self._monotonic - event.monotonic:.6f} s before the line above")
        self._monotonic = event.monotonic
        self._transitions.take(event)
        if isinstance(event, _TRANSITIONS):
            self._debts.transition(event)
            self._weights.transition(event)
        engine = getattr(event, "engine", None)
        rules = self._rules.get(type(event), [])
        if rules and (engine is None or known.is_known(engine)):
            for rule in rules:
                rule(event)
        self._check_stamps(event)

    def end(self) -> Verdict:
        """Return the verdict, with what only the end of the trace shows."""
        known, verdict = self._known, self._known.verdict
        self._debts.end()
        verdict.state, verdict.version = known.state, known.cohort.version
        verdict.closed = self._transitions.closed
        return verdict

    def _begin_anew(self, event: e.LifecycleOpened) -> None:
        self._debts.begin_anew()
        self._transitions.begin_anew()
        self._rollouts.begin_anew()
        self._known.begin_anew(event)

    def _check_stamps(self, event: e.Event) -> None:
        """Every event carries the version and the epoch of its moment. A difference is reported once."""
        known, cohort = self._known, self._known.cohort
        if event.version != cohort.version:
            known.breach("version-monotonic", f"version {event.version} although {cohort.version} is published")
            cohort.version = event.version
        if event.epoch != cohort.epoch:
            known.breach("epoch", f"epoch {event.epoch} in epoch {cohort.epoch}")
            cohort.epoch = event.epoch
