"""Continuing engines in a dead trainer's place: decided engine by engine without I/O, then performed and proven.

A dirty engine is never continued, nor one whose probe says that its weights are not whole. Of the others those are that
the journal of their trainer proves to be whole and paused by it: another's pause is another's business.
"""

from collections.abc import Callable
from enum import Enum

from attrs import evolve, frozen

from lifecycle import events
from lifecycle.fleet import EngineFacts
from lifecycle.history import Remembered
from lifecycle.ports import Acknowledgement, EnginePort, EngineReport
from lifecycle.states import Outcome

_CONTINUE_SECONDS = 10.0
"""How long a continue may take."""
_ROUNDS = 3
"""How often a pause may land after its continue before the engine is given up."""
_STOOD_DOWN = "the journal was written meanwhile: a trainer is at work on it"


class Verdict(Enum):
    """How an engine stands."""

    FINE = "fine"
    """Nothing is to be done."""
    OWED = "owed"
    """A continue is owed to it, and safe."""
    RELEASED = "released"
    """It was continued, and has said since that it runs."""
    LEFT = "left"
    """It is as it was, and not as it should be."""
    STOOD_DOWN = "stood down"
    """It is somebody else's to continue, who came meanwhile."""
    UNREACHABLE = "unreachable"

    @property
    def good(self) -> bool:
        """Whether nobody has to look after the engine."""
        return self in {Verdict.FINE, Verdict.RELEASED}


@frozen(kw_only=True)
class Ruling:
    """What is to be done with an engine, and why."""

    verdict: Verdict
    reason: str = ""
    continues: bool = False
    """It may be continued. Of an engine that is FINE already this is a precaution."""


@frozen(kw_only=True)
class Case:
    """One engine, and what its trainer's journal says of it."""

    known: Remembered | None = None
    """`None`: there is no journal, or it does not know the engine."""
    run: str = ""
    """Name of the lifecycle that wrote the journal."""
    trust_paused: bool = False
    """Somebody knows that its weights are whole, and that nobody is at work on it."""

    def same_process(self, report: EngineReport) -> bool | None:
        """Whether the journal is about this very process; `None` where that cannot be told."""
        if self.known is None or None in {self.known.incarnation, report.incarnation}:
            return None
        return self.known.incarnation == report.incarnation

    def judge(self, report: EngineReport) -> Ruling:
        """Decide by what the engine says of itself and what the journal says of it."""
        if (reason := self._not_whole(report)) is not None:
            return Ruling(verdict=Verdict.LEFT, reason=reason)
        if report.asleep:
            return Ruling(verdict=Verdict.LEFT, reason="asleep: whoever put it to sleep has to wake it")
        debt = None if self.known is None or self.same_process(report) is False else self.known.debt
        if not report.paused and debt is None:
            return Ruling(verdict=Verdict.FINE, reason=self._remark(report))
        reason = None if self.trust_paused else self._unproven(report)
        if report.paused is False and debt is not None and debt.certain:
            return Ruling(verdict=Verdict.FINE, reason="somebody has continued it", continues=reason is None)
        what = "paused" if report.paused else "a pause of it may still land"
        if reason is not None:
            return Ruling(verdict=Verdict.LEFT, reason=f"{what}, and {reason}; --trust-paused takes your word instead")
        return Ruling(verdict=Verdict.OWED, reason=f"{what}, and its weights are whole", continues=True)

    def _not_whole(self, report: EngineReport) -> str | None:
        if report.whole is False:
            return "an update is open in it or was left half-way; a publication cures it"
        if self.known is None or not self.known.dirty or self.same_process(report) is False:
            return None
        running = "it runs, but " if report.paused is False else ""
        return f"{running}its weights may be partly written; a publication cures it"

    def _unproven(self, report: EngineReport) -> str | None:
        """Return why it is not proven that the pause is its trainer's and the weights are whole, or `None`."""
        if self.known is None:
            return "nothing proves that its weights are whole: its trainer's --journal might"
        same = self.same_process(report)
        if same is None:
            return "it does not tell whether it is the process that the journal knows"
        if same is False:
            return "it is another process than the journal's"
        run, _, number = (report.label or "").rpartition(":")
        if run not in {"", self.run} and number.isdecimal() and report.label != self.known.label:
            return f"it is labelled {report.label}: another trainer has published on it since"
        return None if self.known.debt is not None else "not by the journal's trainer"

    def _remark(self, report: EngineReport) -> str:
        """Return what else is worth knowing of an engine that runs."""
        if self.known is None:
            return ""
        return "another process than the journal's" if self.same_process(report) is False else self.known.unfit


@frozen(kw_only=True)
class Finding:
    """How one engine was found, or left."""

    ruling: Ruling
    report: EngineReport | None = None
    """`None`: it did not answer."""


async def look(engine: EnginePort, case: Case, *, patience: float) -> Finding:
    """Probe an engine within `patience` seconds and judge it. Nothing is changed.

    Cancellation: nothing is left.
    """
    return found(case, await _ask(engine, events.ProbeEngine(engine=engine.name), patience))


def found(case: Case, answer: Acknowledgement) -> Finding:
    """Judge by the answer to a probe."""
    if not answer.done or answer.report is None:
        return Finding(ruling=Ruling(verdict=Verdict.UNREACHABLE, reason=answer.detail or "does not answer"))
    return Finding(ruling=case.judge(answer.report), report=answer.report)


async def release(
    engine: EnginePort, case: Case, finding: Finding, *, changed: Callable[[], bool], patience: float
) -> Finding:
    """Continue an engine that may be continued, until a probe says that it runs.

    `changed` is asked right before each continue: whether the evidence is no longer what it was.

    Cancellation: the continue may or may not have taken effect; to do all of it again is harmless.
    """
    for _ in range(_ROUNDS):
        if not finding.ruling.continues:
            return finding
        if changed():
            return evolve(finding, ruling=Ruling(verdict=Verdict.STOOD_DOWN, reason=_STOOD_DOWN))
        answer = await _ask(engine, events.ContinueGeneration(engine=engine.name), _CONTINUE_SECONDS)
        if answer.outcome is Outcome.NOT_DONE:
            reason = f"did not continue: {answer.detail}"
            return evolve(finding, ruling=Ruling(verdict=Verdict.LEFT, reason=reason))
        finding = await look(engine, case, patience=patience)
        if answer.done and _runs(finding):
            reason = case.known.unfit if case.known is not None else ""
            return evolve(finding, ruling=Ruling(verdict=Verdict.RELEASED, reason=reason))
    if not finding.ruling.continues:
        return finding
    reason = f"does not say that it runs after {_ROUNDS} continues"
    return evolve(finding, ruling=Ruling(verdict=Verdict.LEFT, reason=reason))


def _runs(finding: Finding) -> bool:
    report = finding.report
    return report is not None and report.paused is False and report.whole is not False


async def _ask(engine: EnginePort, request: events.Request, timeout: float) -> Acknowledgement:
    return await engine.perform(request, EngineFacts(name=engine.name), timeout=timeout)
