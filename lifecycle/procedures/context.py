"""What procedures work with."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Self

from attrs import define, field

from lifecycle.bookkeeping import Bookkeeper
from lifecycle.cohort import Cohort
from lifecycle.deadlines import Deadlines
from lifecycle.effects import Effects
from lifecycle.gate import SubmissionGate
from lifecycle.machine import Attempt, LifecycleMachine
from lifecycle.ports import EnginePort, TransferPort
from lifecycle.recorder import EventSink, Recorder
from lifecycle.segments import Segments
from lifecycle.states import PauseMode
from lifecycle.values import Bucket, EngineReport


@define(kw_only=True)
class Operation:
    """One attempt, and what its procedures share."""

    attempt: Attempt
    transfer: TransferPort | None = None
    bucket: Bucket | None = None
    consumed: int | None = None
    """Accepted rollouts that training took since the version before; `None`: a batch a version."""
    reports: dict[str, EngineReport] = field(factory=dict)
    """What the engines that answered a probe said."""
    published: tuple[str, ...] = ()
    """Engines that hold the version that this operation committed."""
    interruption: BaseException | None = None
    """A cancellation that had to wait until the operation had come to its end."""
    failures: list[Exception] = field(factory=list)
    """What went wrong at engines that were fenced instead of failing the operation."""

    @property
    def mode(self) -> PauseMode:
        """The pause mode asked for."""
        return self.attempt.intent.mode or PauseMode.ABORT


Procedure = Callable[[Operation], Awaitable[None]]


@define(kw_only=True)
class Context:
    """The parts of a lifecycle."""

    cohort: Cohort
    recorder: Recorder
    books: Bookkeeper
    effects: Effects
    gate: SubmissionGate
    segments: Segments

    @classmethod
    def of(
        cls,
        cohort: Cohort,
        machine: LifecycleMachine,
        ports: Mapping[str, EnginePort],
        deadlines: Deadlines,
        sink: EventSink | None,
    ) -> Self:
        """Put the parts of one lifecycle together."""
        recorder = Recorder(cohort, sink)
        books = Bookkeeper(cohort, recorder, lambda engine: ports[engine].capabilities)
        return cls(
            cohort=cohort,
            recorder=recorder,
            books=books,
            effects=Effects(ports, cohort, recorder, books, deadlines),
            gate=SubmissionGate(cohort, recorder, lambda: machine.state),
            segments=Segments(ports, cohort, recorder, deadlines, lambda: machine.state),
        )

    @property
    def deadlines(self) -> Deadlines:
        """Read when needed, so that a run can change them."""
        return self.effects.deadlines

    @property
    def reachable(self) -> tuple[str, ...]:
        """Names of the engines that take part in operations."""
        return tuple(facts.name for facts in self.cohort.fleet.reachable)

    def reachable_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` that can still be reached."""
        return tuple(name for name in names if self.cohort.fleet[name].reachable)
