"""Perform requests at engines: concurrently, each with a deadline, each ending in exactly one recorded outcome."""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
from attrs import define, evolve, field, frozen

from . import events as e
from .bookkeeping import Bookkeeper
from .cohort import Cohort
from .deadlines import Deadlines
from .errors import EngineFailure, TransferFailed
from .ports import EnginePort
from .recorder import Recorder
from .shielding import genuine, in_good_order
from .states import Outcome, PauseMode
from .values import Acknowledgement

Half = Callable[[], Awaitable[None]]

_DURABLE = (e.PauseGeneration, e.BeginUpdate, e.TransferWeights)
"""Requests that must be on disk before they go out: a killed trainer leaves a record of what it paused and wrote."""
_FIRST_BACKOFF = 0.05
_LONGEST_BACKOFF = 1.0


@frozen(kw_only=True)
class Result:
    """What a fan-out brought."""

    acknowledgements: Mapping[str, Acknowledgement]
    failures: tuple[Exception, ...]
    """One `EngineFailure` for each request that is not known to be done, and the error of the trainer's half."""


@define(kw_only=True)
class _FanOut:
    """One fan-out while it runs."""

    pending: dict[str, e.Request]
    unsent: set[str]
    collective: bool
    """The engines' answers depend on each other and on the trainer's half."""
    acknowledgements: dict[str, Acknowledgement] = field(factory=dict)
    error: Exception | None = None
    all_sent: anyio.Event = field(factory=anyio.Event)
    engines: anyio.CancelScope = field(factory=anyio.CancelScope)
    trainer: anyio.CancelScope = field(factory=anyio.CancelScope)

    def sent(self, name: str) -> None:
        self.unsent.discard(name)
        if not self.unsent:
            self.all_sent.set()

    def fail(self, grace: float) -> None:
        """One half failed: free the other, and wait for the engines only a little longer."""
        self.trainer.cancel()
        self.engines.deadline = min(self.engines.deadline, anyio.current_time() + grace)


