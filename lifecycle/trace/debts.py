"""Debts: every pause matched by a continue, and a dirty engine never continued."""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve

from lifecycle import events as e
from lifecycle.fleet import NEW_PROCESS, version_of
from lifecycle.history import debt_of
from lifecycle.states import Outcome, State

from .known import Known


class Debts:
    """Replays pauses and continues."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._pausing: set[str] = set()
        """Engines whose pause was sent in the transition at hand."""
        self._continued: set[str] = set()
        """Engines that were asked to continue in the transition at hand."""
        self._settled: set[str] = set()
        """Engines whose debt is matched by what is on record, and not yet said to be."""
        self._found: set[str] = set()
        """Engines that a probe found paused: the lifecycle takes the pause on, unless they are not ready."""
        self._left: dict[str, str | None] = {}
        """Engines that a killed lifecycle left paused, and the process that was."""
        self.rules: Mapping[type[e.Event], Callable[[Any], None]] = {
            e.EngineRecalled: self._recalled,
            e.PauseGeneration: self._pause,
            e.EnginePaused: self._paused,
            e.PauseProven: self._proven,
            e.ContinueGeneration: self._continue,
            e.EngineContinued: self._was_continued,
            e.EngineProbed: self._probed,
            e.DebtSettled: self._said_settled,
        }

    def begin_anew(self) -> None:
        """Another lifecycle begins: keep in mind what this one left paused. Called before the cohort is replaced."""
        fleet, ledger = self._known.cohort.fleet, self._known.cohort.ledger
        self._left |= {debt.engine: fleet[debt.engine].incarnation for debt in ledger.outstanding}
        self._count()
        for names in (self._pausing, self._continued, self._settled, self._found):
            names.clear()

    def _count(self) -> None:
        self._known.verdict.pauses += self._known.cohort.ledger.pauses
        self._known.verdict.continues += self._known.cohort.ledger.matched

    def end(self) -> None:
        """Put the counts into the verdict."""
        owing = [debt.engine for debt in self._known.cohort.ledger.outstanding]
        self._known.verdict.unmatched = tuple(dict.fromkeys([*owing, *self._left]))
        self._count()

    def transition(self, event: e.Event) -> None:
        """Check the books where a transition begins or ends."""
        known, ledger = self._known, self._known.cohort.ledger
        for name in self._settled - self._found:
            known.breach("pauses-matched", f"the debt of {name} is settled, and nothing says so")
        self._settled.clear()
        if isinstance(event, e.TransitionCommitted) and event.target is State.CLOSED:
            for debt in ledger.outstanding:
                name = debt.engine
                if not known.cohort.fleet[name].dirty and name not in self._continued | self._found:
                    known.breach("pauses-matched", f"{name} is whole, and closed without having been continued")
        if isinstance(event, e.TransitionBegun):
            self._pausing.clear()
            self._continued.clear()

    def _take_over(self, name: str) -> None:
        """A pause that a killed lifecycle left becomes one of this lifecycle: it counts once."""
        if name in self._left:
            del self._left[name]
            self._known.verdict.pauses -= 1

    def _recalled(self, event: e.EngineRecalled) -> None:
        known, name = self._known, event.engine
        known.cohort.fleet.update(name, incarnation=event.incarnation)
        if (name in self._left) is not (event.debt is not None):
            known.breach("pauses-matched", f"{name} is recalled with another debt than it was left with")
        if event.debt is not None:
            self._take_over(name)
            known.cohort.ledger.restore(debt_of(event))

    def _pause(self, event: e.PauseGeneration) -> None:
        known, name = self._known, str(event.engine)
        if name in self._pausing:
            known.breach("pause-once", f"{name} is paused twice in one transition")
        self._pausing.add(name)
        self._take_over(name)
        self._found.discard(name)
        known.cohort.mode = event.mode
        known.cohort.ledger.owe(name, mode=event.mode, epoch=known.cohort.epoch)
        known.cohort.fleet.update(name, paused=None, idle=False)

    def _paused(self, event: e.EnginePaused) -> None:
        ledger = self._known.cohort.ledger
        if event.outcome is not Outcome.DONE:
            self._pausing.discard(event.engine)  # a pause that is not known to be done may be sent again
        if event.outcome is Outcome.NOT_DONE and ledger.cancel(event.engine):
            self._settled.add(event.engine)
        if event.outcome is Outcome.DONE:
            ledger.confirm(event.engine)
            self._known.cohort.fleet.update(event.engine, paused=event.stopped, idle=bool(event.idle))

    def _proven(self, event: e.PauseProven) -> None:
        ledger = self._known.cohort.ledger
        if event.outcome is Outcome.DONE and event.stopped and ledger.owed(event.engine) is None:
            ledger.owe(event.engine, mode=self._known.cohort.mode, epoch=self._known.cohort.epoch, certain=True)

    def _continue(self, event: e.ContinueGeneration) -> None:
        name = str(event.engine)
        self._continued.add(name)
        self._found.discard(name)
        if self._known.cohort.fleet[name].dirty:
            self._known.breach("dirty-never-continued", f"{name} is continued although it may be partly written")
        if self._known.cohort.ledger.owed(name) is None:
            self._known.breach("pauses-matched", f"{name} is continued, and no pause of it is on record")
        self._known.cohort.fleet.update(name, paused=None, idle=False)

    def _was_continued(self, event: e.EngineContinued) -> None:
        if event.outcome is Outcome.DONE:
            self._known.cohort.fleet.update(event.engine, paused=False, idle=False)
            if self._known.cohort.ledger.continued(event.engine):
                self._settled.add(event.engine)

    def _probed(self, event: e.EngineProbed) -> None:
        name, cohort = event.engine, self._known.cohort
        if event.outcome is not Outcome.DONE:
            return
        before = cohort.fleet[name].incarnation or self._left.get(name)
        restarted = None not in {before, event.incarnation} and before != event.incarnation
        if name in self._left and (event.paused is False or restarted):
            del self._left[name]
            self._known.verdict.continues += 1
        gone = restarted and not event.paused and cohort.ledger.forget(name)
        if gone or (event.paused is False and cohort.ledger.seen_running(name)):
            self._settled.add(name)
        if event.paused and cohort.ledger.owed(name) is None:
            self._take_over(name)
            self._found.add(name)
            cohort.ledger.owe(name, mode=cohort.mode, epoch=cohort.epoch, certain=True)
        facts = cohort.fleet[name]
        if restarted:
            facts = evolve(facts, idle=False, session=False, unfit=NEW_PROCESS)
        cohort.fleet.update(
            name,
            incarnation=event.incarnation,
            version=version_of(cohort.run, event.label),
            paused=event.paused,
            idle=facts.idle and event.paused is not False,
            session=facts.session or event.whole is False,
            unfit=facts.unfit,
        )

    def _said_settled(self, event: e.DebtSettled) -> None:
        if event.engine not in self._settled:
            self._known.breach("pauses-matched", f"the debt of {event.engine} is settled by nothing ({event.reason})")
        self._settled.discard(event.engine)
