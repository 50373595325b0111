"""Carrying on to the end, whoever cancels."""

from collections.abc import Awaitable, Callable

import anyio


def genuine() -> tuple[type[BaseException], ...]:
    """Return what must never be contained: cancellation, and the ways in which Python ends a program or a coroutine.

    Everything else that is no `Exception` is foreign: another library's idea of a cancellation, for instance.
    """
    return (anyio.get_cancelled_exc_class(), KeyboardInterrupt, SystemExit, GeneratorExit)


async def to_the_end(step: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Do `step` whatever cancellation comes. Returns the one that is still to be raised, or `None`.

    A shield holds anyio's cancellation back, and trio's. It does not hold back asyncio's own (`Task.cancel()`,
    `asyncio.timeout()`), which interrupts once: `step` is done again then, so it must be one that goes on where it was
    interrupted. Such a cancellation would be lost if the caller did not raise it; where the step fails after it, it is
    raised here, from the failure.

    Cancellation: see above.
    """
    interruption: BaseException | None = None
    with anyio.CancelScope(shield=True):
        while True:
            try:
                await step()
            except anyio.get_cancelled_exc_class() as error:
                interruption = error
            except Exception as failure:
                if interruption is None:
                    raise
                raise interruption from failure
            else:
                break
    return interruption


async def in_good_order(step: Callable[[], Awaitable[object]], *, grace: float) -> None:
    """Do `step`. Where the caller is cancelled meanwhile, give it `grace` seconds more to end by itself.

    Cancellation: `step` is cancelled `grace` seconds later; holds for asyncio's own cancellation, too.
    """
    shield = anyio.CancelScope(shield=True)
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:

        async def work() -> None:
            nonlocal failure
            try:
                with shield:
                    await step()
            except Exception as error:  # noqa: BLE001 - raised below, as it is
                failure = error
            tasks.cancel_scope.cancel()

        tasks.start_soon(work)
        try:
            await anyio.sleep_forever()
        finally:
            shield.deadline = anyio.current_time() + grace
    if failure is not None:
        raise failure
