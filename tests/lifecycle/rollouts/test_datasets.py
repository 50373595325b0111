"""Datasets: drawn from one ahead, two at once, to their end, to their error, or until they are forgotten."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

from lifecycle import Episode
from lifecycle.errors import EndOfDataset, RolloutsFailing

from .rollouts_rig import Dataset, echo, outcome_of, settled, staged, start, within

pytestmark = pytest.mark.anyio


async def _slowly(count: int) -> AsyncIterator[int]:
    for number in range(1, count + 1):
        await anyio.sleep(10)
        yield number


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_end_of_a_dataset_is_told_with_what_is_left(asynchronous: bool) -> None:
    """What is left can be had with a smaller size; then the dataset is forgotten, and would begin anew."""
    async with staged(batch_size=2, max_staleness=2) as stage:
        dataset: Any = _slowly(3) if asynchronous else [1, 2, 3]
        assert [result.data for result in await stage.executor.batch(dataset, echo)] == [1, 2]
        with pytest.raises(EndOfDataset, match="the dataset has ended: 1 results are left and 2 are wanted") as caught:
            await stage.executor.batch(dataset, echo)
        assert (caught.value.left, caught.value.wanted) == (1, 2)
        assert [result.data for result in await stage.executor.batch(dataset, echo, size=1)] == [3]
        with pytest.raises(EndOfDataset):
            await stage.executor.batch(dataset, echo)
        assert stage.executor._streams == {}
        if not asynchronous:
            assert [result.data for result in await stage.executor.batch(dataset, echo)] == [1, 2]


async def test_an_empty_dataset_ends_at_once() -> None:
    """There is nothing to wait for."""
    async with staged() as stage:
        with pytest.raises(EndOfDataset, match="0 results are left"):
            await stage.executor.batch([], echo)


async def test_the_end_is_told_when_the_last_rollouts_bring_nothing() -> None:
    """Whoever waits for a batch learns that it will not come."""
    async with staged(batch_size=2) as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.batch([1, 2], stage.script))
        await settled()
        stage.script.succeed(1)
        await settled()
        assert not waiting.done
        stage.script.of(2).fail()
        await settled()
        assert isinstance(waiting.error, EndOfDataset)


async def test_batches_come_until_the_dataset_ends() -> None:
    """A rest that makes no full batch is dropped, and its capacity is free."""
    async with staged(batch_size=2, max_staleness=4) as stage:
        batches = stage.executor.batches([1, 2, 3, 4, 5], echo)
        seen = [[result.data for result in batch] async for batch in batches]
        assert seen == [[1, 2], [3, 4]]
        assert stage.executor._streams == {}
        assert stage.budget.capacity() == 10 - 4


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_a_dataset_raises_is_raised_where_a_batch_is_awaited(asynchronous: bool) -> None:
    """After the items before it; then the dataset has ended."""

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    async def broken_later() -> AsyncIterator[int]:
        yield 1
        raise OSError("disk")

    dataset: Any = broken_later() if asynchronous else broken()
    async with staged(batch_size=2) as stage:
        with pytest.raises(OSError, match="disk"):
            await stage.executor.batch(dataset, echo)
        with pytest.raises(EndOfDataset):
            await stage.executor.batch(dataset, echo)
        assert [result.data for result in await stage.executor.batch(dataset, echo, size=1)] == [1]


async def test_two_datasets_share_the_budget_fairly() -> None:
    """Each has one item at the gate, so that they take turns, and each caller gets results of its own."""
    async with staged(batch_size=4, max_staleness=0) as stage, anyio.create_task_group() as tasks:
        left, right = Dataset(), Dataset()

        async def right_one(_: Episode, data: Any) -> Any:
            return -data

        one = start(tasks, lambda: stage.executor.batch(left, echo, size=2))
        other = start(tasks, lambda: stage.executor.batch(right, right_one, size=2))
        await settled()
        assert ([result.value for result in one.value], [result.value for result in other.value]) == ([1, 2], [-1, -2])


async def test_a_forgotten_dataset_is_drawn_no_more_and_holds_no_capacity() -> None:
    """Its results are dropped, and those of its rollouts that still run."""
    async with staged(batch_size=2, max_staleness=1) as stage:
        dataset = Dataset()
        await outcome_of(lambda: within(1, lambda: stage.executor.batch(dataset, stage.script)))
        stage.script.succeed(1)
        await settled()
        stage.executor.forget(dataset)
        stage.executor.forget("never seen")
        assert (stage.counts, stage.executor.queued, stage.budget.capacity()) == ((3, 1, 0), 0, 1)
        stage.script.succeed(2, 3, 4)
        await settled()
        assert (stage.counts, stage.budget.capacity(), dataset.drawn) == ((0, 1, 3), 4, 4)


async def test_who_waits_for_a_batch_of_a_forgotten_dataset_is_told() -> None:
    """With `EndOfDataset`; the dataset may begin anew."""
    async with staged(batch_size=2) as stage, anyio.create_task_group() as tasks:
        dataset = Dataset()
        waiting = [start(tasks, lambda: stage.executor.batch(dataset, stage.script)) for _ in range(2)]
        await settled()
        stage.executor.forget(dataset)
        await settled()
        assert [type(later.error) for later in waiting] == [EndOfDataset, EndOfDataset]
        for run in stage.script.active:
            run.succeed()
        assert len(await stage.executor.batch(dataset, echo)) == 2


async def test_a_dataset_that_is_slow_keeps_nobody_waiting() -> None:
    """An asynchronous dataset is drawn from beside everything else; a batch comes when it is there."""
    async with staged(batch_size=2, max_staleness=1) as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.batch(_slowly(9), echo))
        [number] = stage.submit("a")
        await settled()
        stage.script.succeed("a")
        assert (await stage.executor.wait_for(number)).data == "a"
        await anyio.sleep(15)
        assert not waiting.done
        await stage.publish(consumed=1)
        await anyio.sleep(10)
        assert [result.data for result in waiting.value] == [1, 2]


async def test_a_stray_cancellation_of_a_dataset_is_an_error_of_the_dataset() -> None:
    """Asyncio's `CancelledError`, raised by hand or from a cancelled future, ends no executor."""

    async def stray() -> AsyncIterator[int]:
        yield 1
        raise asyncio.CancelledError

    async with staged(batch_size=2) as stage:
        with pytest.raises((RuntimeError, asyncio.CancelledError)):
            await stage.executor.batch(stray(), echo)
        assert [result.data for result in await stage.executor.batch(Dataset(2), echo)] == [1, 2]


