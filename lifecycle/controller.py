"""`Lifecycle`: the driver that users hold."""

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from . import events as e
from .cohort import Cohort, FleetPolicy, Intent
from .deadlines import Deadlines
from .driver import Driver
from .errors import OperationFailed, TicketSettled
from .fleet import Fleet
from .gate import Admission
from .generation import Generation, GenerationRequest
from .history import History, Remembered
from .journal import Journal
from .machine import LifecycleMachine
from .ports import EnginePort, TransferPort, WeightSource
from .procedures import Context, Operation
from .publication import Publisher
from .recorder import EventSink, Subscriber
from .shielding import to_the_end
from .staleness import StalenessBudget, Ticket, Unlimited
from .states import PauseMode, Standing, State, Trigger
from .turn import Turn
from .views import Engines, PublishReport, engines_of

_log = logging.getLogger("lifecycle")

T = TypeVar("T")


class Lifecycle:
    """Own the hand-over of weights between one trainer and its engines.

    `async with lifecycle:` attaches, and resumes where the guards allow; leaving it, by any way, closes: no engine
    whose weights are whole is left paused.

    One operation at a time holds the lifecycle; others wait for it, or raise `Busy` with `wait=False`. `admit()` and
    `generate()` are not operations: any number run at once. `close()` pre-empts: the operation that loses raises
    `LifecycleClosed`.
    """

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
        tells what a lifecycle before it left, so that attaching settles that. Raises `ValueError` for engines
        that share a name, a name that is empty, or a version below 0.
        """
        if not name or any(c.isspace() for c in name):
            raise ValueError(f"name must be a word, got {name!r}")
        if initial_version is not None:
            _a_version(initial_version)
        self.budget = budget if budget is not None else Unlimited()
        if initial_version and not self.budget.submitted and self.budget.version != initial_version:
            self.budget.restore(initial_version)
        self.pause_mode = pause_mode
        self.deadlines = deadlines or Deadlines()
        self._transfer = transfer
        engines = tuple(engines)
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
        self._context.recorder.subscribe(self._on_event)

    # --------------------------------------------------------------------------------------------------------- looking

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

    # -------------------------------------------------------------------------------------------------- begin and end

    async def __aenter__(self) -> Self:
        await self.attach()
        try:
            if self._machine.can(Trigger.RESUME):
                await self.resume()
            else:
                level = logging.INFO if self.version is None else logging.WARNING
                _log.log(
                    level,
                    "attached, but submission stays closed: %s. Publish, then resume(); or say by initial_version what "
                    "the engines hold already",
                    self.why_not(Trigger.RESUME),
                )
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def attach(self) -> None:
        """Wait until the engines are ready, find out how each stands, and settle what it was left with: ATTACH.

        Raises `AttachFailed`, naming the engines that are not ready within `Deadlines.attach`; the lifecycle is closed
        then.

        Cancellation: engines that were being continued are continued; the lifecycle is closed.
        """

        async def work() -> None:
            budget = None if isinstance(self.budget, Unlimited) else self.budget
            self._context.recorder.emit(
                e.LifecycleOpened,
                name=self._cohort.run,
                engines=tuple(self._ports),
                min_engines=self._cohort.required,
                batch_size=budget.batch_size if budget else None,
                max_staleness=budget.max_staleness if budget else None,
                max_concurrent=budget.max_concurrent if budget else None,
                accepted=budget.counted if budget else 0,
                addresses=tuple(getattr(port, "address", "") for port in self._ports.values()),
            )
            for name, known in self._history.engines.items():
                if name in self._ports and known != Remembered():
                    self._context.books.recall(name, known)
            await self._driver.run(Trigger.ATTACH, Intent(mode=self.pause_mode))

        try:
            await self._take(work)
        except BaseException:
            if self.state is State.CLOSED:
                await self.close()
            raise

    async def close(self) -> Engines:
        """End the lifecycle: stop what moves, continue every engine that is whole, leave every channel: CLOSE.

        Pre-empts the operation that runs. Idempotent. Returns the engines that could not be settled: each still owes a
        continue, because its weights may be partly written or because it does not answer.

        Cancellation: shielded; it takes as long as its requests' deadlines allow.
        """
        await self._turn.take_last(self._end, announce=self._driver.close_next)
        return Engines(view for view in self.engines if view.debt is not None)

    async def _end(self) -> None:
        self._context.effects.begin()
        try:
            if self.state is not State.CLOSED:
                await self._driver.run(Trigger.CLOSE, Intent(), transfer=self._transfer)
            for view in self.engines:
                if view.debt is not None:
                    _log.warning("%s is left paused: %s", view.name, view.reason)
        finally:
            for port in self._ports.values():
                await port.aclose()
            self._context.recorder.close()

    # ------------------------------------------------------------------------------------------------------ submission

    async def suspend(self, *, wait: bool = True) -> None:
        """Close the submission gate; rollouts in progress go on: SUSPEND.

        Cancellation: the gate stays as it was.
        """
        await self._operation(Trigger.SUSPEND, wait=wait)

    async def resume(self, *, wait: bool = True) -> None:
        """Open the submission gate: RESUME. Raises `TransitionRefused` while too few engines serve.

        Cancellation: the gate stays as it was.
        """
        await self._operation(Trigger.RESUME, wait=wait)

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """Keep submission closed within: to evaluate, to save. Opens it again if it was open and the guards allow.

        Cancellation: opened again as on any other way out.
        """
        was_running = self.state is State.RUNNING
        if was_running:
            await self.suspend()
        try:
            yield
        finally:
            if was_running:

                async def reopen() -> None:
                    if self._machine.can(Trigger.RESUME):
                        await self.resume()

                if (interruption := await to_the_end(reopen)) is not None:
                    raise interruption

    async def drain(self) -> None:
        """Wait until no rollout holds a ticket. Suspend first, or new ones keep starting.

        Cancellation: nothing is changed.
        """
        self._turn.refuse_elsewhere()
        await self._context.gate.drained()

    def admit(self, *, evaluation: bool = False) -> Admission:
        """Return a context manager that waits for a ticket, and rejects it on leaving unless it was accepted.

        Waits for RUNNING and a staleness capacity of at least 1, first come first served. `evaluation`: outside the
        budget, and also in SUSPENDED. Raises `LifecycleFaulted` or `LifecycleClosed` where waiting is in vain.

        Cancellation: no ticket is held.
        """
        return Admission(self._context.gate, self._turn.refuse_elsewhere, evaluation=evaluation)

    async def generate(self, request: GenerationRequest, *, ticket: Ticket | None = None) -> Generation:
        """Generate until a real stop, over however many pauses; every token carries the version that made it.

        With a ticket it works in RUNNING and SUSPENDED, and waits while generation is held. Without one it counts as an
        evaluation. Raises `GenerationRefused` for a request that no engine will take, `GenerationInterrupted` when
        attempt after attempt brings no token, `TicketSettled`, `LifecycleFaulted` or `LifecycleClosed`.

        Cancellation: the engine is told by the closed connection; the ticket stays with the caller.
        """
        self._turn.refuse_elsewhere()
        if ticket is None:
            async with self.admit(evaluation=True) as own:
                generation = await self._context.segments.generate(request, own.id)
                own.accept()
                return generation
        if ticket.settled:
            raise TicketSettled(f"ticket {ticket.id} was settled; a rollout generates before that")
        return await self._context.segments.generate(request, ticket.id)

    def consume(self, tickets: Iterable[Ticket]) -> tuple[int, ...]:
        """Record that a training step takes these accepted rollouts. Returns the staleness of each, in versions.

        Raises `ValueError` for a ticket that was not accepted, or has left the buffer before.
        """
        return self._context.gate.consume(tuple(tickets))

    def discard(self, tickets: Iterable[Ticket]) -> tuple[int, ...]:
        """Record that these accepted rollouts are dropped, too old for instance. Their capacity is free at once.

        Returns the staleness of each, in versions. Raises `ValueError` for a ticket that was not accepted, or has left
        the buffer before.
        """
        return self._context.gate.discard(tuple(tickets))

    # ------------------------------------------------------------------------------------------------------ generation

    async def pause_generation(self, mode: PauseMode | None = None, *, wait: bool = True) -> None:
        """Stop generation in every engine: PAUSE_GENERATION. `mode`: `None` for the lifecycle's own.

        Raises `PauseFailed`, naming the engines, after the others were continued; `ValueError` for a mode that an
        engine does not have.

        Cancellation: engines that were, or may have been, paused are continued.
        """
        mode = self._usable(mode)
        await self._operation(Trigger.PAUSE_GENERATION, Intent(mode=mode), wait=wait)

    async def continue_generation(self, *, wait: bool = True) -> None:
        """Let every engine whose weights are whole generate again: CONTINUE_GENERATION.

        Cancellation: carried to its end first.
        """
        await self._operation(Trigger.CONTINUE_GENERATION, wait=wait)

    async def abort_generation(self) -> None:
        """End every generation now: `generate()` returns what it has, with finish reason `abort`.

        Cancellation: some engines may not have been told.
        """

        async def work() -> None:
            self._context.segments.abort()
            result = await self._context.effects.fan_out(e.AbortGeneration, self._context.reachable)
            if result.failures:
                raise OperationFailed("generation may go on in some engines", result.failures)

        await self._take(work)

    # --------------------------------------------------------------------------------------------------------- weights

    async def publish(
        self,
        source: WeightSource,
        *,
        version: int,
        transfer: TransferPort | None = None,
        mode: PauseMode | None = None,
        resume: bool = True,
        consumed: int | None = None,
    ) -> PublishReport:
        """Bring every engine to `version`: suspend, pause, update, continue, resume; back to the state it found.

        The source's first bucket is made before anything is paused. `resume=False` leaves submission closed.
        `consumed`: accepted rollouts that training took, or dropped, since the version before; `None`: a batch a
        version.

        Raises `PublicationFailed` or `PauseFailed` with the version not advanced: then engines that may be partly
        written are fenced and stay paused, the others go on where they are enough, and publishing again, under the same
        version, cures the fleet; after `recover()` where too few engines are left. `ValueError` for a version that is
        no int of at least 0. After the commit point nothing is raised: engines that cannot follow are fenced, and the
        report names them.

        Cancellation: as for a failure before the commit point; carried to its end after it.
        """
        mode = self._usable(mode)
        intent = Intent(mode=mode, target=_a_version(version), resume=resume)

        async def work() -> PublishReport:
            return await self._publisher.publish(source, intent, transfer or self._transfer, consumed)

        return await self._take(work)

    async def begin_update(self, *, version: int, transfer: TransferPort | None = None) -> None:
        """Open an update session in every engine: BEGIN_UPDATE. From here on weights may be at risk.

        Raises `PublicationFailed`, after the sessions that were opened have been closed.

        Cancellation: as for a failure.
        """
        intent = Intent(target=_a_version(version))
        await self._take(lambda: self._publisher.begin(intent, transfer or self._transfer))

    async def transfer(self, source: WeightSource) -> int:
        """Send the weights, bucket by bucket: TRANSFER. Returns the number of buckets.

        The source is iterated on the caller's thread. Raises `PublicationFailed` with the update abandoned.

        Cancellation: the update is abandoned.
        """
        return await self._take(lambda: self._publisher.transfer(source, Intent()))

    async def finish_update(self, *, resume: bool = True, consumed: int | None = None) -> None:
        """Put the new weights in place, verify, continue, and open submission unless told otherwise: FINISH_UPDATE.

        Raises `PublicationFailed` before the commit point, with the update abandoned.

        Cancellation: abandoned before the commit point; carried to its end after it.
        """
        await self._operation(Trigger.FINISH_UPDATE, Intent(resume=resume), consumed=consumed)

    async def abandon_update(self) -> None:
        """Give the update up: ABANDON_UPDATE. Engines that may be partly written stay paused.

        Cancellation: carried to its end first.
        """
        await self._operation(Trigger.ABANDON_UPDATE)

    async def recover(self) -> None:
        """Probe every engine, also those that were lost, and settle what can be settled: RECOVER.

        Ends in SUSPENDED where enough engines are whole, and in PAUSED where only a publication can cure the fleet.
        Raises `TransitionRefused` where too few engines answer.

        Cancellation: engines that were being continued or paused keep their debts; call it again.
        """
        await self._operation(Trigger.RECOVER, Intent(mode=self.pause_mode))

    # ----------------------------------------------------------------------------------------------------------- inside

    def _usable(self, mode: PauseMode | None) -> PauseMode:
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

    async def _operation(
        self, trigger: Trigger, intent: Intent | None = None, *, wait: bool = True, consumed: int | None = None
    ) -> Operation:
        async def work() -> Operation:
            if trigger is not Trigger.RECOVER:
                self._publisher.forget_wish()
            return await self._driver.run(
                trigger, intent or Intent(mode=self.pause_mode), transfer=self._transfer, consumed=consumed
            )

        return await self._take(work, wait=wait)

    def _on_event(self, event: e.Event) -> None:
        if isinstance(event, e.StandingChanged):
            if event.after is Standing.LOST:
                self._context.segments.interrupt(event.engine)
            self._context.segments.changed.give()


def _a_version(version: Any) -> int:
    """Return `version`, or raise `ValueError` before anything is done with it."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"version must be an int of at least 0, got {version!r}")
    return int(version)
