"""Room for rollouts and new versions: neither waits for the tail of the other, and with no slack they take turns."""

from typing import Any

import anyio
import pytest

from lifecycle import Episode, OnStale, PauseMode, RolloutExecutor, StalenessBudget, events
from tests.lifecycle.driver.driver_rig import SOURCE, prompt, rig, start
from tests.lifecycle.driver.invariants import check
from tests.lifecycle.rollouts.rollouts_rig import settled

from .stage import Books, without_deadlock

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("generates", [False, True], ids=["a tool call", "a generation"])
@without_deadlock
async def test_a_new_version_does_not_wait_for_the_tail(generates: bool) -> None:
    """The capacity is used up by a rollout that takes long, and others wait for it: publishing takes no time."""
    stage = rig(1, budget=StalenessBudget(batch_size=1, max_staleness=0), manual=True)
    async with stage.lifecycle as lifecycle, RolloutExecutor(lifecycle) as executor:
        admitted: list[tuple[str, int | None]] = []

        async def workflow(episode: Episode, data: str) -> str:
            admitted.append((data, episode.version))
            await (episode.generate(prompt()) if generates else anyio.sleep(30))
            return data

        async with anyio.create_task_group() as tasks:
            for data in ("long", "next"):
                executor.submit(workflow, data)
            waiter = start(tasks, lifecycle.admit().__aenter__)
            taker = start(tasks, lambda: executor.wait(1))
            await settled()
            assert (admitted, lifecycle.budget.capacity()) == ([("long", 0)], 0)
            begun = anyio.current_time()
            await lifecycle.publish(SOURCE, version=1, mode=PauseMode.ABORT)
            assert anyio.current_time() == begun
            await settled()
            assert admitted == [("long", 0), ("next", 1)]
            assert (lifecycle.budget.running, waiter.done, taker.done) == (2, False, False)
            begun = anyio.current_time()
            await lifecycle.publish(SOURCE, version=2)
            assert anyio.current_time() == begun
            await settled()
            assert (waiter.value.version, taker.done) == (2, False)
            tasks.cancel_scope.cancel()
        waiter.value.reject()
        await executor.close()
        check(stage)


@pytest.mark.parametrize("on_stale", [OnStale.DROP, OnStale.WAIT])
@pytest.mark.parametrize("size", [4, 3, 1])
@pytest.mark.parametrize("odd", [None, "fails", "brings nothing"])
@without_deadlock
async def test_a_bound_of_zero_is_synchronous_training(odd: str | None, size: int, on_stale: OnStale) -> None:
    """Step after step a full batch of the current version: no deadlock, no negative capacity, no age but zero."""
    stage = rig(2, budget=StalenessBudget(batch_size=4, max_staleness=0, on_stale=on_stale))

    async def workflow(episode: Episode, data: int) -> Any:
        generation = await episode.generate(prompt())
        if data % 5 == 0 and odd is not None:
            return None if odd == "brings nothing" else 1 / 0
        return generation

    async with stage.lifecycle as lifecycle, RolloutExecutor(lifecycle) as executor:
        books = Books(lifecycle)
        begun, dataset = anyio.current_time(), range(1, 1000)
        for version in range(6):
            batch = await executor.batch(dataset, workflow, size=size)
            assert [(result.version, result.staleness) for result in batch] == [(version, 0)] * size
            assert {made for result in batch for made in result.value.versions} == {version}
            await lifecycle.publish(SOURCE, version=version + 1)
        assert anyio.current_time() == begun
        assert books.drift == []
        await executor.close()
        assert lifecycle.budget.capacity() == 4
        check(stage)


@without_deadlock
async def test_with_a_bound_of_zero_no_more_is_in_flight_than_the_version_can_use() -> None:
    """None is a straggler by design: nothing is admitted for a version that is not published."""
    stage = rig(1, budget=StalenessBudget(batch_size=4, max_staleness=0))
    async with stage.lifecycle as lifecycle:
        tickets = [await lifecycle.admit().__aenter__() for _ in range(4)]
        with anyio.move_on_after(1000) as waiting:
            await lifecycle.admit().__aenter__()
        assert waiting.cancelled_caught
        for ticket in tickets:
            ticket.accept()
        assert (lifecycle.consume(tickets), lifecycle.budget.capacity()) == ((0,) * 4, 0)
        await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.budget.capacity() == 4
        assert stage.of(events.RolloutDiscarded) == []
        check(stage)
