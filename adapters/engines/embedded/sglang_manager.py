"""SGLang's front-end state: the pause gate, the reader-writer lock around weights, and the version it believes in.

The locks are those of the real server's tokenizer manager, held for as long, since its deadlocks and its lies follow
from them: a paused abort waits for ever for requests that an earlier in_place pause has stopped; an update without a
pause waits for every request; /model_info keeps the old version when only the flush after an update failed.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from adapters.engines.embedded.scheduler import SchedulerState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from adapters.engines.embedded.engine import Engine
    from adapters.engines.embedded.sequence import Sequence

__all__ = ["ReadWriteLock", "TokenizerManager"]


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before later readers."""

    def __init__(self) -> None:
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0
        self._waiters: list[asyncio.Future[None]] = []

    def locked(self) -> bool:
        """Whether anybody holds it."""
        return self._writing or self._readers > 0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Hold it together with other readers."""
        await self._until(lambda: not self._writing and not self._writers_waiting)
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._wake()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Hold it alone."""
        self._writers_waiting += 1
        try:
            await self._until(lambda: not self.locked())
            self._writing = True
        finally:
            self._writers_waiting -= 1
            self._wake()
        try:
            yield
        finally:
            self._writing = False
            self._wake()

    async def _until(self, free: Callable[[], bool]) -> None:
        while not free():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class TokenizerManager:
    """See the module.

    Args:
        engine: The engine behind the front end.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.paused = False
        self.healthy = True
        self.version = engine.scheduler.version
        self.model_path = engine.path
        self.served_model_name = engine.options.served_model_name or engine.path
        self.lock = ReadWriteLock()
        self._gate = asyncio.Condition()
        self._last_answer = time.monotonic()
        engine.on_answer = self._answered

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Wait at the gate while the engine is paused, then keep weight updates out until the block ends."""
        async with self._gate:
            await self._gate.wait_for(lambda: not self.paused)
        async with self.lock.reading():
            yield

    @asynccontextmanager
    async def updating(self, *, holds_gate: bool) -> AsyncIterator[None]:
        """Keep generation out of the block: by the lock, or while paused by the pause.

        Args:
            holds_gate: Whether a continue has to wait for the end of the block. A disk update lets it overtake.
        """
        async with AsyncExitStack() as held:
            await held.enter_async_context(self._gate)
            if not self.paused:
                await held.aclose()
                await held.enter_async_context(self.lock.writing())
            elif not holds_gate:
                await held.aclose()
            yield

    async def pause(self, mode: str) -> None:
        """Stop generation: mode "abort", "retract" or "in_place"."""
        async with self._gate:
            self.paused = True
            if mode != "abort":
                self.engine.post(lambda: self._pause_scheduler(retract=mode == "retract"))
                return
            # The gate stays held while this waits, so a continue cannot get in: the real server's deadlock.
            while True:
                self.abort(lambda _: True)
                if not self.lock.locked():
                    return
                await asyncio.sleep(self.engine.options.pause_poll_seconds)

    async def resume(self) -> None:
        """Undo any number of pauses."""
        async with self._gate:
            self.paused = False
            self.engine.post(lambda: self.engine.scheduler.set_state(SchedulerState.UNPAUSED))
            self._gate.notify_all()

    def abort(self, matches: Callable[[Sequence], bool]) -> None:
        """Abort the matching requests that have reached the scheduler; those at the gate have not."""
        self.engine.post(lambda: self.engine.scheduler.request_abort(matches))

    def abort_request(self, request_id: str) -> None:
        """Abort the requests whose id begins with `request_id`."""
        self.abort(lambda sequence: sequence.request_id.startswith(request_id))

    async def alive(self, generate_one: Callable[[], asyncio.Task[None]]) -> bool:
        """Wait for a sign of life of the scheduler: any answer will do, and a paused engine gives none.

        Args:
            generate_one: Starts a tiny generation through the gate.
        """
        asked = time.monotonic()
        options = self.engine.options
        task = generate_one()
        try:
            while time.monotonic() - asked < options.health_timeout_seconds:
                await asyncio.sleep(min(options.pause_poll_seconds, options.health_timeout_seconds))
                if self._last_answer > asked:
                    self.healthy = True
                    return True
        finally:
            task.cancel()
        self.healthy = False
        return False

    def _pause_scheduler(self, *, retract: bool) -> None:
        if retract:
            self.engine.scheduler.retract()
        self.engine.scheduler.set_state(SchedulerState.PAUSED_ALL)

    def _answered(self) -> None:
        self._last_answer = time.monotonic()
