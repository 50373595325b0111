"""`wait()` and `wait_for()`: oldest first, first come first served, and nothing is lost on the way."""

import anyio
import pytest

from lifecycle import RolloutStatus
from lifecycle.errors import LifecycleError, NoSuchRollout

from .rollouts_rig import bring, settled, staged, start

pytestmark = pytest.mark.anyio


async def test_the_oldest_results_are_taken_first() -> None:
    """Oldest by version at admission, then by submission, in whatever order they finish."""
    async with staged(batch_size=2, max_staleness=2) as stage:
        stage.submit("a", "b")
        await settled()
        await stage.publish()
        stage.submit("c")
        await settled()
        stage.script.succeed("c", "b", "a")
        await settled()
        assert [(result.data, result.version, result.staleness) for result in await stage.executor.wait(3)] == [
            ("a", 0, 1), ("b", 0, 1), ("c", 1, 0),
        ]  # fmt: skip


async def test_waiters_are_served_first_come_first_served() -> None:
    """One who wants much is not overtaken by one who wants little."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        stage.submit("a", "b", "c")
        much = start(tasks, lambda: stage.executor.wait(2))
        await settled()
        little = start(tasks, lambda: stage.executor.wait(1))
        await settled()
        stage.script.succeed("a")
        await settled()
        assert (much.done, little.done, stage.executor.finished) == (False, False, 1)
        stage.script.succeed("b")
        await settled()
        assert ([result.data for result in much.value], little.done) == (["a", "b"], False)
        stage.script.succeed("c")
        await settled()
        assert [result.data for result in little.value] == ["c"]


async def test_a_waiter_that_leaves_lets_those_behind_it_go() -> None:
    """The next one is served at once with what is there."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        stage.submit("a")
        much, scope = None, anyio.CancelScope()

        async def want_two() -> None:
            with scope:
                await stage.executor.wait(2)

        tasks.start_soon(want_two)
        await settled()
        much = start(tasks, lambda: stage.executor.wait(1))
        stage.script.succeed("a")
        await settled()
        assert not much.done
        scope.cancel()
        await settled()
        assert [result.data for result in much.value] == ["a"]


async def test_a_wait_that_times_out_loses_nothing() -> None:
    """`TimeoutError` says how things stand; the result that was there is there still."""
    async with staged() as stage:
        stage.submit("a", "b")
        await settled()
        stage.script.succeed("a")
        with pytest.raises(TimeoutError, match="2 results were not there within 5 s: 1 finished, 1 running"):
            await stage.executor.wait(2, timeout=5)
        assert [result.data for result in await stage.executor.wait(1, timeout=0)] == ["a"]


async def test_results_come_while_submission_is_closed_and_while_generation_is_stopped() -> None:
    """What finishes in SUSPENDED or PAUSED can be taken there."""
    async with staged() as stage:
        stage.submit("a", "b")
        await settled()
        await stage.lifecycle.suspend()
        stage.script.succeed("a")
        assert bring(await stage.executor.wait(1)) == [("a", RolloutStatus.ACCEPTED)]
        await stage.lifecycle.pause_generation()
        stage.script.succeed("b")
        assert bring(await stage.executor.wait(1)) == [("b", RolloutStatus.ACCEPTED)]


