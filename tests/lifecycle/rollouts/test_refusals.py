"""What can never work is refused where it is written; what the caller raises comes out as it is."""

from typing import Any

import pytest

from lifecycle import RolloutExecutor, State
from lifecycle.errors import ExecutorClosed, NoCapacity, NoSuchRollout

from .rollouts_rig import echo, settled, staged

pytestmark = pytest.mark.anyio


async def test_more_submissions_than_may_wait_are_refused() -> None:
    """Back-pressure: `NoCapacity` says how things stand, and admits again when there is room."""
    async with staged(batch_size=1, max_staleness=0, max_queued=2) as stage:
        stage.submit("a", "b", "c")
        with pytest.raises(NoCapacity, match="2 submissions wait for admission already: 0 finished, 1 running"):
            stage.submit("d")
        await settled()
        stage.script.of("a").fail()
        await settled()
        stage.submit("d")
        assert (stage.executor.queued, stage.executor.running, stage.executor.finished) == (2, 1, 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"group_size": 9}, "a group of 9 rollouts never fits: the budget holds 8 at once"),
        ({"group_size": 0}, "group_size must be an int of at least 1, got 0"),
        ({"retries": -1}, "retries must be an int of at least 0, got -1"),
    ],
)
async def test_a_submission_that_can_never_run_is_refused(options: dict[str, Any], complaint: str) -> None:
    """It is told where it is written, not by a wait for ever."""
    async with staged() as stage:
        with pytest.raises(ValueError, match=complaint):
            stage.submit("a", **options)
        with pytest.raises(TypeError, match="a workflow is a function of"):
            stage.executor.submit("no function", "a")  # type: ignore[arg-type]
        assert stage.executor.queued == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"group_size": 9}, "a group of 9 rollouts never fits"),
        ({"min_members": 2}, "min_members must be an int from 1 to 1, got 2"),
        ({"retries": 1.5}, "retries must be an int of at least 0"),
        ({"timeout": 0}, "timeout must be None or more than 0 seconds"),
        ({"max_queued": 0}, "max_queued must be an int of at least 1"),
        ({"max_consecutive_failures": 0}, "max_consecutive_failures must be an int of at least 1"),
        ({"max_threads": 0}, "max_threads must be an int of at least 1"),
    ],
)
async def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], complaint: str) -> None:
    """An executor that could never work is not made."""
    async with staged() as stage:
        with pytest.raises(ValueError, match=complaint):
            RolloutExecutor(stage.lifecycle, **options)


async def test_an_executor_works_between_entering_and_leaving() -> None:
    """Before and after, and a second time, it says so."""
    async with staged() as stage:
        early = RolloutExecutor(stage.lifecycle)
        with pytest.raises(RuntimeError, match="enter the executor first"):
            early.submit(echo, 1)
        async with early:
            pass
        with pytest.raises(ExecutorClosed):
            early.submit(echo, 1)
        with pytest.raises(ExecutorClosed):
            await early.wait(1)
        with pytest.raises(RuntimeError, match="entered once"):
            await early.__aenter__()


async def test_an_exception_of_the_block_comes_out_as_it_is() -> None:
    """What the caller raises within is not wrapped in a group, so that `except` finds it."""
    async with staged() as stage:
        with pytest.raises(NoSuchRollout):
            async with RolloutExecutor(stage.lifecycle) as executor:
                await executor.wait_for(99)
        assert stage.rig.state() is State.RUNNING
