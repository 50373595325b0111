"""`Lifecycle`: the driver that users hold."""

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from . import events as e
from .assembly import Assembly, a_count, a_version
from .cohort import Intent
from .errors import OperationFailed
from .gate import Admission
from .generation import Generation, GenerationRequest, Tokens
from .history import Remembered
from .ports import EnginePort, TransferPort, WeightSource
from .procedures import Operation
from .shielding import to_the_end
from .staleness import Unlimited
from .states import PauseMode, State, Trigger
from .ticket import Ticket
from .views import Engines, PublishReport

_log = logging.getLogger("lifecycle")


class Lifecycle(Assembly):
    """Own the hand-over of weights between one trainer and its engines.

    `async with lifecycle:` attaches, and resumes where the guards allow; leaving it, by any way, closes: no engine
    whose weights are whole is left paused.

    One operation at a time holds the lifecycle; others wait for it, or raise `Busy` with `wait=False`. `admit()` and
    `generate()` are not operations: any number run at once. `close()` pre-empts: the operation that loses raises
    `LifecycleClosed`.
    """

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
                on_stale=self.budget.on_stale,
                measured_from=self.budget.measured_from,
                addresses=tuple(_address_of(port) for port in self._ports.values()),
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
                    reason = "its weights may be partly written; a publication cures it" if view.dirty else view.reason
                    _log.warning("%s is left paused: %s", view.name, reason)
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

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Let no operation begin within, so that nothing is published: to evaluate. `close()` pre-empts all the same.

        Calling an operation within raises `Reentrant`, also in a task that was begun within; others wait.

        Cancellation: operations may begin again.
        """
        async with self._turn.kept():
            yield

    async def drain(self) -> None:
        """Wait until no rollout holds a ticket. Suspend first, or new ones keep starting.

        Cancellation: nothing is changed.
        """
        self._turn.refuse_elsewhere()
        await self._context.gate.drained()

    def admit(self, *, evaluation: bool = False, group_size: int = 1) -> Admission:
        """Return a context manager that waits for a ticket, and rejects it on leaving unless it was accepted.

        Waits for RUNNING and a staleness capacity of at least `group_size`, first come first served. `evaluation`:
        outside the budget, and also in SUSPENDED. `group_size`: rollouts that are admitted and settled as a unit, int ≥
        1. Raises `LifecycleFaulted` or `LifecycleClosed` where waiting is in vain, and `ValueError` for a group that is
        larger than the budget.

        Cancellation: no ticket is held.
        """
        return Admission(self._context.gate, self._turn.refuse_elsewhere, evaluation=evaluation, group_size=group_size)

    async def generate(
        self,
        request: GenerationRequest,
        *,
        ticket: Ticket | None = None,
        on_tokens: Callable[[Tokens], None] | None = None,
    ) -> Generation:
        """Generate until a real stop, over however many pauses; every token carries the version that made it.

        With a ticket it works in RUNNING and SUSPENDED, and waits while generation is held. Without one it counts as an
        evaluation. `on_tokens`: called with every token of the generation, each once and in order, as early as it is
        known: with `request.stream` as the engine makes them. It must be quick; what it raises ends the generation.

        Raises `GenerationRefused` for a request that no engine will take, `GenerationInterrupted` when
        `request.retry_budget` attempts in a row keep no token, or when an engine takes back what `on_tokens` was given,
        `TicketSettled`, `LifecycleFaulted` or `LifecycleClosed`; `ValueError` for `on_tokens` with
        `partial_rollout=False`, whose tokens may be discarded.

        Cancellation: the engine is told by the closed connection; the ticket stays with the caller.
        """
        self._turn.refuse_elsewhere()
        if ticket is None:
            async with self.admit(evaluation=True) as own:
                generation = await self._context.segments.generate(request, own, on_tokens)
                own.accept()
                return generation
        generation = await self._context.segments.generate(request, ticket, on_tokens)
        ticket.saw(generation.versions)
        return generation

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
        `consumed`: accepted rollouts that training took since the version before; `None`: as many as `consume()` was
        told of, and where it never was, a batch a version.

        Raises `PublicationFailed` or `PauseFailed` with the version not advanced: then engines that may be partly
        written are fenced and stay paused, the others go on where they are enough, and publishing again, under the same
        version, cures the fleet; after `recover()` where too few engines are left. `ValueError` for a version that is
        no int of at least 0. After the commit point nothing is raised: engines that cannot follow are fenced, and the
        report names them.

        Cancellation: as for a failure before the commit point; carried to its end after it.
        """
        mode, consumed = self._usable(mode), a_count(consumed)
        intent = Intent(mode=mode, target=a_version(version), resume=resume)

        async def work() -> PublishReport:
            return await self._publisher.publish(source, intent, transfer or self._transfer, consumed)

        return await self._take(work)

    async def begin_update(self, *, version: int, transfer: TransferPort | None = None) -> None:
        """Open an update session in every engine: BEGIN_UPDATE. From here on weights may be at risk.

        Raises `PublicationFailed`, after the sessions that were opened have been closed.

        Cancellation: as for a failure.
        """
        intent = Intent(target=a_version(version))
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
        await self._operation(Trigger.FINISH_UPDATE, Intent(resume=resume), consumed=a_count(consumed))

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


def _address_of(port: EnginePort) -> str:
    """Return where an engine is, for the journal; empty for a port that does not say."""
    address = getattr(port, "address", "")
    return address if isinstance(address, str) else ""