class Effects:
    """Carries requests to the engine ports and their outcomes to the bookkeeper."""

    def __init__(
        self,
        ports: Mapping[str, EnginePort],
        cohort: Cohort,
        recorder: Recorder,
        bookkeeper: Bookkeeper,
        deadlines: Deadlines,
    ) -> None:
        self._ports = ports
        self._cohort = cohort
        self._recorder = recorder
        self._bookkeeper = bookkeeper
        self.deadlines = deadlines
        self._until = float("inf")

    def begin(self) -> None:
        """Begin an operation: from now on it has `Deadlines.operation` seconds."""
        self._until = anyio.current_time() + self.deadlines.operation

    def allowed(self, seconds: float) -> float:
        """Return how many of `seconds` the operation has left; never less than the grace that cleaning up needs."""
        return min(seconds, max(self._until - anyio.current_time(), self.deadlines.grace))

    async def fan_out(
        self,
        kind: type[e.Request],
        names: Iterable[str],
        /,
        *,
        trainer: Half | None = None,
        cut: Half | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> Result:
        """Send a request of `kind` to every named engine at once, and wait for all outcomes.

        `trainer` is the trainer's half of a collective: it starts once every engine's request has been written. When
        either half fails, `cut` frees the other, and engines have `Deadlines.grace` seconds left to answer. `timeout`
        is in seconds; `None`: what `Deadlines` says for this kind; never more than the operation has left. An engine
        that has not answered in time counts as unknown. Never raises for an engine; raises `OSError` when the journal
        cannot be written, with nothing sent.

        Cancellation: requests without an outcome are recorded as unknown. A collective is given `Deadlines.grace`
        seconds to come to its end, and then cut.
        """
        timeout = self.allowed(self.deadlines.of(kind) if timeout is None else timeout)
        requests = {name: self._recorder.emit(kind, engine=name, **fields) for name in names}
        for request in requests.values():
            self._bookkeeper.sending(request)
        run = _FanOut(pending=dict(requests), unsent=set(requests), collective=trainer is not None)
        if not requests:
            run.all_sent.set()
        if requests and issubclass(kind, _DURABLE):
            self._make_durable(run)

        async def perform() -> None:
            async with anyio.create_task_group() as halves:
                if trainer is not None:
                    halves.start_soon(self._trainer_half, run, trainer, cut, timeout)
                with run.engines:
                    async with anyio.create_task_group() as engines:
                        for request in requests.values():
                            engines.start_soon(self._engine_half, run, request, timeout)

        try:
            if trainer is None:
                await perform()
            else:
                # An engine that is cut off while it joins, or begins to receive, may hang until its own time is up.
                await in_good_order(perform, grace=self.deadlines.grace)
        finally:
            for name, request in list(run.pending.items()):
                given_up = Acknowledgement(outcome=Outcome.UNKNOWN, detail="given up")
                self._conclude(run, name, request, given_up, given_up=True)
        return Result(acknowledgements=run.acknowledgements, failures=_failures(kind, run))

    def _make_durable(self, run: _FanOut) -> None:
        """Put requests on disk before they go out. Where that fails, none goes out."""
        try:
            self._recorder.sync()
        except OSError:
            unsent = Acknowledgement(outcome=Outcome.NOT_DONE, detail="the journal cannot be written", untouched=True)
            for name, request in list(run.pending.items()):
                self._conclude(run, name, request, unsent)
            raise

    async def _trainer_half(self, run: _FanOut, half: Half, cut: Half | None, timeout: float) -> None:
        finished = False
        try:
            with run.trainer:
                await run.all_sent.wait()
                with within(timeout, "the trainer's half"):
                    await half()
                finished = True
        except genuine():
            raise
        except BaseException as error:  # noqa: BLE001 - a transfer may fail in any way; the error is kept and reported
            run.error = error if isinstance(error, Exception) else TransferFailed(f"{type(error).__name__}: {error}")
            run.fail(self.deadlines.grace)
        finally:
            if not finished and cut is not None:
                with anyio.CancelScope(shield=True):
                    await cut()

    async def _engine_half(self, run: _FanOut, request: e.Request, timeout: float) -> None:
        name = str(request.engine)
        acknowledgement = await self._until_known(request, timeout, lambda: run.sent(name))
        self._conclude(run, name, request, acknowledgement)
        if acknowledgement.done:
            run.sent(name)
        elif run.collective:
            run.fail(self.deadlines.grace)

    def _conclude(
        self, run: _FanOut, name: str, request: e.Request, acknowledgement: Acknowledgement, *, given_up: bool = False
    ) -> None:
        del run.pending[name]
        run.acknowledgements[name] = acknowledgement
        self._bookkeeper.record(request, acknowledgement, time.monotonic() - request.monotonic, given_up=given_up)

    async def _until_known(self, request: e.Request, timeout: float, sent: Callable[[], None]) -> Acknowledgement:
        """Send the request; send it again, with backoff, while its outcome is unknown and that does no harm."""
        end = anyio.current_time() + timeout
        patient = getattr(request, "mode", None) is PauseMode.WAIT
        backoff = _FIRST_BACKOFF
        lost = False
        attempts = 0
        while True:
            attempts += 1
            left = end - anyio.current_time()
            # An attempt gets half of what is left, so that a lost reply does not eat the retries.
            share = left if patient or not request.idempotent or left < 2 * _FIRST_BACKOFF else left / 2
            acknowledgement = await self._once(request, share, sent)
            again = end - anyio.current_time() - backoff
            if not request.idempotent or acknowledgement.outcome is not Outcome.UNKNOWN or again <= 0:
                return _in_doubt(acknowledgement, attempts, timeout) if lost else acknowledgement
            lost = True
            await anyio.sleep(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    async def _once(self, request: e.Request, timeout: float, sent: Callable[[], None]) -> Acknowledgement:
        name = str(request.engine)
        with anyio.move_on_after(timeout):
            try:
                return await self._ports[name].perform(request, self._cohort.fleet[name], timeout=timeout, sent=sent)
            except genuine():
                raise
            except BaseException as error:  # noqa: BLE001 - a port that raises is a bug: it tells nothing of the engine
                return Acknowledgement(outcome=Outcome.UNKNOWN, detail=f"adapter error: {error!r}"[:300])
        return Acknowledgement(outcome=Outcome.UNKNOWN, detail=f"no answer within {timeout:.3g} s")


@contextmanager
def within(timeout: float, what: str) -> Iterator[None]:
    """Raise `TransferFailed` where what the trainer has to do takes more than `timeout` seconds."""
    with anyio.move_on_after(timeout) as scope:
        yield
    if scope.cancelled_caught:
        raise TransferFailed(f"{what} took more than {timeout:.3g} s")


def _in_doubt(repeated: Acknowledgement, attempts: int, timeout: float) -> Acknowledgement:
    """Return what is known after a repetition: that it was not done does not undo the lost request before it."""
    if repeated.done:
        return repeated
    return evolve(
        repeated, outcome=Outcome.UNKNOWN, detail=f"{repeated.detail} ({attempts} attempts, {timeout:.3g} s allowed)"
    )


def _failures(kind: type[e.Request], run: _FanOut) -> tuple[Exception, ...]:
    failed: list[Exception] = [
        EngineFailure(name, kind.__name__, ack.outcome, ack.detail or "no reason given")
        for name, ack in run.acknowledgements.items()
        if not ack.done
    ]
    return (*failed, run.error) if run.error is not None else tuple(failed)
