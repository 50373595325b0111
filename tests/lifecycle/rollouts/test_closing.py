"""Closing an executor: what runs is cancelled, tickets are returned, and whoever waits is told."""

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from lifecycle import Episode
from lifecycle.errors import ExecutorClosed, NoSuchRollout
from lifecycle.rollouts import BlockingEpisode, RolloutExecutor

from .rollouts_rig import Stage, echo, settled, staged, start

pytestmark = pytest.mark.anyio

ITEMS = [1, 2, 3, 4]
"""One dataset for all, so that a second call goes on with it."""

Call = Callable[[Stage, int], Awaitable[Any]]

CALLS: dict[str, Call] = {
    "wait": lambda stage, _: stage.executor.wait(2),
    "wait_for": lambda stage, number: stage.executor.wait_for(number),
    "batch": lambda stage, _: stage.executor.batch(ITEMS, stage.script),
    "rollout": lambda stage, _: stage.executor.rollout([1], stage.script),
    "evaluate": lambda stage, _: stage.executor.evaluate([1], stage.script),
}


@pytest.mark.parametrize("name", CALLS)
async def test_whoever_waits_is_told_when_the_executor_is_closed(name: str) -> None:
    """With `ExecutorClosed`, before and after; nothing runs any more and no ticket is out."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        [number] = stage.submit("a")
        waiting = start(tasks, lambda: CALLS[name](stage, number))
        await settled()
        await stage.executor.close()
        await settled()
        assert isinstance(waiting.error, ExecutorClosed)
        with pytest.raises((ExecutorClosed, NoSuchRollout)):
            await CALLS[name](stage, number)
        assert (stage.lifecycle.running, stage.script.active) == (0, [])
        await stage.executor.close()


async def test_closing_frees_what_nobody_has_taken() -> None:
    """Results that are left are dropped, so that the next executor has the whole budget."""
    async with staged(batch_size=2, max_staleness=1) as stage:
        async with RolloutExecutor(stage.lifecycle) as executor:
            for data in range(6):
                executor.submit(stage.script, data)
            await settled()
            stage.script.succeed(0, 1)
            await settled()
            assert (executor.finished, executor.running, executor.queued) == (2, 2, 2)
        assert (executor.finished, executor.running, executor.queued) == (0, 0, 0)
        assert (stage.counts, stage.budget.capacity()) == ((0, 2, 2), 4)


async def test_what_is_queued_does_not_start_while_everything_ends() -> None:
    """Places that come back as rollouts are cancelled go to nobody, with retries or without."""
    async with staged(batch_size=1, max_staleness=0) as stage, anyio.create_task_group() as tasks:

        async def hold() -> None:
            async with RolloutExecutor(stage.lifecycle, retries=3) as executor:
                for data in range(5):
                    executor.submit(stage.script, data)
                await anyio.sleep_forever()

        tasks.start_soon(hold)
        await settled()
        tasks.cancel_scope.cancel()
    assert ([run.data for run in stage.script.runs], stage.counts) == ([0], (0, 0, 1))


async def test_a_cancelled_caller_leaves_the_block_cancelled() -> None:
    """Cancellation is passed on, once everything within has ended."""
    async with staged() as stage:
        with anyio.CancelScope() as scope:
            async with RolloutExecutor(stage.lifecycle) as executor:
                executor.submit(stage.script, "a")
                await settled()
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert (scope.cancelled_caught, stage.counts, stage.script.runs[0].cancelled) == (True, (0, 0, 1), True)


async def test_a_thread_is_waited_for_and_its_ticket_held_meanwhile() -> None:
    """It cannot be stopped, and what it does counts: leaving takes until it returns."""
    begun, go_on = threading.Event(), threading.Event()

    def workflow(_: BlockingEpisode, data: Any) -> Any:
        begun.set()
        go_on.wait()
        return data

    async with staged() as stage, anyio.create_task_group() as tasks:
        stage.executor.submit(workflow, 1)
        while not begun.is_set():
            await anyio.to_thread.run_sync(begun.wait)
        closing = start(tasks, stage.executor.close)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert (closing.done, stage.counts) == (False, (1, 0, 0))
        go_on.set()
    assert (closing.done, stage.counts) == (True, (0, 0, 1))


async def test_a_workflow_may_close_the_executor() -> None:
    """It is cancelled like the others."""
    async with staged() as stage:

        async def workflow(_: Episode, data: Any) -> Any:
            await stage.executor.close()
            return data

        stage.executor.submit(workflow, 1)
        stage.submit("a")
        with pytest.raises(ExecutorClosed):
            await stage.executor.wait(1)
        await stage.executor.close()
        assert stage.counts == (0, 0, 2)


async def test_what_a_workflow_does_as_it_is_cancelled_is_waited_for() -> None:
    """Its clean-up may take its time; the ticket is out until then."""
    async with staged() as stage:
        running: list[int] = []

        async def workflow(_: Episode, data: Any) -> Any:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(5)
                running.append(stage.budget.running)
            return data

        stage.executor.submit(workflow, 1)
        await settled()
        await stage.executor.close()
        assert (running, stage.counts) == ([1], (0, 0, 1))


@pytest.mark.parametrize("anyio_backend", ["trio"])  # asyncio stops its loop for it
async def test_an_interruption_by_the_keyboard_gets_through() -> None:
    """`KeyboardInterrupt` from a workflow ends the block; every ticket is returned."""
    async with staged() as stage:

        async def workflow(_: Episode, data: Any) -> Any:
            raise KeyboardInterrupt

        async def hold() -> None:
            async with RolloutExecutor(stage.lifecycle, retries=2) as executor:
                executor.submit(workflow, 1)
                executor.submit(stage.script, 2)
                await anyio.sleep_forever()

        with pytest.raises(BaseExceptionGroup) as caught:
            await hold()
        assert caught.group_contains(KeyboardInterrupt)
        assert stage.budget.running == 0


@pytest.mark.parametrize("call", ["batch", "wait", "rollout", "evaluate"])
async def test_a_cancelled_caller_gets_its_cancellation_and_not_the_news_of_the_closing(call: str) -> None:
    """A cancellation from outside closes the executor, too; who comes out of a shield then is told of no error."""
    calls: dict[str, Callable[[RolloutExecutor], Awaitable[Any]]] = {
        "batch": lambda executor: executor.batch([1, 2], echo, size=2),
        "wait": lambda executor: executor.wait(1),
        "rollout": lambda executor: executor.rollout([1], echo),
        "evaluate": lambda executor: executor.evaluate([1], echo),
    }
    raised: list[BaseException] = []
    async with staged() as stage:
        with anyio.CancelScope() as scope:
            async with RolloutExecutor(stage.lifecycle) as executor:
                with anyio.CancelScope(shield=True):
                    scope.cancel()
                    await settled()
                try:
                    await calls[call](executor)
                except BaseException as error:
                    raised.append(error)
                    raise
        assert scope.cancelled_caught
        assert [type(error) for error in raised] == [anyio.get_cancelled_exc_class()]


async def test_a_cancellation_from_outside_starts_nothing_more() -> None:
    """What runs makes room as it ends, and what is queued must not begin in it, only to be cancelled in its turn."""
    begun: list[int] = []

    async def workflow(_: Episode, data: int) -> Any:
        begun.append(data)
        await anyio.sleep_forever()

    async with staged(batch_size=2, max_staleness=0) as stage:
        with anyio.CancelScope() as scope:
            async with RolloutExecutor(stage.lifecycle) as executor:
                for number in range(8):
                    executor.submit(workflow, number)
                await settled()
                scope.cancel()
                await anyio.sleep_forever()
        assert (sorted(begun), stage.counts) == ([0, 1], (0, 0, 2))
