"""Results that grow older than the bound before they are taken: dropped, kept, masked, or waited for."""

import anyio
import pytest

from lifecycle import MeasuredFrom, OnStale, RolloutStatus, events

from .rollouts_rig import bring, settled, staged, start

pytestmark = pytest.mark.anyio


async def test_what_has_grown_too_old_is_dropped_with_the_version_and_its_place_is_filled() -> None:
    """At once, with nobody waiting: the next submission starts in its place."""
    async with staged(batch_size=2, max_staleness=0) as stage:
        stage.submit("a", "b", "c", "d", "e")
        await settled()
        stage.script.succeed("a")
        await settled()
        assert stage.script.waiting == ["b"]
        await stage.publish(consumed=0)
        # "a" is dropped and "b" still runs, so that there is room for one.
        assert stage.script.waiting == ["b", "c"]
        assert [(event.ticket, event.staleness) for event in stage.of(events.RolloutDiscarded)] == [(1, 1)]
        assert (await stage.executor.wait_for(1)).status is RolloutStatus.STALE
        assert stage.executor.finished == 0


async def test_a_rollout_that_ends_too_old_is_dropped_as_it_ends() -> None:
    """It was admitted before the bound and nobody will take it."""
    async with staged(batch_size=2, max_staleness=0) as stage, anyio.create_task_group() as tasks:
        stage.submit("a")
        await settled()
        await stage.publish()
        stage.submit("b")
        waiting = start(tasks, lambda: stage.executor.wait(1))
        await settled()
        stage.script.succeed("a")
        await settled()
        assert not waiting.done
        stage.script.succeed("b")
        await settled()
        assert bring(waiting.value) == [("b", RolloutStatus.ACCEPTED)]
        result = await stage.executor.wait_for(1)
        assert (result.status, result.staleness) == (RolloutStatus.STALE, 1)


@pytest.mark.parametrize(
    ("max_staleness", "versions", "kept"), [(4, 4, True), (4, 5, False), (0, 0, True), (0, 1, False)]
)
async def test_the_window_is_exact(max_staleness: int, versions: int, kept: bool) -> None:
    """With a bound of four a lag of four is taken and one of five is dropped; with zero only an equal version."""
    async with staged(batch_size=2, max_staleness=max_staleness) as stage:
        [number] = stage.submit("a")
        await settled()
        stage.script.succeed("a")
        await settled()
        for _ in range(versions):
            await stage.publish()
        result = await stage.executor.wait_for(number)
        assert (result.accepted, result.staleness) == (kept, versions)


@pytest.mark.parametrize("on_stale", [OnStale.KEEP, OnStale.MASK])
async def test_what_is_kept_or_masked_is_delivered_however_old(on_stale: OnStale) -> None:
    """With its staleness, by which training may tell."""
    async with staged(batch_size=2, max_staleness=0, budget={"on_stale": on_stale}) as stage:
        stage.submit("a")
        await settled()
        stage.script.succeed("a")
        await settled()
        await stage.publish()
        await stage.publish()
        [result] = await stage.executor.wait(1)
        assert (result.status, result.staleness) == (RolloutStatus.ACCEPTED, 2)
        assert stage.budget.mask((0, 1, 2, None)) == (False, False, True, False)


@pytest.mark.parametrize("last", ["fails", "succeeds"])
async def test_a_batch_waits_for_older_rollouts_that_would_grow_too_old(last: str) -> None:
    """WAIT: the younger ones are there, and are not taken while an older one runs that could not be taken later."""
    async with (
        staged(batch_size=2, max_staleness=1, budget={"on_stale": OnStale.WAIT}) as stage,
        anyio.create_task_group() as tasks,
    ):
        stage.submit("a", "b", "c", "d")
        await settled()
        stage.script.succeed("c", "d")
        await settled()
        waiting = start(tasks, lambda: stage.executor.wait(2))
        await settled()
        # "a" and "b" can still be taken with the next version.
        assert sorted(result.data for result in waiting.value) == ["c", "d"]
        await stage.publish()
        stage.submit("e", "f")
        await settled()
        stage.script.succeed("e", "f")
        waiting = start(tasks, lambda: stage.executor.wait(2))
        await settled()
        assert not waiting.done
        stage.script.succeed("a")
        await settled()
        assert not waiting.done
        if last == "fails":
            stage.script.of("b").fail()
        else:
            stage.script.succeed("b")
        await settled()
        assert [result.data for result in waiting.value] == ["a", "b"]
        assert stage.of(events.RolloutDiscarded) == []


@pytest.mark.parametrize("verdict", ["accept", "reject"])
async def test_a_batch_that_waits_for_a_caller_of_admit_goes_when_that_returns(verdict: str) -> None:
    """WAIT: rollouts outside the executor count as those within."""
    async with (
        staged(batch_size=2, max_staleness=0, budget={"on_stale": OnStale.WAIT}) as stage,
        anyio.create_task_group() as tasks,
    ):
        ticket = await stage.lifecycle.admit().__aenter__()
        stage.submit("a")
        await settled()
        stage.script.succeed("a")
        waiting = start(tasks, lambda: stage.executor.wait(1))
        await settled()
        assert not waiting.done
        getattr(ticket, verdict)()
        await settled()
        assert bring(waiting.value) == [("a", RolloutStatus.ACCEPTED)]


async def test_staleness_can_be_counted_from_the_oldest_token() -> None:
    """A rollout that began to generate late is as old as its tokens."""
    async with staged(batch_size=2, max_staleness=0, budget={"measured_from": MeasuredFrom.OLDEST_TOKEN}) as stage:
        first, second = stage.submit("a", "b")
        await settled()
        await stage.publish()
        stage.script.of("a").ticket.saw((1, 1))
        stage.script.of("b").ticket.saw((None, 0, 1))
        stage.script.succeed("a", "b")
        results = [await stage.executor.wait_for(number) for number in (first, second)]
        assert [(result.status, result.staleness) for result in results] == [
            (RolloutStatus.ACCEPTED, 0), (RolloutStatus.STALE, 1),
        ]  # fmt: skip
        assert [event.by_token for event in stage.of(events.RolloutConsumed)] == [0]


async def test_a_rollout_that_ends_too_old_frees_its_place_with_nobody_waiting() -> None:
    """At once, and not only when somebody looks for results."""
    async with staged(batch_size=2, max_staleness=0) as stage:
        stage.submit("a", "b")
        await settled()
        await stage.publish(consumed=0)
        stage.script.succeed("a")
        await settled()
        assert (stage.executor.finished, stage.budget.capacity()) == (0, 1)
        assert [(event.ticket, event.staleness) for event in stage.of(events.RolloutDiscarded)] == [(1, 1)]


async def test_a_dataset_waits_for_what_lies_beside_it_too() -> None:
    """Training can take two more rollouts of version 0 after this one: three are left, of which two still run."""
    budget = {"on_stale": OnStale.WAIT}
    async with staged(batch_size=2, max_staleness=1, budget=budget) as stage, anyio.create_task_group() as tasks:
        stage.submit("a", "b", "c")
        batch = start(tasks, lambda: stage.executor.batch(["d"], stage.script, size=1))
        await settled()
        stage.script.succeed("a", "d")
        await settled()
        assert not batch.done
        stage.script.of("b").fail()
        await settled()
        assert bring(batch.value) == [("d", RolloutStatus.ACCEPTED)]
        tasks.cancel_scope.cancel()