@pytest.mark.parametrize(
    ("count", "complaint"), [(9, "9 results of 1 rollouts never fit"), (0, "count must be an int")]
)
async def test_a_wait_that_could_never_end_is_refused(count: int, complaint: str) -> None:
    """More than the budget can hold unconsumed will never be there."""
    async with staged() as stage:
        with pytest.raises(ValueError, match=complaint):
            await stage.executor.wait(count)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("value", "status"), [("value", RolloutStatus.ACCEPTED), (None, RolloutStatus.REJECTED)], ids=["value", "none"]
)
async def test_one_result_can_be_waited_for_before_and_after_it_is_there(
    when: str, value: object, status: RolloutStatus
) -> None:
    """Whatever it is; asked for twice, it is not known any more."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        [number] = stage.submit("a")
        await settled()
        if when == "after":
            stage.script.of("a").succeed(value)
            await settled()
        waiting = start(tasks, lambda: stage.executor.wait_for(number))
        await settled()
        stage.script.of("a").succeed(value)
        await settled()
        assert bring([waiting.value]) == [("a", status)]
        with pytest.raises(NoSuchRollout, match=f"rollout {number} is not known, or its result was taken"):
            await stage.executor.wait_for(number)
        assert stage.executor.finished == 0


async def test_a_rollout_that_nobody_submitted_is_not_known() -> None:
    """`NoSuchRollout` instead of a wait for ever."""
    async with staged() as stage:
        with pytest.raises(NoSuchRollout):
            await stage.executor.wait_for(1)


async def test_a_result_waited_for_by_id_goes_to_nobody_else() -> None:
    """`wait()` does not take it, and a second caller who wants the same is told."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        first, second = stage.submit("a", "b")
        by_id = start(tasks, lambda: stage.executor.wait_for(first))
        anyone = start(tasks, lambda: stage.executor.wait(1))
        await settled()
        with pytest.raises(NoSuchRollout, match="somebody else waits for rollout 1"):
            await stage.executor.wait_for(first)
        stage.script.succeed("a")
        await settled()
        assert (by_id.value.data, anyone.done) == ("a", False)
        stage.script.succeed("b")
        await settled()
        assert [result.id for result in anyone.value] == [second]


async def test_who_takes_a_result_first_has_it() -> None:
    """One that `wait()` has taken is not known by id any more; one taken by id leaves `wait()` waiting."""
    async with staged() as stage:
        first, second = stage.submit("a", "b")
        await settled()
        stage.script.succeed("a", "b")
        await settled()
        assert (await stage.executor.wait_for(second)).data == "b"
        assert [result.id for result in await stage.executor.wait(1)] == [first]
        with pytest.raises(NoSuchRollout):
            await stage.executor.wait_for(first)


@pytest.mark.parametrize("ends", ["before", "after"])
async def test_waiting_for_one_in_vain_leaves_its_result_to_others(ends: str) -> None:
    """Timed out, the result is there for `wait()`, whenever it comes, and can be asked for again."""
    async with staged() as stage:
        first, second = stage.submit("a", "b")
        with pytest.raises(TimeoutError, match="1 results were not there within 2 s"):
            await stage.executor.wait_for(first, timeout=2)
        with pytest.raises(TimeoutError):
            await stage.executor.wait_for(second, timeout=2)
        stage.script.succeed("a")
        if ends == "before":
            await settled()
        assert [result.id for result in await stage.executor.wait(1)] == [first]
        stage.script.succeed("b")
        assert (await stage.executor.wait_for(second)).data == "b"


async def test_a_result_that_is_not_for_training_is_remembered_for_who_asks() -> None:
    """Also when the one who waited for it has left."""
    async with staged() as stage:
        [number] = stage.submit("a")
        with pytest.raises(TimeoutError):
            await stage.executor.wait_for(number, timeout=1)
        stage.script.of("a").succeed(None)
        await settled()
        assert (await stage.executor.wait_for(number)).status is RolloutStatus.REJECTED


async def test_many_waiters_get_one_result_each() -> None:
    """No result is delivered twice, and none is kept back."""
    async with staged(batch_size=50, max_staleness=1) as stage, anyio.create_task_group() as tasks:
        stage.submit(*range(60))
        waiting = [start(tasks, lambda: stage.executor.wait(1)) for _ in range(60)]
        await settled()
        stage.script.succeed(*reversed(range(60)))
        await settled()
        assert all(later.done and not isinstance(later.error, LifecycleError) for later in waiting)
        assert sorted(later.value[0].data for later in waiting) == list(range(60))
        assert stage.counts == (0, 60, 0)
