"""Carrying on to the end, whoever cancels."""

from collections.abc import Awaitable, Callable

import anyio


async def to_the_end(step: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Do `step` whatever cancellation comes. Returns the one that is still to be raised, or `None`.

    A shield holds anyio's cancellation back, and trio's. It does not hold back asyncio's own (`Task.cancel()`,
    `asyncio.timeout()`), which interrupts once: `step` is done again then, so it must be one that goes on where it was
    interrupted. Such a cancellation would be lost if the caller did not raise it.

    Cancellation: see above.
    """
    interruption: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while True:
            try:
                await step()
            except anyio.get_cancelled_exc_class() as error:
                interruption = error
            else:
                break
    return interruption
