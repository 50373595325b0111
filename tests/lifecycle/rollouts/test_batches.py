"""`batch()` and `batches()`: full batches from a dataset, with the fleet kept busy in between."""

from typing import Any

import anyio
import pytest

from lifecycle import Episode, RolloutStatus
from lifecycle.errors import RolloutsFailing
from lifecycle.rollouts import RolloutExecutor
from tests.lifecycle.driver.driver_rig import rig

from .rollouts_rig import Dataset, bring, echo, outcome_of, settled, staged, start, within

pytestmark = pytest.mark.anyio


async def _not_dull(value: Any) -> bool:
    return bool(value != "dull")


async def test_a_batch_is_as_large_as_the_budget_says() -> None:
    """Oldest first; each batch goes on where the one before ended."""
    async with staged(batch_size=3, max_staleness=0) as stage:
        dataset = Dataset()
        seen = []
        for version in range(1, 4):
            batch = await stage.executor.batch(dataset, echo)
            seen.append([result.data for result in batch])
            await stage.publish()
            assert stage.lifecycle.version == version
        assert seen == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


async def test_no_more_is_drawn_than_the_budget_holds() -> None:
    """As many run as the budget lets; after a version as many more are drawn."""
    async with staged(batch_size=2, max_staleness=1) as stage, anyio.create_task_group() as tasks:
        dataset = Dataset()
        waiting = start(tasks, lambda: stage.executor.batch(dataset, stage.script))
        await settled()
        assert (stage.script.waiting, stage.executor.queued, dataset.drawn) == ([1, 2, 3, 4], 0, 4)
        stage.script.succeed(1, 2)
        await settled()
        assert ([result.data for result in waiting.value], dataset.drawn) == ([1, 2], 4)
        await stage.publish()
        await settled()
        assert (stage.script.waiting, dataset.drawn) == ([3, 4, 5, 6], 6)


async def test_one_item_waits_at_the_gate_where_fewer_may_run() -> None:
    """It starts as soon as one that runs has ended, and nothing was drawn that might have to wait for long."""
    async with staged(batch_size=8, max_staleness=1, max_concurrent=2) as stage, anyio.create_task_group() as tasks:
        dataset = Dataset()
        start(tasks, lambda: stage.executor.batch(dataset, stage.script))
        await settled()
        assert (stage.script.waiting, stage.executor.queued, dataset.drawn) == ([1, 2], 1, 3)
        stage.script.succeed(1)
        await settled()
        assert (stage.script.waiting, stage.executor.queued, dataset.drawn) == ([2, 3], 1, 4)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
async def test_two_datasets_that_are_taken_in_turn_share_the_budget(max_staleness: int) -> None:
    """Half of each batch from one and half from the other: neither takes the other's room by running ahead."""
    async with staged(batch_size=4, max_staleness=max_staleness) as stage:
        left, right = Dataset(), Dataset()
        for version in range(1, 6):
            for dataset in (left, right):
                batch = await within(100, lambda dataset=dataset: stage.executor.batch(dataset, echo, size=2))  # type: ignore[misc]
                assert [result.data for result in batch] == [2 * version - 1, 2 * version]
            await stage.publish()


async def test_several_batches_of_one_dataset_may_be_taken_in_one_version() -> None:
    """Whoever waits for more is served from the budget, whatever was taken before."""
    async with staged(batch_size=6, max_staleness=0) as stage:
        dataset = Dataset()
        for _ in range(3):
            for _ in range(3):
                await within(100, lambda: stage.executor.batch(dataset, echo, size=2))
            await stage.publish()
        assert dataset.drawn == 18 + 2


async def test_the_fleet_is_kept_busy_between_two_calls() -> None:
    """Results that come while nobody waits are there for the next call."""
    async with staged(batch_size=2, max_staleness=1) as stage:
        dataset = Dataset()
        await outcome_of(lambda: within(1, lambda: stage.executor.batch(dataset, stage.script)))
        stage.script.succeed(2, 1, 4)
        await settled()
        assert bring(await within(0, lambda: stage.executor.batch(dataset, stage.script))) == [
            (1, RolloutStatus.ACCEPTED), (2, RolloutStatus.ACCEPTED),
        ]  # fmt: skip


async def test_what_training_cannot_use_is_replaced_by_further_items() -> None:
    """Failures, `None`, and what the filter rejects make room for the next items at once."""
    async with staged(batch_size=2, max_staleness=0) as stage, anyio.create_task_group() as tasks:
        dataset = Dataset()
        waiting = start(tasks, lambda: stage.executor.batch(dataset, stage.script, accept=_not_dull))
        await settled()
        stage.script.of(1).fail()
        await settled()
        stage.script.of(2).succeed(None)
        await settled()
        stage.script.of(3).succeed("dull")
        await settled()
        assert (stage.script.waiting, stage.counts) == ([4, 5], (2, 0, 3))
        stage.script.succeed(4, 5)
        await settled()
        assert [result.data for result in waiting.value] == [4, 5]


