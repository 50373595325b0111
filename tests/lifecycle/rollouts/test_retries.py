"""Retries: a rollout that failed is run again, with a new ticket, before that is its result."""

import anyio
import pytest

from lifecycle import RolloutStatus

from .rollouts_rig import settled, staged

pytestmark = pytest.mark.anyio


async def test_a_rollout_that_failed_is_run_again_with_a_new_ticket() -> None:
    """Each attempt has a ticket of its own and sees the version of its time; the result is that of the last one."""
    async with staged(retries=2) as stage:
        [number] = stage.submit("a")
        await settled()
        stage.script.of("a").fail()
        await settled()
        await stage.publish()
        stage.script.of("a").fail()
        await settled()
        stage.script.of("a").succeed(5)
        result = await stage.executor.wait_for(number)
        tickets = [run.ticket for run in stage.script.runs]
        assert (result.value, result.errors, result.version) == (5, (), 1)
        assert ([ticket.id for ticket in tickets], [ticket.accepted for ticket in tickets]) == (
            [1, 2, 3], [False, False, True],
        )  # fmt: skip
        assert stage.counts == (0, 1, 2)


async def test_a_rollout_that_fails_each_time_has_failed_of_the_last() -> None:
    """After `retries` repetitions the failure is the result; a submission may name its own number."""
    async with staged(retries=5) as stage:
        [number] = stage.submit("a", retries=1)
        for attempt in range(2):
            await settled()
            stage.script.of("a").fail(ValueError(attempt))
        result = await stage.executor.wait_for(number)
        assert (result.status, [str(error) for error in result.errors]) == (RolloutStatus.FAILED, ["1"])
        assert len(stage.script.runs) == 2


async def test_what_returned_none_is_not_repeated() -> None:
    """There was nothing to train on, and there would not be the next time."""
    async with staged(retries=3) as stage:
        [number] = stage.submit("a")
        await settled()
        stage.script.of("a").succeed(None)
        assert (await stage.executor.wait_for(number)).status is RolloutStatus.REJECTED
        assert len(stage.script.runs) == 1


async def test_a_repetition_goes_before_those_that_have_not_begun() -> None:
    """It has waited before; only whoever stands at the gate as its ticket comes back goes first."""
    async with staged(batch_size=1, max_staleness=0, retries=1) as stage:
        stage.submit("a", "b")
        await settled()
        stage.script.of("a").fail()
        await settled()
        # Its place went to "b", which stood at the gate when it came back.
        assert (stage.script.waiting, stage.executor.queued) == (["b"], 1)
        stage.submit("c")
        stage.script.of("b").fail()
        await settled()
        assert (stage.script.waiting, stage.executor.queued) == (["a"], 2)
        stage.script.of("a").succeed(None)
        await settled()
        assert stage.script.waiting == ["b"]


async def test_a_small_repetition_before_a_big_group_starts_where_it_fits() -> None:
    """The executor stands at the gate with the size of what is first in its queue, and looks again as that changes."""
    async with staged(batch_size=2, max_staleness=1, retries=1) as stage:
        stage.submit("a", "b", "c")
        await settled()
        stage.script.succeed("a")
        await settled()
        stage.submit("big", group_size=4)
        await settled()
        stage.script.of("b").fail()
        await settled()
        assert stage.script.waiting == ["c", "b"]


async def test_rollouts_that_take_too_long_are_repeated() -> None:
    """A timeout is a failure like any other."""
    async with staged(retries=1, timeout=2.0) as stage, anyio.create_task_group():
        [number] = stage.submit("a")
        result = await stage.executor.wait_for(number)
        assert (result.status, len(stage.script.runs), stage.counts) == (RolloutStatus.FAILED, 2, (0, 0, 2))
