"""What a trace says."""

from attrs import define, field, frozen

from lifecycle.states import State


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
    """Pauses that were sent and not refused, or found: one an engine until it is matched."""
    continues: int = 0
    """Pauses that an acknowledged continue, a probe or a new process matched."""
    unmatched: tuple[str, ...] = ()
    """Engines that still owe a continue where the trace ends, those of a lifecycle that was killed included."""
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
        if count := len(self.violations):
            return f"{count} violation{'s' if count > 1 else ''} in {self.events} events"
        unmatched = f"unmatched: {', '.join(self.unmatched)}" if self.unmatched else "none unmatched"
        end = "" if self.closed else f"; it ends in {self.state.name}, not closed"
        return f"sound: {self.events} events, {self.pauses} pauses, {self.continues} continues, {unmatched}{end}"
