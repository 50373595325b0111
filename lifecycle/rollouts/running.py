"""Ways to run users' code: in a context of its own, or in a thread that is never forgotten."""

import inspect
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
from attrs import define

from lifecycle.shielding import to_the_end

T = TypeVar("T")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine: also for an object whose `__call__` does."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


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


@define
class _Call:
    """A call in a thread, and what came of it."""

    function: Callable[[], Any]
    over: anyio.Event
    begun: bool = False
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Make the call. Runs in the thread."""
        self.begun = True
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
    call = _Call(function, anyio.Event())
    try:
        await anyio.to_thread.run_sync(call.run, limiter=limiter)
    except BaseException:
        # asyncio's own cancellation goes through the shield that anyio puts around the thread.
        if call.begun:
            await to_the_end(call.over.wait)
        raise
    if call.error is not None:
        raise call.error
    value: T = call.value
    return value
