"""`rollout()`: one result for each item, in order, for synchronous training."""

from typing import Any

import anyio
import pytest

from lifecycle import Episode, RolloutStatus

from .rollouts_rig import bring, settled, staged, start

pytestmark = pytest.mark.anyio


async def test_every_item_has_its_result_in_order() -> None:
    """Accepted, rejected or failed, in the order of the items, however they end."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.rollout(iter(["a", "b", "c"]), stage.script))
        await settled()
        stage.script.succeed("c")
        stage.script.of("b").fail()
        stage.script.of("a").succeed(None)
        await settled()
        assert bring(waiting.value) == [
            ("a", RolloutStatus.REJECTED), ("b", RolloutStatus.FAILED), ("c", RolloutStatus.ACCEPTED),
        ]  # fmt: skip
        assert (waiting.value[2].staleness, stage.counts) == (0, (0, 1, 2))


async def test_nothing_to_do_is_done_at_once() -> None:
    """No items, no results."""
    async with staged() as stage:
        assert await stage.executor.rollout([], stage.script) == []


async def test_other_submissions_get_none_of_its_results() -> None:
    """And it gets none of theirs."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        stage.submit("x")
        anyone = start(tasks, lambda: stage.executor.wait(1))
        waiting = start(tasks, lambda: stage.executor.rollout(["a"], stage.script))
        await settled()
        stage.script.succeed("a")
        await settled()
        assert (bring(waiting.value), anyone.done) == ([("a", RolloutStatus.ACCEPTED)], False)
        stage.script.succeed("x")
        await settled()
        assert [result.data for result in anyone.value] == ["x"]


async def test_more_items_than_the_budget_holds_are_refused() -> None:
    """They could never be there all at once."""
    async with staged() as stage:
        with pytest.raises(ValueError, match="9 results of 1 rollouts never fit"):
            await stage.executor.rollout(range(9), stage.script)
        with pytest.raises(ValueError, match="3 results of 4 rollouts never fit"):
            await stage.executor.rollout(range(3), stage.script, group_size=4)


@pytest.mark.parametrize("settles_itself", [False, True])
async def test_what_was_not_finished_in_time_is_given_up_and_holds_nothing(settles_itself: bool) -> None:
    """Queued items do not start any more; those that run are rejected as they end, and their capacity is free."""
    async with staged(batch_size=2, max_staleness=1, max_concurrent=2, retries=3) as stage:

        async def workflow(episode: Episode, data: Any) -> Any:
            value = await stage.script(episode, data)
            if settles_itself:
                episode.ticket.accept()
            return value

        with pytest.raises(TimeoutError, match="4 results were not there within 3 s"):
            await stage.executor.rollout(["a", "b", "c", "d"], workflow, timeout=3)
        assert (stage.script.waiting, stage.executor.queued) == (["a", "b"], 0)
        stage.script.succeed("a")
        stage.script.of("b").fail()
        await settled()
        assert (stage.executor.running, stage.budget.running, stage.budget.capacity()) == (0, 0, 2)
        assert stage.budget.max_unconsumed - stage.budget.counted == 4


async def test_a_rollout_over_a_publication_says_how_old_it_is() -> None:
    """With a bound of zero what was admitted before the publication is stale; it is told, not left out."""
    async with staged(batch_size=2, max_staleness=0) as stage, anyio.create_task_group() as tasks:
        waiting = start(tasks, lambda: stage.executor.rollout(["a", "b"], stage.script))
        await settled()
        stage.script.succeed("a")
        await settled()
        await stage.publish()
        stage.script.succeed("b")
        await settled()
        assert [(result.data, result.status, result.staleness) for result in waiting.value] == [
            ("a", RolloutStatus.STALE, 1), ("b", RolloutStatus.STALE, 1),
        ]  # fmt: skip
