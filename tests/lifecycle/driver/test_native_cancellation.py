"""`asyncio.Task.cancel()` and `asyncio.timeout()`, which no anyio shield holds back."""

import asyncio

import pytest

from tests.virtual_time import VirtualTimeLoop

from .driver_rig import bring_to, rig
from .invariants import check_now, cure, leave
from .test_cancellation import OPERATIONS, TROUBLES


async def _cancelled_at(count: int, name: str, trouble: str) -> bool:
    stage = rig(2)
    state, action = OPERATIONS[name]
    await stage.lifecycle.attach()
    await stage.lifecycle.resume()
    await bring_to(stage.lifecycle, state)
    TROUBLES[trouble](stage)
    reached = False

    async def operate() -> None:
        await action(stage)

    task = asyncio.ensure_future(operate())

    def cancel() -> None:
        nonlocal reached
        reached = True
        task.cancel()

    stage.when(count, cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        failed = task.exception() is not None
        assert failed or not reached
    check_now(stage)
    await cure(stage)
    await leave(stage)
    return reached


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_task_can_be_cancelled_at_each_request(name: str, trouble: str) -> None:
    """Cancelled as asyncio does it, at any request, the task is cancelled, no invariant breaks, and all comes back."""

    async def every_request() -> None:
        count = 1
        while await _cancelled_at(count, name, trouble):
            count += 1

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(every_request())
