"""A whole publication: suspend, pause, update, continue, resume, and back to the state it found."""

import time
from collections.abc import Iterator
from typing import Any

import anyio.lowlevel
from attrs import evolve

from .cohort import Cohort, Intent
from .driver import Driver
from .errors import (
    IllegalTransition,
    LifecycleError,
    PublicationFailed,
    TransferFailed,
    TransitionRefused,
    UnusableWeights,
)
from .guards import version_advances
from .machine import LifecycleMachine
from .ports import TransferPort, WeightSource
from .procedures import Operation
from .segments import Segments
from .shielding import to_the_end
from .states import PauseMode, State, Trigger
from .values import Bucket
from .views import PublishReport

_PUBLISHABLE = (State.RUNNING, State.SUSPENDED, State.PAUSED)


class Publisher:
    """Strings triggers together into publications. Its caller sees to it that only one runs at a time.

    Where a publication fails and the guards do not let it walk back, the state it found is remembered: the publication
    that cures the fleet goes there.
    """

    def __init__(self, driver: Driver, machine: LifecycleMachine, cohort: Cohort, segments: Segments) -> None:
        self._driver = driver
        self._machine = machine
        self._cohort = cohort
        self._segments = segments
        self._transfer: TransferPort | None = None
        self._target = 0
        self._wanted: State | None = None

    def forget_wish(self) -> None:
        """The user has moved the machine since a publication failed: the next one returns to where it is now."""
        self._wanted = None

    async def publish(
        self, source: WeightSource, intent: Intent, transfer: TransferPort | None, consumed: int | None
    ) -> PublishReport:
        """Carry out a publication, and walk back to the state it found. Raises as `Lifecycle.publish` tells.

        Cancellation: as for a failure before the commit point; carried to its end after it.
        """
        self._refuse_in_vain(intent)
        _check(source)
        if transfer is None:
            raise PublicationFailed("no transfer", [TransferFailed("give the lifecycle or publish() a transfer")])
        found, mode = self._wanted or self._machine.state, self._cohort.mode
        previous, interrupted = self._cohort.version, self._segments.in_flight
        # The first bucket is made while engines still generate: for some transfers that is most of the work.
        buckets = _with_first_made(transfer.buckets(source, intent.target or 0))
        failures: list[Exception] = []
        try:
            if self._machine.state is State.RUNNING:
                await self._driver.run(Trigger.SUSPEND, intent)
            if self._machine.state is State.SUSPENDED:
                failures += (await self._driver.run(Trigger.PAUSE_GENERATION, intent)).failures
            failures += (await self.begin(intent, transfer)).failures
            started = time.monotonic()
            sent = await self._send(buckets, intent)
            seconds = time.monotonic() - started
            resume = intent.resume and found is State.RUNNING
            operation = await self._driver.run(
                Trigger.FINISH_UPDATE, evolve(intent, resume=resume), transfer=transfer, consumed=consumed
            )
        except BaseException as error:
            await self._walk_back(found, intent, error, mode=mode)
            raise
        self._wanted = None
        failures += operation.failures
        if found is State.PAUSED:
            failures += await self._pause_again(mode)
        return self._report(intent, failures, sent, previous=previous, seconds=seconds, interrupted=interrupted)

    async def _pause_again(self, mode: PauseMode) -> list[Exception]:
        """Go back to PAUSED after the commit point, which nothing takes back. Returns why that did not succeed."""
        failures: list[Exception] = []

        async def again() -> None:
            try:
                if self._machine.can(Trigger.PAUSE_GENERATION):
                    failures.extend((await self._driver.run(Trigger.PAUSE_GENERATION, Intent(mode=mode))).failures)
            except LifecycleError as error:
                failures.append(error)

        if (interruption := await to_the_end(again)) is not None:
            raise interruption
        await anyio.lowlevel.checkpoint_if_cancelled()
        return failures

    async def begin(self, intent: Intent, transfer: TransferPort | None) -> Operation:
        """Carry out BEGIN_UPDATE, and remember with what the weights will travel.

        Cancellation: compensated.
        """
        operation = await self._driver.run(Trigger.BEGIN_UPDATE, intent, transfer=transfer)
        self._transfer, self._target = transfer, intent.target or 0
        return operation

    async def transfer(self, source: WeightSource, intent: Intent) -> int:
        """Carry out TRANSFER for every bucket of `source`. Returns how many. A failure abandons the update.

        Cancellation: the update is abandoned.
        """
        if self._transfer is None or self._machine.state is not State.UPDATING:
            raise IllegalTransition(Trigger.TRANSFER, self._machine.state, self._machine.allowed)
        _check(source)
        try:
            sent = await self._send(self._transfer.buckets(source, self._target), intent)
        except BaseException as error:
            if self._machine.state is State.UPDATING:
                await self._walk_back(State.PAUSED, intent, error)
            raise
        return len(sent)

    async def _send(self, buckets: Iterator[Bucket], intent: Intent) -> list[int]:
        """Send bucket by bucket; the source is iterated here, on the caller's thread. Returns their sizes in bytes."""
        sent: list[int] = []
        while True:
            try:
                bucket = next(buckets, None)
            except Exception as error:
                raise PublicationFailed("the weight source failed", [error]) from error
            if bucket is None:
                return sent
            await self._driver.run(Trigger.TRANSFER, intent, bucket=bucket)
            sent.append(bucket.nbytes)

    def _refuse_in_vain(self, intent: Intent) -> None:
        """Raise what BEGIN_UPDATE would raise, before anything is paused for it."""
        state = self._machine.state
        if state not in _PUBLISHABLE:
            raise IllegalTransition(Trigger.BEGIN_UPDATE, state, self._machine.allowed)
        if (reason := version_advances(self._cohort, intent)) is not None:
            raise TransitionRefused(Trigger.BEGIN_UPDATE, state, version_advances.__name__, reason)

    async def _walk_back(
        self, found: State, intent: Intent, error: BaseException, *, mode: PauseMode | None = None
    ) -> None:
        """Return to the state a failed publication found, as far as the guards allow."""
        if self._driver.closing:
            return

        async def back() -> None:
            try:
                if self._machine.state is State.UPDATING:
                    await self._driver.run(Trigger.ABANDON_UPDATE, intent)
                if found is not State.PAUSED and self._machine.can(Trigger.CONTINUE_GENERATION):
                    await self._driver.run(Trigger.CONTINUE_GENERATION, intent)
                if found is State.RUNNING and intent.resume and self._machine.can(Trigger.RESUME):
                    await self._driver.run(Trigger.RESUME, intent)
                if found is State.PAUSED and self._machine.state is State.SUSPENDED:
                    # Cancelled after the commit point, which continues: the state it found is one step back.
                    await self._driver.run(Trigger.PAUSE_GENERATION, Intent(mode=mode))
            except LifecycleError as further:
                error.add_note(f"on the way back: {further}")

        interruption = await to_the_end(back)
        if self._machine.state is State.FAULTED:
            error.add_note("the lifecycle is FAULTED: too few engines are left; recover(), then publish again")
        # What could not be restored now is restored by the publication that cures the fleet.
        self._wanted = found if self._machine.state is not found else None
        if interruption is not None:
            raise interruption from error

    def _report(
        self,
        intent: Intent,
        failures: list[Exception],
        sent: list[int],
        *,
        previous: int | None,
        seconds: float,
        interrupted: int,
    ) -> PublishReport:
        fleet = self._cohort.fleet
        return PublishReport(
            version=intent.target or 0,
            previous=previous,
            engines=tuple(facts.name for facts in fleet.serving),
            fenced={facts.name: facts.reason for facts in fleet.values() if not facts.serving},
            failures=tuple(failures),
            buckets=len(sent),
            nbytes=sum(sent),
            pause_seconds=self._cohort.pause_seconds,
            transfer_seconds=seconds,
            interrupted=interrupted,
            state=self._machine.state,
        )


def _check(source: Any) -> None:
    """Raise `UnusableWeights` for what yields no tensors, before anything is done with it."""
    if not callable(getattr(source, "tensors", None)):
        kind = type(source).__name__
        raise UnusableWeights(
            f"a weight source has a method tensors(), such as ModuleSource(model) or StateDictSource(dict); got {kind}"
        )


def _with_first_made(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    first = next(buckets, None)
    if first is None:
        raise UnusableWeights("the weight source yields nothing to publish")

    def chained() -> Iterator[Bucket]:
        yield first
        yield from buckets

    return chained()
