"""`asyncio.Task.cancel()` of any task of an executor, at any time, also before its first step."""

import asyncio
import gc
import threading
from typing import Any

import anyio
import pytest

from lifecycle import Episode, RolloutStatus
from lifecycle.errors import ExecutorClosed
from lifecycle.rollouts import BlockingEpisode
from tests.lifecycle.driver.driver_rig import Later
from tests.virtual_time import on_virtual_clock

from .rollouts_rig import Dataset, Stage, outcome_of, settled, staged, start

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run on asyncio alone: the others have no such cancellation."""
    return "asyncio", on_virtual_clock("asyncio")


async def _never_waits(_: Episode, data: Any) -> Any:
    return data


async def _accepts_later(_: Any) -> bool:
    await anyio.lowlevel.checkpoint()
    return True


async def _end(stage: Stage, calls: list[Later]) -> None:
    """Let everything end, and find that nobody was forgotten."""
    for _ in range(3):  # asyncio tells a group of a task that never began by callbacks
        await settled()
    for _ in range(12):
        for run in stage.script.active:
            run.succeed(run.data)
        await settled()
        assert stage.budget.running == sum(run.ticket.group_size for run in stage.script.active)
    alive = not stage.executor._closed
    for call in calls:
        assert call.done or alive
        assert isinstance(call.error, ExecutorClosed | None)
    if alive:
        # It goes on working.
        number = stage.executor.submit(_never_waits, "again")
        assert (await stage.executor.wait_for(number)).value == "again"


async def _cancelled_at(turn: int, which: int, **options: Any) -> bool:
    """Cancel one of the executor's tasks after so many turns of the loop. Return whether there was one."""
    before = asyncio.all_tasks()
    async with (
        staged(batch_size=9, max_staleness=1, max_concurrent=6, **options) as stage,
        anyio.create_task_group() as tasks,
    ):
        callers = asyncio.all_tasks()
        executors = callers - before
        one = start(tasks, lambda: stage.executor.wait(1))
        callers = asyncio.all_tasks() - executors
        stage.submit("a", "b")
        stage.executor.submit(_never_waits, "c")
        stage.executor.submit(stage.script, "d", accept=_accepts_later)
        for number in range(turn):
            if number == 4:
                stage.script.succeed(*[run.data for run in stage.script.active][:2])
            if number == 8:
                stage.submit("e", "f", "g", "h")
            await asyncio.sleep(0)
        own = sorted(asyncio.all_tasks() - callers, key=lambda task: task.get_name())
        if which < len(own):
            own[which].cancel()
        await _end(stage, [one])
    assert (stage.budget.running, stage.executor.queued) == (0, 0)
    return which < len(own)


@pytest.mark.parametrize("retries", [0, 1])
async def test_any_task_can_be_cancelled_at_any_turn(retries: int) -> None:
    """No capacity leaks, whoever waits is told or served, and the executor goes on or is closed."""
    struck = 0
    for turn in range(16):
        for which in range(7):
            struck += await _cancelled_at(turn, which, retries=retries)
    gc.collect()
    assert struck > 60


async def test_a_rollout_whose_task_is_cancelled_has_failed_and_nothing_else() -> None:
    """A workflow that cancels its own task, or is cancelled by another, costs itself alone."""
    async with staged() as stage:

        async def workflow(_: Episode, data: Any) -> Any:
            task: Any = asyncio.current_task()
            task.cancel()
            if data == "waits":
                await anyio.sleep_forever()
            return data

        numbers = [stage.executor.submit(workflow, data) for data in ("waits", "returns")]
        [other] = stage.submit("a")
        await settled()
        stage.script.succeed("a")
        statuses = [(await stage.executor.wait_for(number)).status for number in (*numbers, other)]
        assert statuses == [RolloutStatus.FAILED, RolloutStatus.ACCEPTED, RolloutStatus.ACCEPTED]
        assert (await stage.executor.rollout([1, 2], _never_waits))[1].value == 2


async def test_a_timeout_of_asyncio_within_a_workflow_is_its_own_affair() -> None:
    """`asyncio.timeout()` cancels the task that it runs in, and takes that back."""
    async with staged() as stage:

        async def workflow(_: Episode, data: Any) -> Any:
            try:
                async with asyncio.timeout(1):
                    await anyio.sleep_forever()
            except TimeoutError:
                return data

        results = await stage.executor.rollout([1, 2], workflow)
        assert [result.value for result in results] == [1, 2]


async def test_a_thread_whose_task_is_cancelled_is_waited_for() -> None:
    """It cannot be stopped: its ticket is out until it returns; one that still waits for a thread is free at once."""
    begun, go_on = threading.Event(), threading.Event()

    def workflow(_: BlockingEpisode, data: Any) -> Any:
        begun.set()
        go_on.wait(10)
        return data

    async with staged(max_threads=1) as stage:
        numbers = [stage.executor.submit(workflow, data) for data in ("runs", "waits")]
        await anyio.to_thread.run_sync(begun.wait)
        assert stage.counts == (2, 0, 0)
        for task in asyncio.all_tasks():
            if task.get_name().endswith("Crew._work"):
                task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert stage.counts == (1, 0, 1)
        go_on.set()
        statuses = [(await stage.executor.wait_for(number)).status for number in numbers]
        assert statuses == [RolloutStatus.FAILED, RolloutStatus.FAILED]
        assert (await stage.executor.rollout([1], workflow))[0].value == 1


def _cancel(name: str) -> None:
    """Cancel the executor's task that runs a method of this name."""
    [task] = [task for task in asyncio.all_tasks() if task.get_name().endswith(name)]
    task.cancel()


async def test_an_executor_whose_own_task_is_cancelled_is_closed() -> None:
    """Whoever waits is told; the caller's block is not cancelled."""
    async with staged(batch_size=2, max_staleness=0) as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.wait(1))
        drawing = start(tasks, lambda: stage.executor.batch(Dataset(), stage.script))
        await settled()
        _cancel("_serve")
        await settled()
        assert [type(waiting.error), type(drawing.error)] == [ExecutorClosed, ExecutorClosed]


async def test_a_dataset_whose_task_is_cancelled_has_ended() -> None:
    """Whoever waits for a batch is told once the last of it has ended; nobody else is concerned."""
    async with staged(batch_size=2, max_staleness=0) as stage, anyio.create_task_group() as tasks:
        drawing = start(tasks, lambda: outcome_of(lambda: stage.executor.batch(Dataset(), stage.script)))
        await settled()
        _cancel("feed")
        await settled()
        assert (stage.script.waiting, drawing.done) == ([1, 2], False)
        for run in stage.script.active:
            run.fail()
        await settled()
        assert str(drawing.value) == "drawing from the dataset was cancelled"
        [number] = stage.submit("a")
        await settled()
        stage.script.succeed("a")
        assert (await stage.executor.wait_for(number)).accepted
