"""`evaluate()`: outside the budget, on one version, with no publication in between."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from lifecycle import Episode, RolloutStatus, State, events
from lifecycle.errors import ExecutorClosed, IllegalTransition, LifecycleClosed, LifecycleFaulted
from lifecycle.rollouts import BlockingEpisode

from .rollouts_rig import bring, echo, outcome_of, settled, staged, start

pytestmark = pytest.mark.anyio


async def test_evaluations_take_no_capacity_and_come_in_order() -> None:
    """Whatever they bring: the books of the budget do not know them."""
    async with staged(batch_size=1, max_staleness=0) as stage, anyio.create_task_group() as tasks:
        stage.submit("x")
        waiting = start(tasks, lambda: stage.executor.evaluate(["a", "b", "c", "d"], stage.script))
        await settled()
        assert (stage.script.waiting, stage.counts, stage.lifecycle.running) == (
            ["x", "a", "b", "c", "d"],
            (1, 0, 0),
            5,
        )
        stage.script.succeed("d", "a")
        stage.script.of("b").fail()
        stage.script.of("c").succeed(None)
        await settled()
        assert bring(waiting.value) == [
            ("a", RolloutStatus.ACCEPTED), ("b", RolloutStatus.FAILED),
            ("c", RolloutStatus.REJECTED), ("d", RolloutStatus.ACCEPTED),
        ]  # fmt: skip
        assert (stage.counts, stage.lifecycle.running) == ((1, 0, 0), 1)


async def test_a_publication_waits_until_the_evaluation_is_over() -> None:
    """So that all of it is about one version."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.evaluate(["a", "b"], stage.script, concurrency=1))
        await settled()
        publishing = start(tasks, stage.publish)
        await settled()
        stage.script.succeed("a")
        await settled()
        assert (stage.lifecycle.version, publishing.done, stage.script.waiting) == (0, False, ["b"])
        stage.script.succeed("b")
        await settled()
        assert (stage.lifecycle.version, [result.version for result in waiting.value]) == (1, [0, 0])


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_no_more_run_at_once_than_were_asked_for(concurrency: int) -> None:
    """The next one starts when one ends."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.evaluate(range(5), stage.script, concurrency=concurrency))
        for number in range(5):
            await settled()
            assert sorted(stage.script.waiting) == list(range(number, min(5, number + concurrency)))
            stage.script.succeed(number)
        await settled()
        assert [result.value for result in waiting.value] == [0, 1, 2, 3, 4]


async def test_evaluations_run_while_submission_is_closed() -> None:
    """Between training steps."""
    async with staged() as stage:
        await stage.lifecycle.suspend()
        assert [result.value for result in await stage.executor.evaluate([1, 2], echo)] == [1, 2]


async def test_an_evaluation_where_none_can_run_is_refused() -> None:
    """It keeps every operation out: in PAUSED it would wait for itself."""
    async with staged() as stage:
        await stage.lifecycle.suspend()
        await stage.lifecycle.pause_generation()
        with pytest.raises(IllegalTransition, match="ADMIT is not possible in PAUSED"):
            await stage.executor.evaluate([1], echo)
        await stage.lifecycle.continue_generation()
        with pytest.raises(ValueError, match="concurrency must be an int of at least 1, got 0"):
            await stage.executor.evaluate([1], echo, concurrency=0)
        assert await stage.executor.evaluate([], echo) == []


async def test_a_closed_or_faulted_lifecycle_is_told() -> None:
    """With its own error, in no group."""
    async with staged() as stage:
        engine = stage.rig.engines[0]
        engine.crash()
        await outcome_of(stage.publish)
        assert stage.rig.state() is State.FAULTED
        with pytest.raises(LifecycleFaulted):
            await stage.executor.evaluate([1], echo)
        await stage.lifecycle.close()
        with pytest.raises(LifecycleClosed):
            await stage.executor.evaluate([1], echo)


async def test_a_lifecycle_that_is_closed_meanwhile_ends_the_evaluation() -> None:
    """`close()` pre-empts; tickets are returned."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.evaluate(["a"], stage.script))
        await settled()
        await stage.lifecycle.close()
        await settled()
        assert isinstance(waiting.error, LifecycleClosed)
        assert (stage.lifecycle.running, stage.script.runs[0].cancelled) == (0, True)


async def test_an_executor_that_is_closed_meanwhile_ends_the_evaluation() -> None:
    """Whoever waits gets `ExecutorClosed`, and every ticket comes back once."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.evaluate(["a", "b"], stage.script, concurrency=1))
        await settled()
        await stage.executor.close()
        assert stage.lifecycle.running == 0
        await settled()
        assert isinstance(waiting.error, ExecutorClosed)
        await stage.publish()


async def test_closing_the_executor_waits_for_what_an_evaluation_cleans_up() -> None:
    """Its ticket is out until then, and comes back once."""

    async def workflow(_: Episode, data: Any) -> Any:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5)
        return data

    async with staged() as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.evaluate(["a"], workflow))
        await settled()
        await stage.executor.close()
        assert (stage.lifecycle.running, len(stage.of(events.RolloutSettled))) == (0, 1)
        await settled()
        assert isinstance(waiting.error, ExecutorClosed)


async def test_an_evaluation_that_takes_too_long_is_given_up() -> None:
    """`TimeoutError`, with nothing left behind; publications go on."""
    async with staged() as stage:
        with pytest.raises(TimeoutError):
            await stage.executor.evaluate(["a", "b"], stage.script, timeout=5)
        assert (stage.lifecycle.running, [run.cancelled for run in stage.script.runs]) == (0, [True, True])
        await stage.publish()


async def test_what_a_dataset_raises_comes_as_it_is() -> None:
    """In no group."""

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    async with staged() as stage:
        with pytest.raises(OSError, match="disk"):
            await stage.executor.evaluate(broken(), echo)
        assert stage.lifecycle.running == 0


async def test_ordinary_functions_are_evaluated_in_threads() -> None:
    """As with any other rollout."""

    def workflow(_: BlockingEpisode, data: Any) -> Any:
        return data * 2

    async with staged() as stage:
        assert [result.value for result in await stage.executor.evaluate([1, 2, 3], workflow)] == [2, 4, 6]


@pytest.mark.filterwarnings("ignore:coroutine '.*' was never awaited")
@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_evaluation_whose_tasks_asyncio_cancels_has_every_result_all_the_same(turns: int) -> None:
    """Begun or not: one that ran has failed, one that did not runs, and nothing is left out silently."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        before = asyncio.all_tasks()
        waiting = start(tasks, lambda: stage.executor.evaluate(["a", "b"], stage.script))
        while len(begun := asyncio.all_tasks() - before) < 3:
            await anyio.lowlevel.checkpoint()
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        for task in begun:
            if "_evaluate_what_waits" in task.get_name():
                task.cancel()
        for _ in range(3):
            await settled()
            for run in stage.script.active:
                run.succeed(run.data)
        assert [result.data for result in waiting.value] == ["a", "b"]
        assert stage.lifecycle.running == 0
    gc.collect()


async def test_filters_and_groups_are_for_training() -> None:
    """An evaluation runs each item once, and every value is its result, whatever training would make of it."""
    asked = []

    async def never(value: Any) -> bool:
        asked.append(value)
        return False

    async with staged(group_size=4, retries=2, accept=never) as stage:
        results = await stage.executor.evaluate(["a", "b"], echo)
        assert [(result.values, result.status) for result in results] == [
            (("a",), RolloutStatus.ACCEPTED),
            (("b",), RolloutStatus.ACCEPTED),
        ]
        assert asked == []
