"""The box of results by itself: what happens between a result that is there and the one who takes it."""

import asyncio
from typing import Any

import anyio
import pytest

from lifecycle import OnStale, Rollout, RolloutStatus, StalenessBudget
from lifecycle.rollouts.results import Results

from .rollouts_rig import settled, start

pytestmark = pytest.mark.anyio


class Box:
    """A box of results over a budget, and what was dropped from it."""

    def __init__(self, *, keeps_all: bool = False, **options: Any) -> None:
        self.budget = StalenessBudget(batch_size=4, max_staleness=1, **options)
        self.dropped: list[int] = []
        self.results = Results(self.budget, self._drop, lambda _: (), keeps_all=keeps_all)

    def _drop(self, results: Results, stale: list[Rollout]) -> None:
        for result in stale:
            self.dropped.append(result.id)
            result.status = RolloutStatus.STALE
            if results.keeps_all and not results.closed:
                results.put(result)

    def add(self, *numbers: int) -> None:
        """Put accepted results in, admitted now."""
        for number in numbers:
            ticket = self.budget.admit()
            ticket.accept()
            self.results.put(
                Rollout(id=number, data=number, status=RolloutStatus.ACCEPTED, version=ticket.version, ticket=ticket)
            )


async def _numbers(box: Box, count: int) -> list[int]:
    return [result.id for result in await box.results.take(count)]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_results_on_their_way_to_a_task_that_asyncio_cancels_go_to_the_next() -> None:
    """`Task.cancel()` may strike between results and their receiver."""
    box = Box()
    struck, following = (asyncio.create_task(_numbers(box, 2)) for _ in range(2))
    await settled()
    box.add(1, 2)
    assert len(box.results) == 0
    struck.cancel()
    assert (await following, struck.cancelled()) == ([1, 2], True)


async def test_results_on_their_way_to_a_waiter_that_is_cancelled_are_not_lost() -> None:
    """Whether it still gets them or not: they are with it, or in the box."""
    box = Box()
    got: list[int] = []
    async with anyio.create_task_group() as tasks:

        async def take() -> None:
            got.extend(await _numbers(box, 2))

        tasks.start_soon(take)
        await settled()
        box.add(1, 2)
        tasks.cancel_scope.cancel()
    assert sorted(got + [result.id for result in box.results.take_all()]) == [1, 2]


@pytest.mark.parametrize(("keeps_all", "taken"), [(True, [1, 2, 3]), (False, [3, 4, 5])])
async def test_what_grows_stale_on_its_way_is_dropped_once(keeps_all: bool, taken: list[int]) -> None:
    """A version between a result and its receiver: a box for all keeps it as stale, another takes the next instead."""
    box = Box(keeps_all=keeps_all)
    async with anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: _numbers(box, 3))
        await settled()
        box.add(1, 2)
        box.budget.advance(1)
        box.add(3)
        box.budget.advance(2)
        await settled()
        box.add(4, 5)
        await settled()
        assert (sorted(waiting.value), box.dropped) == (taken, [1, 2])
    assert sorted(result.id for result in box.results.take_all()) == ([4, 5] if keeps_all else [])


async def test_a_box_that_nobody_will_open_drops_what_comes() -> None:
    """An accepted result leaves the buffer at once, so that its capacity is free."""
    box = Box()
    box.add(1)
    box.results.close()
    box.add(2)
    assert (box.dropped, len(box.results)) == ([1, 2], 0)


@pytest.mark.parametrize("on_stale", [OnStale.KEEP, OnStale.MASK])
async def test_policies_that_take_what_is_stale_drop_nothing(on_stale: OnStale) -> None:
    """However old."""
    box = Box(on_stale=on_stale)
    box.add(1)
    box.budget.advance(9)
    box.results.refresh()
    assert (await _numbers(box, 1), box.dropped) == ([1], [])