async def test_what_is_dropped_for_its_age_is_replaced_by_further_items() -> None:
    """Between two calls, too: the fleet works on what can be used."""
    async with staged(batch_size=2, max_staleness=0) as stage:
        dataset = Dataset()
        await outcome_of(lambda: within(1, lambda: stage.executor.batch(dataset, stage.script)))
        stage.script.succeed(1)
        await settled()
        await stage.publish(consumed=0)
        assert stage.script.waiting == [2, 3]


async def test_too_many_failures_in_a_row_are_told() -> None:
    """`RolloutsFailing` with the last as its cause; drawing stops, and the next call tries again."""
    async with staged(batch_size=2, max_staleness=0, max_consecutive_failures=3) as stage:
        dataset, failing = Dataset(), True

        async def workflow(_: Episode, data: Any) -> Any:
            if failing:
                raise ValueError(data)
            return data

        with pytest.raises(RolloutsFailing, match=r"rollouts in a row failed \(ValueError\)") as caught:
            await stage.executor.batch(dataset, workflow)
        assert isinstance(caught.value.__cause__, ValueError)
        assert 3 <= len(caught.value.causes) <= 5
        await settled()
        drawn = dataset.drawn
        await settled()
        assert dataset.drawn == drawn
        failing = False
        for _ in range(2):  # what failed after the first call may be told once more
            batch = await outcome_of(lambda: stage.executor.batch(dataset, workflow))
        assert [result.accepted for result in batch] == [True, True]


async def test_failures_between_successes_are_no_reason_to_stop() -> None:
    """Only failures in a row count."""
    async with staged(batch_size=4, max_staleness=0, max_consecutive_failures=4, max_queued=1) as stage:

        async def workflow(_: Episode, data: Any) -> Any:
            if data % 4:
                raise ValueError(data)
            return data

        batch = await stage.executor.batch(Dataset(), workflow)
        assert [result.data for result in batch] == [4, 8, 12, 16]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"size": 9}, "9 results of 1 rollouts never fit"),
        ({"size": 0}, "size must be an int of at least 1, got 0"),
        ({"group_size": 5}, "a batch of 4 rollouts has no place for a group of 5"),
        ({"group_size": 4, "size": 3}, "3 results of 4 rollouts never fit"),
        ({"group_size": 9, "size": 1}, "a group of 9 rollouts never fits"),
    ],
)
async def test_a_batch_that_could_never_be_full_is_refused(options: dict[str, Any], complaint: str) -> None:
    """Before anything is drawn for it."""
    async with staged() as stage:
        dataset = Dataset()
        with pytest.raises(ValueError, match=complaint):
            await stage.executor.batch(dataset, echo, **options)
        assert dataset.drawn == 0


async def test_a_budget_without_bound_has_no_batches() -> None:
    """It would let the dataset run to its end."""
    under = rig(1)
    async with under.lifecycle as lifecycle, RolloutExecutor(lifecycle) as executor:
        with pytest.raises(ValueError, match="needs a lifecycle with a StalenessBudget"):
            await executor.batch([1], echo)


async def test_a_workflow_that_is_none_is_told_where_a_batch_is_awaited() -> None:
    """Instead of a wait for ever."""
    async with staged() as stage:
        result = await outcome_of(lambda: stage.executor.batch([1, 2, 3, 4], "no function"))  # type: ignore[arg-type]
        assert isinstance(result, TypeError)


async def test_groups_come_in_batches_of_as_many_as_the_budget_holds() -> None:
    """Eight rollouts a version are two groups of four."""
    async with staged(batch_size=8, max_staleness=0, group_size=4) as stage:
        batch = await stage.executor.batch(Dataset(), echo)
        assert [result.values for result in batch] == [(1,) * 4, (2,) * 4]
        assert stage.counts == (0, 8, 0)


async def test_a_batch_that_is_given_up_loses_nothing() -> None:
    """Cancelled or timed out, the next call has the results."""
    async with staged(batch_size=2, max_staleness=0) as stage:
        dataset = Dataset()
        with pytest.raises(TimeoutError):
            await within(1, lambda: stage.executor.batch(dataset, stage.script))
        stage.script.succeed(1)
        await settled()
        with pytest.raises(TimeoutError):
            await within(1, lambda: stage.executor.batch(dataset, stage.script))
        stage.script.succeed(2)
        assert [result.data for result in await stage.executor.batch(dataset, stage.script)] == [1, 2]


async def test_a_repetition_takes_the_place_of_what_failed() -> None:
    """Nothing further is drawn for an item that is run again."""
    async with staged(batch_size=2, max_staleness=0, retries=1) as stage, anyio.create_task_group() as tasks:
        dataset = Dataset()
        waiting = start(tasks, lambda: stage.executor.batch(dataset, stage.script))
        await settled()
        stage.script.of(1).fail()
        await settled()
        assert (stage.script.waiting, stage.executor.queued, dataset.drawn) == ([2, 1], 0, 2)
        stage.script.succeed(1, 2)
        await settled()
        assert [result.data for result in waiting.value] == [1, 2]
