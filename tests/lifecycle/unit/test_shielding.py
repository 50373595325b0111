"""Carrying on, whoever cancels: to the end, or for a grace."""

import asyncio
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from lifecycle.shielding import in_good_order


@pytest.mark.anyio
async def test_a_step_that_nobody_cancels_is_simply_done() -> None:
    """What it raises is raised as it is, not in a group."""
    done = []

    async def step() -> None:
        await anyio.lowlevel.checkpoint()
        done.append(1)

    async def fail() -> None:
        raise ValueError("its own")

    await in_good_order(step, grace=1.0)
    assert done == [1]
    with pytest.raises(ValueError, match="its own"):
        await in_good_order(fail, grace=1.0)


@pytest.mark.anyio
async def test_a_cancelled_step_comes_to_its_end_within_the_grace() -> None:
    """The caller is cancelled, but only after the step has ended by itself."""
    entered, leave, done = anyio.Event(), anyio.Event(), []

    async def step() -> None:
        entered.set()
        await leave.wait()
        done.append(1)

    async def caller() -> None:
        with anyio.CancelScope() as scope:
            cancel.append(scope.cancel)
            await in_good_order(step, grace=3600.0)
        done.append(scope.cancelled_caught)

    cancel: list[Callable[[], None]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(caller)
        await entered.wait()
        cancel[0]()
        await anyio.wait_all_tasks_blocked()
        assert done == []
        leave.set()
    assert done == [1, True]


@pytest.mark.anyio
async def test_a_cancelled_step_that_hangs_is_cut_after_the_grace() -> None:
    """The grace is the longest that a cancellation has to wait."""
    undone = []

    async def hang() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            undone.append(1)

    with anyio.CancelScope() as scope:
        scope.cancel()
        await in_good_order(hang, grace=0.01)
    assert (undone, scope.cancelled_caught) == ([1], True)


async def _cancelled_natively() -> None:
    leave, done = asyncio.Event(), []

    async def step() -> None:
        await leave.wait()
        done.append(1)

    task = asyncio.create_task(in_good_order(step, grace=3600.0))
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    await anyio.wait_all_tasks_blocked()
    assert not task.done()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


def test_asyncios_own_cancellation_waits_for_the_step_too() -> None:
    """`Task.cancel()` goes through a shield, but not to the step, which runs in a task of its own."""
    asyncio.run(_cancelled_natively())
