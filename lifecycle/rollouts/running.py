"""Ways to run users' code: in a context of its own, or in a thread that is never forgotten."""

import asyncio
import functools
import inspect
import math
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled
from attrs import define, field

from lifecycle.shielding import genuine, to_the_end

T = TypeVar("T")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine: also of a partial, a decorated function, or a callable object."""
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & inspect.CO_COROUTINE:  # nearly always, and cheaper to see
        return True
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def no_awaitable(value: T) -> T:
    """Return `value`. Raises `TypeError` for what nobody has awaited: of a lambda around a coroutine function, say."""
    if inspect.isawaitable(value) or inspect.isasyncgen(value):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("it looked like an ordinary function, ran in a thread, and returned a coroutine: use async def")
    return value


def cancelled_alone(error: BaseException) -> bool:
    """Whether `error` is a cancellation that no cancel scope around this task asked for.

    On asyncio anybody can raise `CancelledError`, cancel a task, or await a future that somebody cancelled.
    """
    return isinstance(error, asyncio.CancelledError) and anyio.current_effective_deadline() != -math.inf


def ends_this_task(error: BaseException) -> bool:
    """Whether `error` ends this task, rather than coming from users' code that merely looks cancelled."""
    if not isinstance(error, genuine()):
        return False
    if not cancelled_alone(error):
        return True
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@types.coroutine
def in_context(context: Context, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Run `coroutine` in `context`, as a task of its own would be, without the cost of a task.

    Cancellation: passed on to the coroutine.
    """
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    try:
        while True:
            try:
                awaited = context.run(step, value)
            except StopIteration as stop:
                result: T = stop.value
                return result
            try:
                value = yield awaited
                step = coroutine.send
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001 - passed on
                value, step = error, coroutine.throw
    finally:
        coroutine.close()


@define(eq=False)
class _Call:
    """A call in a thread, and what came of it."""

    function: Callable[[], Any]
    over: anyio.Event = field(factory=anyio.Event)
    claim: threading.Lock = field(factory=threading.Lock)
    """Taken once: by the thread that makes the call, or by the task that gives it up before that."""
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Make the call. Runs in the thread."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.value = self.function()
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            self.error = error
        finally:
            with suppress(RuntimeError):  # the event loop is gone
                anyio.from_thread.run_sync(self.over.set)


async def in_thread(function: Callable[[], T], limiter: anyio.CapacityLimiter) -> T:
    """Call `function` in a thread and return what it returns.

    Cancellation: raised once the function has returned, since a thread cannot be stopped and what it does counts.
    """
    call = _Call(function)
    async with limiter:
        try:
            # With a limiter of its own: asyncio's cancellation would give ours back while the thread still runs.
            await anyio.to_thread.run_sync(call.run, limiter=anyio.CapacityLimiter(1))
        except BaseException:
            # asyncio's own cancellation goes through the shield that anyio puts around the thread.
            if not call.claim.acquire(blocking=False):
                await to_the_end(call.over.wait)
            raise
    await checkpoint_if_cancelled()
    if call.error is not None:
        raise call.error
    value: T = call.value
    return value
