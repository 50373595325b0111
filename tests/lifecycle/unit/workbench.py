"""What the unit tests of the core share: cohorts as wanted, and the parts put together around them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from attrs import define, field

from lifecycle import events as e
from lifecycle.bookkeeping import Bookkeeper
from lifecycle.cohort import Cohort, FleetPolicy, Publication
from lifecycle.deadlines import Deadlines
from lifecycle.effects import Effects
from lifecycle.fleet import EngineFacts, Fleet, label_of
from lifecycle.gate import SubmissionGate
from lifecycle.ports import Acknowledgement, Capabilities, Channel
from lifecycle.recorder import EventSink, Recorder
from lifecycle.segments import Segments
from lifecycle.staleness import StalenessBudget, Unlimited
from lifecycle.states import Outcome, PauseMode, Standing, State
from lifecycle.testing import ScriptedEngine
from lifecycle.ticket import Ticket

E = TypeVar("E", bound=e.Event)

NAMES = ("left", "right")
RISKY = Capabilities(pause_modes=frozenset(PauseMode), at_risk_from_begin=frozenset({"broadcast"}))
"""Of an engine that may be partly written as soon as a broadcast update is begun."""
EVERY_MODE = Capabilities(pause_modes=frozenset(PauseMode))
BROADCAST = Channel(kind="broadcast", name="group-1")


def serving_cohort(
    *names: str,
    version: int | None = 0,
    policy: FleetPolicy | None = None,
    budget: StalenessBudget | None = None,
) -> Cohort:
    """Return a cohort whose engines all serve `version`; two engines where none is named."""
    fleet = Fleet(names or NAMES)
    for name in fleet:
        fleet.update(name, standing=Standing.SERVING, reason="", incarnation="1", version=version)
    return Cohort(fleet=fleet, policy=policy or FleetPolicy(), budget=budget or Unlimited(), version=version)


def publication_of(cohort: Cohort, target: int = 1, **fields: Any) -> Publication:
    """Open a publication of every engine of the cohort, and return it."""
    publication = cohort.publication = Publication(
        target=target, label=label_of(cohort.run, target), channel=BROADCAST, members=tuple(cohort.fleet), **fields
    )
    return publication


def a_ticket() -> Ticket:
    """Return a ticket that nobody counts."""
    return Ticket(1, 0)


def everything_about(cohort: Cohort) -> tuple[object, ...]:
    """Return all that a cohort holds, as values to compare."""
    return (
        dict(cohort.fleet),
        cohort.ledger.outstanding,
        (cohort.ledger.pauses, cohort.ledger.matched),
        (cohort.budget.version, cohort.budget.running, cohort.budget.accepted, cohort.budget.rejected),
        (cohort.version, cohort.epoch, cohort.mode, cohort.submission_open, cohort.generation_held),
        repr(cohort.publication),
    )


@define(kw_only=True)
class Workbench:
    """The parts of a lifecycle, without the lifecycle."""

    cohort: Cohort
    state: State
    recorder: Recorder
    books: Bookkeeper
    deadlines: Deadlines
    effects: Effects
    gate: SubmissionGate
    segments: Segments
    engines: dict[str, ScriptedEngine]
    events: list[e.Event] = field(factory=list)

    @property
    def left(self) -> EngineFacts:
        """What is known of the first engine."""
        return self.cohort.fleet["left"]

    def told(self, kind: type[E]) -> list[E]:
        """Return the events of one class so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def send(self, kind: type[e.Request], /, **fields: Any) -> e.Request:
        """Note that a request goes out to `left`."""
        if kind is e.BeginUpdate:
            fields.setdefault("kind", "broadcast")
        if kind is e.TransferWeights and self.cohort.publication is not None:
            self.cohort.publication.sent += 1
        request = self.recorder.emit(kind, engine="left", **fields)
        self.books.sending(request)
        return request

    def exchange(self, kind: type[e.Request], outcome: Outcome, **said: Any) -> EngineFacts:
        """Note a request to `left` that ends in `outcome`, and return what is known of the engine then."""
        self.books.record(self.send(kind), Acknowledgement(outcome=outcome, **said), 0.5)
        return self.cohort.fleet["left"]

    def move(self, state: State, *, submission_open: bool | None = None) -> None:
        """Be in `state`, as after a transition."""
        self.state = state
        self.cohort.submission_open = state is State.RUNNING if submission_open is None else submission_open
        self.gate.wake()
        self.segments.changed.give()


def workbench(
    *engines: ScriptedEngine,
    cohort: Cohort | None = None,
    state: State = State.RUNNING,
    sink: EventSink | None = None,
    deadlines: Deadlines | None = None,
    capabilities: Callable[[str], Capabilities] = lambda _: EVERY_MODE,
) -> Workbench:
    """Put the parts together around a cohort of these engines, all of which serve."""
    ports: Sequence[ScriptedEngine] = engines or [ScriptedEngine(name) for name in NAMES]
    by_name = {port.name: port for port in ports}
    cohort = cohort if cohort is not None else serving_cohort(*by_name)
    cohort.submission_open = state is State.RUNNING
    recorder = Recorder(cohort, sink)
    books = Bookkeeper(cohort, recorder, capabilities)
    deadlines = deadlines or Deadlines()
    bench: Workbench
    bench = Workbench(
        cohort=cohort,
        state=state,
        recorder=recorder,
        books=books,
        deadlines=deadlines,
        effects=Effects(by_name, cohort, recorder, books, deadlines),
        gate=SubmissionGate(cohort, recorder, lambda: bench.state),
        segments=Segments(by_name, cohort, recorder, deadlines, lambda: bench.state),
        engines=by_name,
    )
    recorder.subscribe(bench.events.append)
    return bench
