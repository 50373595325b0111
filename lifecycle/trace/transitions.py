"""Transitions: legal by the table, begun on its guards, committed on its proofs, their requests in its order."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import define

from lifecycle import events as e
from lifecycle.guards import enough_reachable, pauses_matched
from lifecycle.states import State, Trigger
from lifecycle.table import Transition, rows

from .known import Known, rule_of

_Requests = tuple[type[e.Request], ...]

_TOLD_BY: Mapping[type[e.Event], type[e.Request]] = {
    e.GenerationHeld: e.HoldGeneration,
    e.GenerationReleased: e.ReleaseGeneration,
    e.SubmissionResumed: e.ResumeSubmission,
    e.SubmissionSuspended: e.SuspendSubmission,
    e.VersionAdvanced: e.CommitVersion,
}
"""Facts that show a request of the lifecycle to itself, which is not written down."""
_PART_OF: Mapping[type[e.Request], _Requests] = {
    e.Settle: (e.LabelVersion, e.ContinueGeneration),
    e.OpenTransfer: (e.AbandonUpdate,),
    e.AbandonUpdate: (e.CloseTransfer, e.ProbeEngine),
    e.ResumeSubmission: (e.SuspendSubmission,),
}
"""Requests that a procedure sends besides the one that the table names."""
_OPEN_AND_HELD = {
    State.RUNNING: (True, False),
    State.SUSPENDED: (False, False),
    State.PAUSED: (False, True),
    State.UPDATING: (False, True),
}
"""Whether submission is open, and whether generation is held."""


@define
class _Course:
    """The requests of a row, and how far they have come."""

    requests: _Requests
    place: int = 0

    def takes(self, kind: type[e.Request]) -> bool:
        """Go on to `kind`. Returns whether it is still to come."""
        for place in range(self.place, len(self.requests)):
            if kind is self.requests[place] or kind in _PART_OF.get(self.requests[place], ()):
                self.place = place
                return True
        return False


class Transitions:
    """Replays what the machine did."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._opened = False
        self.closed = False
        """The last transition was CLOSE."""
        self._courses: list[_Course] = []
        self._asked: dict[int, e.Request] = {}
        self.rules: Mapping[type[e.Event], Callable[[Any], None]] = {
            e.TransitionBegun: self._begun,
            e.TransitionCommitted: self._committed,
            e.TransitionRolledBack: self._rolled_back,
            e.SubmissionResumed: lambda _: self._open(True),
            e.SubmissionSuspended: lambda _: self._open(False),
            e.GenerationHeld: lambda _: self._hold(True),
            e.GenerationReleased: lambda _: self._hold(False),
        }

    def begin_anew(self) -> None:
        """Another lifecycle begins; what a killed one had asked stays without an answer."""
        self._opened, self.closed = True, False
        self._courses.clear()
        self._asked.clear()

    def take(self, event: e.Event) -> None:
        """Check that an event belongs where it is: a request in the order of the table, a fact to its request."""
        if isinstance(event, e.Request):
            if event.engine is not None:
                self._asked[event.seq] = event
                self._may_take_part(event, event.engine)
            self._in_order(type(event), type(event).__name__)
        elif isinstance(event, e.EngineFact):
            request = self._asked.pop(event.request, None)
            if request is None or request.fact is not type(event) or request.engine != event.engine:
                self._known.breach("one-fact-a-request", f"{type(event).__name__} of {event.engine} answers no request")
        elif (request_told := _TOLD_BY.get(type(event))) is not None:
            self._in_order(request_told, type(event).__name__)

    def _may_take_part(self, request: e.Request, engine: str) -> None:
        facts = self._known.cohort.fleet.get(engine)
        if facts is None or facts.reachable or isinstance(request, e.ProbeEngine):
            return
        if self._known.trigger is not Trigger.CLOSE:  # which tries everybody: nobody will come back to them
            self._known.breach("lost-takes-no-part", f"{type(request).__name__} to {engine}, which is lost")

    def _in_order(self, kind: type[e.Request], name: str) -> None:
        trigger = self._known.trigger
        if kind is e.ProbeEngine and (trigger or self._courses):
            return  # it changes nothing, so that any procedure may look
        if kind is e.AbortGeneration and trigger is None:
            return  # the user's own
        following = [course for course in self._courses if course.takes(kind)]  # each goes on as far as it can
        if not following:
            within = f"within {trigger.name}" if trigger else "where nothing is being attempted"
            self._known.breach("legal-order", f"{name} is not what follows {within}")

    # --------------------------------------------------------------------------------------------------- the machine

    def _begun(self, event: e.TransitionBegun) -> None:
        known, trigger = self._known, event.trigger
        self._settled_accounts()
        if known.trigger is not None:
            known.breach("one-at-a-time", f"{trigger.name} begins within {known.trigger.name}")
        if trigger is Trigger.ATTACH and not self._opened:
            known.breach("legal-transition", "ATTACH begins without LifecycleOpened")
        self._opened = False
        known.trigger = trigger
        candidates = self._rows(trigger, event.source)
        if not candidates:
            known.breach("legal-transition", f"{trigger.name} does not exist in {known.state.name}")
        elif refused := [g for g in candidates[0].guards if known.ask(g)]:
            known.demand(refused[0], f"{trigger.name} begins")
        if trigger not in {Trigger.CLOSE, Trigger.FAULT, Trigger.ABANDON_UPDATE}:
            self._at_rest(trigger)
        self._courses = [_Course(row.requests) for row in candidates]

    def _at_rest(self, trigger: Trigger) -> None:
        """Check what holds between operations, after whatever failed was compensated."""
        known = self._known
        if known.state in {State.RUNNING, State.SUSPENDED}:
            known.demand(pauses_matched, f"{trigger.name} begins in {known.state.name}")
        if known.state not in {State.CLOSED, State.FAULTED}:
            known.demand(enough_reachable, f"{trigger.name} begins and not FAULT")
            self._gates(f"{trigger.name} begins in {known.state.name}")

    def _committed(self, event: e.TransitionCommitted) -> None:
        known, trigger, target = self._known, event.trigger, event.target
        self._settled_accounts()
        self._ended(trigger)
        candidates = [row for row in self._rows(trigger, event.source) if (row.target or known.state) is target]
        if not candidates:
            known.breach("legal-transition", f"{trigger.name} does not lead from {known.state.name} to {target.name}")
        elif all(self._first_refusal(row) for row in candidates):
            proof, reason = self._first_refusal(candidates[0]) or ("", "")
            known.breach(proof, f"{trigger.name} commits to {target.name} although {reason}")
        known.state = target
        self.closed = target is State.CLOSED
        self._courses = []
        self._gates(f"{trigger.name} leads to {target.name}")

    def _rolled_back(self, event: e.TransitionRolledBack) -> None:
        self._settled_accounts()
        self._ended(event.trigger)
        candidates = self._rows(event.trigger, event.source)
        self._courses = [_Course(row.compensation) for row in candidates if row.compensation]

    def _rows(self, trigger: Trigger, source: State) -> tuple[Transition, ...]:
        """Return the rows of `trigger` here, in whichever way the caller meant it."""
        known = self._known
        if source is not known.state:
            known.breach("legal-transition", f"{trigger.name} from {source.name} in {known.state.name}")
            known.state = source  # said once; what follows is checked against where it claims to be
        return tuple(dict.fromkeys((*rows(trigger, source), *rows(trigger, source, resume=False))))

    def _first_refusal(self, row: Transition) -> tuple[str, str] | None:
        refusals: Iterable[tuple[str, str | None]] = ((rule_of(proof), self._known.ask(proof)) for proof in row.proofs)
        return next(((rule, reason) for rule, reason in refusals if reason is not None), None)

    def _ended(self, trigger: Trigger) -> None:
        if self._known.trigger is not trigger:
            self._known.breach("legal-transition", f"{trigger.name} ends without having begun")
        self._known.trigger = None

    def _settled_accounts(self) -> None:
        """Check that every request has its outcome, and that no engine serves which may not."""
        known = self._known
        for request in self._asked.values():
            known.breach("one-fact-a-request", f"{type(request).__name__} to {request.engine} has no outcome")
        self._asked.clear()
        for facts in known.cohort.fleet.serving:
            if facts.dirty:
                known.breach("dirty-never-serves", f"{facts.name} serves although it may be partly written")

    # ------------------------------------------------------------------------------------------------------ the gates

    def _open(self, submission_open: bool) -> None:
        if self._known.cohort.submission_open is submission_open:
            self._known.breach("submission", f"submission is {'open' if submission_open else 'closed'} already")
        self._known.cohort.submission_open = submission_open

    def _hold(self, held: bool) -> None:
        cohort = self._known.cohort
        if cohort.generation_held is held:
            self._known.breach("held", f"generation is {'held' if held else 'released'} already")
        cohort.generation_held = held
        cohort.epoch += held

    def _gates(self, where: str) -> None:
        known = self._known
        submission_open, held = _OPEN_AND_HELD.get(
            known.state, (known.cohort.submission_open, known.cohort.generation_held)
        )
        if known.cohort.submission_open is not submission_open:
            known.breach("submission", f"{where} while submission is {'closed' if submission_open else 'open'}")
        if known.cohort.generation_held is not held:
            known.breach("held", f"{where} while generation is {'released' if held else 'held'}")
