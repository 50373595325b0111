"""Verify a recorded trace: replay a journal against the transition table and the rules, and report every violation.

The replay believes requests and outcomes, and checks the lifecycle's own conclusions against them.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import define, field, frozen

from . import events as e
from .journal import read
from .staleness import StalenessBudget
from .states import Outcome, Standing, State, Trigger
from .table import rows


@frozen
class Violation:
    """A rule that the trace breaks."""

    line: int
    """Where in the journal, from 1."""
    rule: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.message}"


@define(kw_only=True)
class Verdict:
    """What a trace says."""

    violations: list[Violation] = field(factory=list)
    events: int = 0
    state: State = State.CLOSED
    version: int | None = None
    pauses: int = 0
    """Pauses that were sent and not refused, one an engine and publication."""
    continues: int = 0
    """Pauses that an acknowledged continue, or a probe, matched."""
    unmatched: tuple[str, ...] = ()
    """Engines that still owe a continue where the trace ends."""
    closed: bool = False
    """The lifecycle was closed; otherwise the trace ends in the middle of a run."""
    max_staleness_seen: int = 0
    tokens: int = 0
    interrupted: int = 0
    """Generation requests that a pause cut short."""

    @property
    def sound(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    def __str__(self) -> str:
        if self.violations:
            return f"{len(self.violations)} violations in {self.events} events"
        return f"sound: {self.events} events, {self.pauses} pauses, {self.continues} continues, " + (
            f"unmatched: {', '.join(self.unmatched)}" if self.unmatched else "none unmatched"
        )


@define(kw_only=True)
class _Engine:
    """What the replay knows of one engine."""

    owes: bool = False
    certain: bool = False
    continued: bool = False
    renewed: bool = False
    dirty: bool = False
    standing: Standing = Standing.LOST


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
    """One pass over a trace."""

    def __init__(self) -> None:
        self.verdict = Verdict()
        self._line = 0
        self._seq = 0
        self._begin_anew()
        self._rules: Mapping[type[e.Event], Callable[[Any], None]] = {
            e.LifecycleOpened: self._opened,
            e.TransitionBegun: self._begun,
            e.TransitionCommitted: self._committed,
            e.TransitionRolledBack: self._rolled_back,
            e.PauseGeneration: self._pause,
            e.EnginePaused: self._paused,
            e.ContinueGeneration: self._continue,
            e.EngineContinued: self._continued,
            e.EngineProbed: self._probed,
            e.WeightsVerified: self._verified,
            e.DebtSettled: self._settled,
            e.EngineDirtied: self._dirtied,
            e.EngineCleaned: self._cleaned,
            e.StandingChanged: self._stood,
            e.VersionAdvanced: self._advanced,
            e.GenerationHeld: self._held,
            e.GenerationReleased: self._released,
            e.RolloutAdmitted: self._admitted,
            e.RolloutSettled: self._returned,
            e.RolloutConsumed: self._consumed,
            e.RolloutDiscarded: self._discarded,
            e.GenerationSent: self._sent,
            e.SegmentReceived: self._received,
        }

    def _begin_anew(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._state = State.CLOSED
        self._attempts: list[Trigger] = []
        self._asked: dict[int, e.Request] = {}
        self._pausing: set[str] = set()
        self._verifying: set[str] = set()
        self._tickets: dict[int, int | None] = {}
        self._settled_tickets: dict[int, tuple[bool, int | None]] = {}
        self._budget: StalenessBudget | None = None
        self._is_held = False
        self._version: int | None = None
        self._required = 1

    # -------------------------------------------------------------------------------------------------------- driving

    def take(self, line: int, event: e.Event) -> None:
        """Check one event against everything before it."""
        self._line = line
        self.verdict.events += 1
        if event.seq != self._seq + 1:
            self._breach("gapless-seq", f"seq {event.seq} follows {self._seq}")
        self._seq = event.seq
        if isinstance(event, e.Request) and event.engine is not None:
            self._asked[event.seq] = event
        if isinstance(event, e.EngineFact):
            self._answered(event)
        if (rule := self._rules.get(type(event))) is not None:
            rule(event)
        if self._version is not None and event.version != self._version:
            self._breach("version-monotonic", f"version {event.version} although {self._version} is published")

    def end(self) -> Verdict:
        """Return the verdict, with what only the end of the trace shows."""
        verdict = self.verdict
        verdict.state, verdict.version = self._state, self._version
        verdict.unmatched = tuple(name for name, engine in self._engines.items() if engine.owes)
        return verdict

    def _breach(self, rule: str, message: str) -> None:
        self.verdict.violations.append(Violation(self._line, rule, message))

    def _engine(self, name: str) -> _Engine:
        if name not in self._engines:
            self._breach("known-engine", f"{name} is not in the fleet")
            self._engines[name] = _Engine()
        return self._engines[name]

    def _answered(self, fact: e.EngineFact) -> None:
        request = self._asked.pop(fact.request, None)
        if request is None or request.fact is not type(fact) or request.engine != fact.engine:
            self._breach("one-fact-a-request", f"{type(fact).__name__} of {fact.engine} answers no request")

    # ---------------------------------------------------------------------------------------------------- transitions

    def _opened(self, event: e.LifecycleOpened) -> None:
        self._begin_anew()
        self._engines = {name: _Engine() for name in event.engines}
        self._required = event.min_engines
        self._version = event.version
        self.verdict.closed = False
        if event.batch_size is not None and event.max_staleness is not None:
            self._budget = StalenessBudget(
                batch_size=event.batch_size,
                max_staleness=event.max_staleness,
                max_concurrent=event.max_concurrent,
                version=event.version or 0,
                accepted=max(0, event.accepted),
            )

    def _begun(self, event: e.TransitionBegun) -> None:
        if event.source is not self._state:
            self._breach("legal-transition", f"{event.trigger.name} from {event.source.name} in {self._state.name}")
        if not rows(event.trigger, self._state) and not rows(event.trigger, self._state, resume=False):
            self._breach("legal-transition", f"{event.trigger.name} does not exist in {self._state.name}")
        if event.trigger in {Trigger.CLOSE, Trigger.FAULT}:
            self._attempts.clear()
        if self._attempts:
            self._breach("one-at-a-time", f"{event.trigger.name} begins within {self._attempts[-1].name}")
        self._attempts.append(event.trigger)
        self._pausing.clear()
        self._verifying = set() if event.trigger is Trigger.FINISH_UPDATE else self._verifying

    def _end_attempt(self, trigger: Trigger) -> None:
        if trigger not in self._attempts:
            self._breach("legal-transition", f"{trigger.name} ends without having begun")
        else:
            self._attempts.remove(trigger)

    def _rolled_back(self, event: e.TransitionRolledBack) -> None:
        self._end_attempt(event.trigger)

    def _committed(self, event: e.TransitionCommitted) -> None:
        self._end_attempt(event.trigger)
        candidates = (*rows(event.trigger, self._state), *rows(event.trigger, self._state, resume=False))
        if event.target not in {row.target or self._state for row in candidates}:
            self._breach(
                "legal-transition", f"{event.trigger.name} does not lead from {self._state.name} to {event.target.name}"
            )
        self._state = event.target
        if event.target is State.RUNNING:
            for name, engine in self._engines.items():
                if engine.owes and engine.standing is Standing.SERVING:
                    self._breach("pause-matched", f"RUNNING although the pause of {name} is not matched")
        if event.target is State.CLOSED:
            self._closed()

    def _closed(self) -> None:
        self.verdict.closed = True
        for name, engine in self._engines.items():
            if engine.owes and not engine.dirty and engine.standing is not Standing.LOST:
                self._breach("pause-matched", f"closed although {name} is whole and its pause is not matched")
        for request in self._asked.values():
            self._breach("one-fact-a-request", f"{type(request).__name__} to {request.engine} has no outcome")

    # ------------------------------------------------------------------------------------------------ pauses and debts

    def _pause(self, event: e.PauseGeneration) -> None:
        name = str(event.engine)
        engine = self._engine(name)
        if name in self._pausing:
            self._breach("pause-once", f"{name} is paused twice in one transition")
        self._pausing.add(name)
        self.verdict.pauses += not engine.owes
        engine.renewed = engine.owes
        engine.owes, engine.certain, engine.continued = True, False, False

    def _paused(self, event: e.EnginePaused) -> None:
        engine = self._engine(event.engine)
        if event.outcome is Outcome.DONE:
            engine.certain, engine.continued = True, False
        elif event.outcome is Outcome.NOT_DONE and engine.owes and not engine.renewed:
            engine.owes = False
            self.verdict.pauses -= 1

    def _continue(self, event: e.ContinueGeneration) -> None:
        if self._engine(str(event.engine)).dirty:
            self._breach("dirty-never-continued", f"{event.engine} is continued although it may be partly written")

    def _continued(self, event: e.EngineContinued) -> None:
        engine = self._engine(event.engine)
        if event.outcome is Outcome.DONE and engine.owes:
            engine.continued = True
            if engine.certain:
                self._match(engine)

    def _probed(self, event: e.EngineProbed) -> None:
        engine = self._engine(event.engine)
        if event.paused and not engine.owes:
            # Found paused: the lifecycle takes the pause on.
            engine.owes = engine.certain = True
            self.verdict.pauses += 1
        elif event.paused is False and engine.owes and (engine.certain or engine.continued):
            self._match(engine)

    def _match(self, engine: _Engine) -> None:
        engine.owes = engine.certain = engine.continued = engine.renewed = False
        self.verdict.continues += 1

    def _settled(self, event: e.DebtSettled) -> None:
        engine = self._engine(event.engine)
        if engine.owes and "process is a new one" in event.reason:
            self._match(engine)
        if engine.owes:
            self._breach("pause-matched", f"the debt of {event.engine} is settled by nothing ({event.reason})")

    # ------------------------------------------------------------------------------------------------------- weights

    def _dirtied(self, event: e.EngineDirtied) -> None:
        self._engine(event.engine).dirty = True

    def _cleaned(self, event: e.EngineCleaned) -> None:
        self._engine(event.engine).dirty = False

    def _stood(self, event: e.StandingChanged) -> None:
        engine = self._engine(event.engine)
        engine.standing = event.after
        if event.after is Standing.SERVING and engine.dirty:
            self._breach("dirty-never-serves", f"{event.engine} serves although it may be partly written")

    def _verified(self, event: e.WeightsVerified) -> None:
        if event.outcome is Outcome.DONE:
            self._verifying.add(event.engine)

    def _advanced(self, event: e.VersionAdvanced) -> None:
        if self._version is not None and event.version is not None and event.version < self._version:
            self._breach("version-monotonic", f"version {event.version} goes back from {self._version}")
        if len(self._verifying) < self._required:
            self._breach(
                "verified-before-commit", f"{len(self._verifying)} of {self._required} engines proved the version"
            )
        if self._budget is not None and event.version is not None:
            if event.previous is None:
                self._budget.restore(event.version)
            elif event.version >= self._budget.version:
                self._budget.advance(event.version, event.consumed)
        self._version = event.version

    # ------------------------------------------------------------------------------------------------------- rollouts

    def _held(self, _: e.GenerationHeld) -> None:
        self._is_held = True

    def _released(self, _: e.GenerationReleased) -> None:
        self._is_held = False

    def _admitted(self, event: e.RolloutAdmitted) -> None:
        allowed = {State.RUNNING, State.SUSPENDED} if event.evaluation else {State.RUNNING}
        if self._state not in allowed:
            self._breach("admission", f"rollout {event.ticket} is admitted in {self._state.name}")
        if event.ticket in self._tickets or event.ticket in self._settled_tickets:
            self._breach("ticket-once", f"ticket {event.ticket} is given out twice")
        self._tickets[event.ticket] = event.version
        if self._budget is not None and not event.evaluation:
            if (capacity := self._budget.capacity()) < 1:
                self._breach("staleness", f"rollout {event.ticket} is admitted at capacity {capacity}")
            self._budget.running += 1

    def _returned(self, event: e.RolloutSettled) -> None:
        if event.ticket not in self._tickets:
            self._breach("ticket-once", f"ticket {event.ticket} comes back without being out")
            return
        self._settled_tickets[event.ticket] = (event.accepted, self._tickets.pop(event.ticket))
        if self._budget is not None and not event.evaluation:
            self._budget.running -= 1
            self._budget.accepted += event.accepted

    def _consumed(self, event: e.RolloutConsumed) -> None:
        staleness = self._leave_buffer(event)
        if self._budget is not None and staleness > self._budget.max_staleness:
            self._breach(
                "staleness", f"rollout {event.ticket} is {staleness} versions old; {self._budget.max_staleness} allowed"
            )
        self.verdict.max_staleness_seen = max(self.verdict.max_staleness_seen, staleness)

    def _discarded(self, event: e.RolloutDiscarded) -> None:
        self._leave_buffer(event)
        if self._budget is not None and event.ticket > 0:
            self._budget.advance(self._budget.version, consumed=1)

    def _leave_buffer(self, event: e.RolloutConsumed | e.RolloutDiscarded) -> int:
        accepted, admitted = self._settled_tickets.pop(event.ticket, (False, None))
        if not accepted:
            self._breach("ticket-once", f"rollout {event.ticket} leaves the buffer but was not in it")
        staleness = (self._version or 0) - (admitted or 0)
        if staleness != event.staleness:
            self._breach("staleness", f"rollout {event.ticket} is {staleness} versions old, not {event.staleness}")
        return staleness

    def _sent(self, event: e.GenerationSent) -> None:
        engine = self._engine(event.engine)
        if self._is_held:
            self._breach("held", f"a generation goes to {event.engine} while generation is held")
        if engine.standing is not Standing.SERVING or engine.dirty:
            self._breach("routing", f"a generation goes to {event.engine}, which does not serve")
        if event.ticket not in self._tickets:
            self._breach("admission", f"a generation for ticket {event.ticket}, which is not out")

    def _received(self, event: e.SegmentReceived) -> None:
        self.verdict.tokens += event.tokens
        self.verdict.interrupted += event.finish_reason == "abort"
