"""Filters: whether training may use what a workflow returned."""

import threading
from typing import Any

import anyio
import pytest

from lifecycle import RolloutStatus

from .rollouts_rig import bring, echo, settled, staged

pytestmark = pytest.mark.anyio


def _even(value: int) -> bool:
    return value % 2 == 0


async def _even_later(value: int) -> bool:
    await anyio.lowlevel.checkpoint()
    return value % 2 == 0


class _Even:
    async def __call__(self, value: int) -> int:
        return 1 - value % 2


@pytest.mark.parametrize("accept", [_even, _even_later, _Even()], ids=["sync", "async", "async object"])
async def test_a_filter_rejects_what_training_may_not_use(accept: Any) -> None:
    """What it does not accept has no result for `wait()`, and frees its place."""
    async with staged(accept=accept) as stage:
        numbers = [stage.executor.submit(echo, data) for data in range(4)]
        results = [await stage.executor.wait_for(number) for number in numbers]
        assert bring(results) == [
            (0, RolloutStatus.ACCEPTED), (1, RolloutStatus.REJECTED),
            (2, RolloutStatus.ACCEPTED), (3, RolloutStatus.REJECTED),
        ]  # fmt: skip
        assert stage.counts == (0, 2, 2)


async def test_a_submission_may_name_a_filter_of_its_own() -> None:
    """It takes the place of the executor's."""
    async with staged(accept=_even) as stage:
        number = stage.executor.submit(echo, 1, accept=lambda value: value == 1)
        assert (await stage.executor.wait_for(number)).accepted


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_filter_that_raises_fails_the_rollout(kind: str) -> None:
    """With its exception as the reason."""

    def broken(_: Any) -> bool:
        raise KeyError("reward")

    async def broken_later(_: Any) -> bool:
        raise KeyError("reward")

    async with staged() as stage:
        accept: Any = broken if kind == "sync" else broken_later
        number = stage.executor.submit(echo, 1, accept=accept)
        result = await stage.executor.wait_for(number)
        assert (result.status, str(result.error), result.value) == (RolloutStatus.FAILED, "'reward'", 1)
        assert stage.counts == (0, 0, 1)


async def test_ordinary_filters_run_in_a_thread_one_call_at_a_time() -> None:
    """So that they need not be thread-safe, and keep nobody waiting."""
    here, threads = threading.get_ident(), set()
    begun, go_on = threading.Event(), threading.Event()

    def accept(_: Any) -> bool:
        threads.add(threading.get_ident())
        begun.set()
        return go_on.wait(10)

    async with staged() as stage:
        for data in range(3):
            stage.executor.submit(echo, data, accept=accept)
        await anyio.to_thread.run_sync(begun.wait)
        while (calls := stage.executor._attempts._filter.statistics()).tasks_waiting + calls.borrowed_tokens < 3:
            await anyio.lowlevel.checkpoint()
        assert (calls.borrowed_tokens, calls.tasks_waiting) == (1, 2)
        go_on.set()
        assert len(await stage.executor.wait(3)) == 3
        assert here not in threads


async def test_a_rollout_counts_as_running_until_its_filter_has_decided() -> None:
    """Its ticket comes back with the verdict."""
    decided = anyio.Event()

    async def accept(_: Any) -> bool:
        await decided.wait()
        return True

    async with staged() as stage:
        stage.executor.submit(echo, 1, accept=accept)
        await settled()
        assert (stage.counts, stage.executor.running) == ((1, 0, 0), 1)
        decided.set()
        await stage.executor.wait(1)
        assert stage.counts == (0, 1, 0)
