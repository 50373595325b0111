"""The real machine, ledger, bookkeeper, procedures and driver, put into any state and taken out of it again."""

from collections.abc import Sequence
from typing import Any, cast

from attrs import evolve

from lifecycle import events as e
from lifecycle.bookkeeping import Bookkeeper
from lifecycle.cohort import Cohort, FleetPolicy, Publication
from lifecycle.driver import Driver
from lifecycle.fleet import EngineFacts, Fleet, label_of
from lifecycle.gate import SubmissionGate
from lifecycle.machine import LifecycleMachine
from lifecycle.procedures import Context
from lifecycle.publication import Publisher
from lifecycle.recorder import E, Recorder
from lifecycle.segments import Segments
from lifecycle.states import PauseMode, State
from lifecycle.values import Capabilities, Channel

from .conduct import ON_EVENT, WATCHED, History
from .courier import Courier
from .oracle import Oracle
from .predicates import Moment
from .snapshot import Engine, Key, Numbers, Part, Progress, Shared, normal, part_of
from .truth import RUN, Truth
from .world import World


class _Port:
    """What the parts ask of an engine port besides `perform`, which `World` stands in for."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.name = name
        self.capabilities = capabilities


class SparingRecorder(Recorder):
    """Makes requests, and of the facts those that a predicate looks at: nobody reads the others."""

    def emit(self, kind: type[E], /, **fields: Any) -> E:
        """Make an event, if anybody wants it."""
        if issubclass(kind, e.Request) or kind in WATCHED:
            return super().emit(kind, **fields)
        return cast("E", None)


class Stage:
    """One lifecycle, used again and again."""

    def __init__(self, engines: int, *, policy: FleetPolicy, mode: PauseMode, buckets: int, at_risk: bool) -> None:
        self.names = tuple(f"E{number}" for number in range(1, engines + 1))
        self.mode = mode
        self.oracle = Oracle()
        self.courier = Courier(buckets)
        self.cohort = Cohort(fleet=Fleet(self.names), run=RUN, policy=policy, version=1)
        self.machine = LifecycleMachine(self.cohort)
        ports: Any = {name: _Port(name, _capabilities(at_risk)) for name in self.names}
        recorder = SparingRecorder(self.cohort)
        books = Bookkeeper(self.cohort, recorder, lambda name: ports[name].capabilities)
        self.world = World(self.cohort, recorder, books, self.oracle, at_risk_from_begin=at_risk)
        stand_in: Any = self.world
        context = Context(
            cohort=self.cohort,
            recorder=recorder,
            books=books,
            effects=stand_in,
            gate=SubmissionGate(self.cohort, recorder, lambda: self.machine.state),
            segments=Segments(ports, self.cohort, recorder, self.world.deadlines, lambda: self.machine.state),
        )
        self.driver = Driver(context, self.machine)
        self.publisher = Publisher(self.driver, self.machine, self.cohort, context.segments)
        self.now = Moment(cohort=self.cohort, machine=self.machine, gate=context.gate, truths=self.world.truths)
        self.numbers = Numbers()
        self._publishing = vars(vars(self.driver)["_procedures"][e.StopTransfer].__self__)
        self._inside = (vars(self.machine), vars(self.cohort.fleet), vars(self.cohort.ledger), vars(self.publisher))
        self._normal: dict[Any, int] = {}
        self._dressed: dict[tuple[int, int], Engine] = {}
        self._history = History()
        recorder.subscribe(self._on_event)
        self.world.closing = self.driver.close_next

    def _on_event(self, event: e.Event) -> None:
        for predicate in ON_EVENT:
            if (reason := predicate(event, self.now, self._history)) is not None:
                self.world.breaches.append(f"{predicate.__name__}: {reason}")

    # ------------------------------------------------------------------------------------------------------------ load

    def load(self, key: Key) -> None:
        """Bring everything into the state `key`."""
        *numbers, shared_number = key
        shared: Shared = self.numbers.value(shared_number)
        engines = [self._named(number, position) for position, number in enumerate(numbers)]
        machine, fleet, ledger, publisher = self._inside
        machine["_model"].state, machine["_attempt"] = shared.state, None
        fleet["_facts"] = {name: engine.facts for name, engine in zip(self.names, engines, strict=True)}
        debts = {engine.debt.engine: engine.debt for engine in engines if engine.debt is not None}
        ledger.update(_debts=debts, pauses=len(debts), matched=0)
        publisher["_wanted"] = shared.wanted
        self.world.truths.update(zip(self.names, (engine.truth for engine in engines), strict=True))
        self.world.base = 1 if shared.state is State.CLOSED else 0
        self.world.start()
        self.driver.closing = False
        self._history = History()
        self._load_cohort(shared, engines)

    def _load_cohort(self, shared: Shared, engines: Sequence[Engine]) -> None:
        cohort, courier = self.cohort, self.courier
        cohort.version = cohort.budget.version = 1
        cohort.epoch, cohort.pause_seconds = 0, 0.0
        cohort.submission_open, cohort.generation_held = shared.submission_open, shared.generation_held
        cohort.mode = shared.mode
        named = list(zip(self.names, (engine.part for engine in engines), strict=True))
        courier.standing = courier.channel([n for n, part in named if part.in_channel]) if shared.stands else None
        joined = {courier.standing.name: (courier, courier.standing)} if courier.standing and shared.joined else {}
        cohort.publication = None
        if (progress := shared.progress) is not None:
            channel = courier.standing if progress.channel_stands and courier.standing else None
            if channel is None:
                channel = courier.channel([n for n, part in named if part.in_its_channel])
            if progress.channel_joined:
                joined[channel.name] = (courier, channel)
            cohort.publication = _publication(progress, named, channel)
        cut = courier.channel([n for n, part in named if part.in_cut_channel])
        if cut.rank_offsets:
            joined[cut.name] = (courier, cut)
        self._publishing.update(_moving=courier if shared.moving else None, _joined=joined, _cut={cut.name})

    def _named(self, number: int, position: int) -> Engine:
        """Return the engine with `number`, as the one at `position`."""
        if (number, position) not in self._dressed:
            engine: Engine = self.numbers.value(number)
            name = self.names[position]
            debt = None if engine.debt is None else evolve(engine.debt, engine=name)
            self._dressed[number, position] = evolve(engine, facts=evolve(engine.facts, name=name), debt=debt)
        return self._dressed[number, position]

    # ------------------------------------------------------------------------------------------------------------ save

    def save(self) -> tuple[Key, tuple[int, ...]]:
        """Return the state everything is in, and which engine has come to which position in it."""
        numbers = [self._number(name, resting=True) for name in self.names]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        return (*(numbers[position] for position in order), self.numbers.of(self._shared())), tuple(order)

    def place(self) -> tuple[object, ...]:
        """Return the state in the middle of an operation, with how it came there since its beginning."""
        paths = self.world.paths
        engines = sorted((self._number(name, resting=False), tuple(paths[name])) for name in self.names)
        return tuple(self.world.path), tuple(engines), self.numbers.of(self._shared())

    def _number(self, name: str, *, resting: bool) -> int:
        cohort, standing = self.cohort, self.courier.standing
        older = max(0, (cohort.version or 1) - 1)
        part = part_of(
            cohort.publication,
            name,
            standing=standing is not None and name in standing.rank_offsets,
            cut=any(name in channel.rank_offsets for channel in self._cut()),
        )
        raw = (cohort.fleet[name], cohort.ledger.owed(name), part, self.world.truths[name], older, resting)
        number = self._normal.get(raw)
        if number is None:
            engine = Engine(facts=raw[0], debt=raw[1], part=part, truth=raw[3])
            number = self._normal[raw] = self.numbers.of(normal(engine, older, resting=resting))
        return number

    def _cut(self) -> list[Channel]:
        """Return the channels that were cut, and that engines have yet to leave."""
        joined = self._publishing["_joined"]
        return [joined[name][1] for name in self._publishing["_cut"] if name in joined]

    def _shared(self) -> Shared:
        cohort, publication, standing = self.cohort, self.cohort.publication, self.courier.standing
        joined = self._publishing["_joined"]
        progress = None
        if publication is not None:
            progress = Progress(
                target=publication.target - (cohort.version or 1) + 1,
                sent=publication.sent,
                acknowledged=publication.acknowledged,
                complete=publication.complete,
                channel_stands=publication.channel is standing,
                channel_joined=publication.channel.name in joined,
            )
        return Shared(
            state=self.machine.state,
            submission_open=cohort.submission_open,
            generation_held=cohort.generation_held,
            mode=cohort.mode,
            progress=progress,
            moving=self._publishing["_moving"] is not None,
            stands=standing is not None,
            joined=standing is not None and standing.name in joined,
            wanted=self._inside[3]["_wanted"],
        )

    def beginning(self, truths: Sequence[Truth]) -> Key:
        """Return the state before ATTACH, with engines as `truths` says."""
        engines = [Engine(facts=EngineFacts(name=""), debt=None, part=Part(), truth=truth) for truth in truths]
        numbers = sorted(self.numbers.of(normal(engine, 0, resting=True)) for engine in engines)
        return (*numbers, self.numbers.of(Shared(mode=self.mode)))


def _capabilities(at_risk: bool) -> Capabilities:
    kinds = frozenset({Courier.kind})
    return Capabilities(pause_modes=frozenset(PauseMode), at_risk_from_begin=kinds if at_risk else frozenset())


def _publication(progress: Progress, named: Sequence[tuple[str, Part]], channel: Channel) -> Publication:
    return Publication(
        target=progress.target,
        label=label_of(RUN, progress.target),
        channel=channel,
        members=tuple(name for name, part in named if part.member),
        dirtied={name: part.dirtied for name, part in named if part.dirtied is not None},
        opened={name for name, part in named if part.opened},
        sent=progress.sent,
        acknowledged=progress.acknowledged,
        complete=progress.complete,
        finished={name for name, part in named if part.finished},
        verified={name for name, part in named if part.verified},
    )