async def _broken(_: Episode, data: Any) -> Any:
    raise KeyError(data)


async def test_a_dataset_of_which_everything_fails_is_no_empty_dataset() -> None:
    """However short it is: its end is told as what it is, with the causes."""
    async with staged(batch_size=2) as stage:
        executor = stage.executor
        for call in (executor.batch([1, 2, 3], _broken), anext(executor.batches([1], _broken))):
            with pytest.raises(RolloutsFailing) as caught:
                await call
            assert {type(cause) for cause in caught.value.causes} == {KeyError}
            assert isinstance(caught.value.__cause__, KeyError)


async def test_the_end_of_a_dataset_tells_what_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    """How many failed and how many were rejected, and the last failure as its cause; the log has it, too."""

    async def workflow(_: Episode, data: int) -> Any:
        if data > 2:
            raise KeyError(data)
        return data if data == 1 else None

    async with staged(batch_size=2) as stage:
        with pytest.raises(EndOfDataset, match="2 of its rollouts failed and 1 were rejected") as caught:
            await stage.executor.batch([1, 2, 3, 4], workflow)
        assert (caught.value.left, caught.value.failed, caught.value.rejected) == (1, 2, 1)
        assert isinstance(caught.value.__cause__, KeyError)
        assert [batch async for batch in stage.executor.batches([1, 2, 3, 4], workflow)] == []
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in told if "of a dataset failed (KeyError)" in line]) == 2
    assert len([line for line in told if line.startswith("the dataset has ended")]) == 1


async def test_a_filter_that_takes_nothing_is_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """It may be meant so; it must not be unseen."""

    async def nothing(_: Any) -> bool:
        return False

    async with staged(batch_size=2) as stage:
        await outcome_of(lambda: stage.executor.batch(range(1500), echo, accept=nothing))
    told = [record.getMessage() for record in caplog.records if "in a row brought nothing" in record.getMessage()]
    assert [line.split()[0] for line in told] == ["100", "1000"]


@pytest.mark.parametrize("beside", [False, True])
async def test_a_wait_that_only_a_publication_ends_is_told_once(caplog: pytest.LogCaptureFixture, beside: bool) -> None:
    """Batches without a publication between them, or a new dataset each time: nothing runs, and nothing can."""
    async with staged(batch_size=2, max_staleness=1 if beside else 0) as stage:
        dataset = Dataset()
        await stage.executor.batch(dataset, echo)
        await settled()
        other = Dataset() if beside else dataset
        with pytest.raises(TimeoutError, match=r"2 results were not there within 5 s: .* staleness capacity 0"):
            await stage.executor.batch(other, echo, timeout=5)
        told = [record.getMessage() for record in caplog.records if "nothing runs" in record.getMessage()]
        assert len(told) == 1
        assert ("2 results of other datasets" in told[0]) is beside
        if beside:
            stage.executor.forget(dataset)
        await stage.publish()
        assert len(await within(5, lambda: stage.executor.batch(other, echo))) == 2
