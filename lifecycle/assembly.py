"""How a lifecycle is put together, and what can be seen of it."""

import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from . import events as e
from .checks import whole
from .cohort import Cohort, FleetPolicy
from .deadlines import Deadlines
from .driver import Driver
from .fleet import Fleet
from .gate import SubmissionGate
from .history import History
from .journal import Journal
from .machine import LifecycleMachine
from .ports import EnginePort, TransferPort
from .procedures import Context
from .publication import Publisher
from .recorder import EventSink, Subscriber
from .staleness import StalenessBudget, Unlimited
from .states import PauseMode, Standing, State, Trigger
from .turn import Turn
from .views import Engines, engines_of

T = TypeVar("T")


class Assembly:
    """The parts of a lifecycle, and views of them. `Lifecycle` adds what can be done."""

    def __init__(
        self,
        engines: Iterable[EnginePort],
        *,
        transfer: TransferPort | None = None,
        budget: StalenessBudget | None = None,
        name: str = "run",
        initial_version: int | None = 0,
        pause_mode: PauseMode = PauseMode.ABORT,
        deadlines: Deadlines | None = None,
        policy: FleetPolicy | None = None,
        journal: "EventSink | str | os.PathLike[str] | None" = None,
    ) -> None:
        """Put the parts together. Nothing is sent before `async with` or `attach()`.

        `transfer` may be given for each `publish()` instead. `budget`: `None` for no bound. `name`: the run; engines
        are labelled `NAME:VERSION`. `initial_version`: what the engines hold already; `None`: nothing serves before
        the first publication. `journal`: a file, continued where it exists, or a sink; a file also
        tells what a lifecycle before it left, so that attaching settles that. Raises `TypeError` for
        what is of another type, and `ValueError` for engines
        that share a name, a name that is empty, or a version below 0; for a journal `OSError` where it cannot be
        opened or another process writes it, and `JournalUnreadable`.
        """
        _check_types(name=name, pause_mode=pause_mode, budget=budget, deadlines=deadlines, policy=policy)
        if not name or any(c.isspace() for c in name):
            raise ValueError(f"name must be a word, got {name!r}")
        if initial_version is not None:
            a_version(initial_version)
        self.budget = budget if budget is not None else Unlimited()
        if initial_version is not None:
            _bring_to(initial_version, self.budget)
        self.pause_mode = pause_mode
        self.deadlines = deadlines or Deadlines()
        self._transfer = transfer
        engines = tuple(engines)
        _check_ports(engines)
        self._ports = {port.name: port for port in engines}
        self._cohort = Cohort(
            fleet=Fleet(port.name for port in engines),
            run=name,
            policy=policy or FleetPolicy(),
            budget=self.budget,
            version=initial_version,
        )
        sink = Journal(journal) if isinstance(journal, (str, os.PathLike)) else journal
        self._history = sink.history if isinstance(sink, Journal) else History()
        self._machine = LifecycleMachine(self._cohort)
        self._context = Context.of(self._cohort, self._machine, self._ports, self.deadlines, sink)
        self._driver = Driver(self._context, self._machine)
        self._publisher = Publisher(self._driver, self._machine, self._cohort, self._context.segments)
        self._turn = Turn(lambda: self._machine.in_flight)
        self._context.recorder.react(e.StandingChanged, self._on_standing)

    @property
    def state(self) -> State:
        """What is proven."""
        return self._machine.state

    @property
    def in_flight(self) -> Trigger | None:
        """What is being attempted."""
        return self._machine.in_flight

    @property
    def version(self) -> int | None:
        """The published version; `None` before the first."""
        return self._cohort.version

    @property
    def engines(self) -> Engines:
        """Every engine as it stands now, by position or name."""
        return engines_of(self._cohort)

    @property
    def running(self) -> int:
        """Rollouts that hold a ticket, evaluations included."""
        return self._context.gate.running

    @property
    def gate(self) -> SubmissionGate:
        """The submission gate, for executors. `admit()` is what others want."""
        return self._context.gate

    def refuse_elsewhere(self) -> None:
        """Raise `WrongEventLoop` in another event loop, or thread, than the one this lifecycle lives in."""
        self._turn.refuse_elsewhere()

    def can(self, trigger: Trigger) -> bool:
        """Whether `trigger` could begin now. Changes nothing and never raises."""
        return self._machine.can(trigger)

    def why_not(self, trigger: Trigger) -> str | None:
        """Return why `trigger` could not begin now, or `None` if it could. Changes nothing and never raises."""
        return self._machine.why_not(trigger)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback` with every event, in order, from now on. Returns what ends that.

        It is called synchronously, between the steps of an operation: it must be quick, and it cannot stop anything.
        What it raises goes to the log.
        """
        return self._context.recorder.subscribe(callback)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _usable(self, mode: PauseMode | None) -> PauseMode:
        if mode is not None:
            _expect("mode", mode, PauseMode)
        mode = mode or self.pause_mode
        lacking = [name for name, port in self._ports.items() if mode not in port.capabilities.pause_modes]
        if lacking:
            raise ValueError(f"{', '.join(lacking)} cannot pause in mode {mode.value}")
        return mode

    async def _take(self, work: Callable[[], Awaitable[T]], *, wait: bool = True) -> T:
        """Do `work` when it is its turn, within the time that an operation has."""

        async def timed() -> T:
            self._context.effects.begin()
            return await work()

        return await self._turn.take(timed, wait=wait)

    def _on_standing(self, event: e.StandingChanged) -> None:
        if event.after is Standing.LOST:
            self._context.segments.interrupt(event.engine)
        self._context.segments.changed.give()


def _bring_to(initial_version: int, budget: StalenessBudget) -> None:
    """Let a budget that nothing was admitted from begin at `initial_version`. Raises `ValueError` for one beyond it."""
    if budget.version > initial_version:
        raise ValueError(
            f"the budget is at version {budget.version} and initial_version is {initial_version}: say by "
            "initial_version what the engines hold"
        )
    if not budget.submitted:
        budget.restore(initial_version)


def a_count(consumed: Any) -> int | None:
    """Return `consumed`, or raise `ValueError` while nothing is done yet: after the commit point is too late."""
    return None if consumed is None else whole("consumed", consumed, 0)


def _check_types(**arguments: object) -> None:
    """Raise `TypeError` for an argument of another type, before it fails somewhere else."""
    kinds: dict[str, type] = {
        "name": str,
        "pause_mode": PauseMode,
        "budget": StalenessBudget,
        "deadlines": Deadlines,
        "policy": FleetPolicy,
    }
    for name, value in arguments.items():
        if value is not None or name in {"name", "pause_mode"}:
            _expect(name, value, kinds[name])


def _check_ports(engines: tuple[Any, ...]) -> None:
    for port in engines:
        if not callable(getattr(port, "perform", None)):
            raise TypeError(f"an engine is an engine port such as SGLangEngine(url), got {port!r}")


def _expect(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")


def a_version(version: Any) -> int:
    """Return `version`, or raise `ValueError` before anything is done with it."""
    return whole("version", version, 0)
