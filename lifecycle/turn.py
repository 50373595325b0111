"""Whose turn it is: one operation at a time holds the lifecycle, and the last one takes it from whoever holds it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import current_token

from .errors import Busy, LifecycleClosed, Reentrant, WrongEventLoop
from .shielding import to_the_end
from .states import Trigger

T = TypeVar("T")

_kept: ContextVar[object | None] = ContextVar("rollout-lifecycle turn", default=None)


class Turn:
    """Lets operations in one by one, first come first served, until `take_last` ends them all."""

    def __init__(self, in_flight: Callable[[], Trigger | None]) -> None:
        self._in_flight = in_flight
        self._lock = anyio.Lock()
        self._holder: int | None = None
        self._keeper: object | None = None
        """Stands for the present turn: whoever was begun within a turn that was kept knows it."""
        self._scope: anyio.CancelScope | None = None
        self._closing = False
        self._closed = False
        self._home: Any = None

    async def take(self, work: Callable[[], Awaitable[T]], *, wait: bool = True) -> T:
        """Do `work` while nobody else does. Raises as `held()`, and what `work` raises.

        Cancellation: `work` is cancelled; the turn passes on.
        """
        async with self.held(wait=wait):
            return await work()

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Have the turn within, and let no task that is begun within ask for it: it would wait for ever.

        Raises as `held()`.

        Cancellation: the turn passes on.
        """
        async with self.held():
            token = _kept.set(self._keeper)
            try:
                yield
            finally:
                _kept.reset(token)

    @asynccontextmanager
    async def held(self, *, wait: bool = True) -> AsyncIterator[None]:
        """Have the turn within.

        Raises `Busy` where it would have to wait and `wait` is false, `Reentrant` from within the operation that holds
        the turn, `LifecycleClosed` when the last turn was taken before or meanwhile, and `WrongEventLoop`.

        Cancellation: the turn passes on.
        """
        self.refuse_elsewhere()
        self._refuse_reentrance()
        if wait:
            await self._lock.acquire()
        else:
            try:
                self._lock.acquire_nowait()
            except anyio.WouldBlock:
                raise Busy(self._in_flight()) from None
        try:
            if self._closing:
                raise LifecycleClosed("the lifecycle is closed")
            self._holder, self._keeper = anyio.get_current_task().id, object()
            with anyio.CancelScope() as self._scope:
                yield
                return
            raise LifecycleClosed("the lifecycle was closed during the operation")
        finally:
            self._holder = self._keeper = self._scope = None
            self._lock.release()

    async def take_last(self, work: Callable[[], Awaitable[None]], *, announce: Callable[[], None]) -> None:
        """Cancel whoever holds the turn, do `work` once, and let nobody in afterwards. Idempotent.

        `announce` is called before anybody is cancelled. Raises `Reentrant` from within the operation that holds the
        turn.

        Cancellation: shielded.
        """
        self.refuse_elsewhere()
        self._refuse_reentrance()
        announce()
        self._closing = True
        if self._scope is not None:
            self._scope.cancel()

        async def once() -> None:
            async with self._lock:
                if not self._closed:
                    await work()
                    self._closed = True

        if (interruption := await to_the_end(once)) is not None:
            raise interruption

    def refuse_elsewhere(self) -> None:
        """Raise `WrongEventLoop` in any event loop but the one of the first call: waiting there would be for ever."""
        here = _this_loop()
        self._home = self._home or here
        if self._home != here or here is None:
            raise WrongEventLoop(
                "this lifecycle lives in another event loop, perhaps of another thread: call it there, for instance by "
                "anyio.from_thread.run()"
            )

    def _refuse_reentrance(self) -> None:
        within = self._keeper is not None and _kept.get() is self._keeper
        if within or (self._holder is not None and self._holder == anyio.get_current_task().id):
            name = trigger.name if (trigger := self._in_flight()) else "another operation"
            raise Reentrant(f"called from inside {name}; operations do not nest")


def _this_loop() -> Any:
    """Return what stands for the event loop that runs here: the loop itself on asyncio, since a token costs more."""
    try:
        return asyncio._get_running_loop() or current_token()  # noqa: SLF001 - asyncio exports it under this name
    except RuntimeError:  # there is none: a thread
        return None
