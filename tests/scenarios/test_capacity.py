"""Capacity that drifts: after a recovery, a cancellation or a hung rollout, and while a publication waits for room."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Episode, RolloutExecutor, RolloutStatus, StalenessBudget
from tests.lifecycle.driver.driver_rig import SOURCE, Rig, prompt, rig, start
from tests.lifecycle.driver.invariants import check
from tests.lifecycle.rollouts.rollouts_rig import bring, settled, staged

from .stage import Books, Interruption, without_deadlock

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------------------------------------------------- recovery


@given(
    version=st.integers(0, 10**6), batch=st.integers(1, 512), staleness=st.integers(0, 16), before=st.integers(0, 99)
)
def test_a_run_that_is_taken_up_again_has_the_capacity_of_a_new_one(
    version: int, batch: int, staleness: int, before: int
) -> None:
    """Whatever version it goes on from, and whatever the budget had counted: (max_staleness + 1) batches."""
    budget = StalenessBudget(batch_size=batch, max_staleness=staleness, accepted=before)
    budget.restore(version)
    assert (budget.version, budget.capacity()) == (version, (staleness + 1) * batch)


WAYS_BACK: dict[str, Callable[[], Rig]] = {
    "the lifecycle is told the version": lambda: rig(1, budget=sizes(), initial_version=100),
    "the budget was restored": lambda: rig(1, budget=restored(), initial_version=100),
    "the budget is told the version": lambda: rig(1, budget=sizes(version=100), initial_version=100),
    "the first publication tells": lambda: rig(1, budget=sizes(), initial_version=None),
}


def sizes(**options: Any) -> StalenessBudget:
    """Return a budget of three batches of four."""
    return StalenessBudget(batch_size=4, max_staleness=2, **options)


def restored() -> StalenessBudget:
    """Return one that goes on from a checkpoint."""
    budget = sizes()
    budget.restore(100)
    return budget


@pytest.mark.parametrize("way", WAYS_BACK)
async def test_after_a_recovery_no_more_rollouts_start_than_in_a_new_run(way: str) -> None:
    """At version 100: as many as the bound allows, and not a hundred batches more."""
    stage = WAYS_BACK[way]()
    async with stage.lifecycle as lifecycle, RolloutExecutor(lifecycle) as executor:
        if lifecycle.version is None:
            await lifecycle.publish(SOURCE, version=100)
            await lifecycle.resume()

        async def wait(_: Episode, __: int) -> None:
            await anyio.sleep_forever()

        for number in range(50):
            executor.submit(wait, number)
        await settled()
        assert (lifecycle.version, executor.running, lifecycle.budget.capacity()) == (100, 12, 0)
        await executor.close()
        assert lifecycle.budget.capacity() == 12
        check(stage)


# ------------------------------------------------------------------------------------------------------ cancellation


async def by_a_caller(stage: Rig, interruption: Interruption) -> None:
    """A rollout without an executor, cancelled anywhere between waiting for its ticket and accepting it."""

    async def rollout() -> None:
        async with stage.lifecycle.admit() as ticket:
            await stage.lifecycle.generate(prompt(), ticket=ticket)
            ticket.accept()

    with interruption.scope:
        await interruption.during(rollout())


async def in_a_workflow(stage: Rig, interruption: Interruption) -> None:
    """Workflows that run under a scope of their own; one of a group of two is cancelled."""

    async def workflow(episode: Episode, data: int) -> Any:
        if (data, episode.member) != (1, 1):
            return await episode.generate(prompt())
        with interruption.scope:
            return await interruption.during(episode.generate(prompt()))
        return None

    async with RolloutExecutor(stage.lifecycle, group_size=2) as executor:
        for number in [executor.submit(workflow, number) for number in range(3)]:
            await executor.wait_for(number)


async def around_an_executor(stage: Rig, interruption: Interruption) -> None:
    """Everything within is cancelled while one of its workflows waits."""

    async def workflow(episode: Episode, data: int) -> Any:
        generating = episode.generate(prompt())
        return await (interruption.during(generating) if data == 1 else generating)

    with interruption.scope:
        async with RolloutExecutor(stage.lifecycle, retries=1) as executor:
            for number in [executor.submit(workflow, number) for number in range(5)]:
                await executor.wait_for(number)


async def at_a_batch(stage: Rig, interruption: Interruption) -> None:
    """Training gives up waiting for a batch, and asks again."""

    async def workflow(episode: Episode, _: int) -> Any:
        return await episode.generate(prompt())

    dataset = range(100)
    async with RolloutExecutor(stage.lifecycle) as executor:
        with interruption.scope:
            await interruption.during(executor.batch(dataset, workflow, size=2))
        assert len(await executor.batch(dataset, workflow, size=2)) == 2


@pytest.mark.parametrize("awaits", [True, False], ids=["at each await", "at each event"])
@pytest.mark.parametrize("scene", [by_a_caller, in_a_workflow, around_an_executor, at_a_batch])
@without_deadlock
async def test_no_cancellation_makes_the_counters_drift(
    scene: Callable[[Rig, Interruption], Awaitable[None]], awaits: bool
) -> None:
    """Wherever it comes: submitted = running + accepted + rejected at every event, and nothing is held after it."""
    at = 0
    while True:
        at += 1
        stage = rig(1, budget=StalenessBudget(batch_size=2, max_staleness=1, max_concurrent=4), manual=True)
        interruption = Interruption(at, awaits=awaits)
        async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
            books = Books(lifecycle)
            before = await lifecycle.admit(group_size=4).__aenter__()
            lifecycle.subscribe(interruption.on)
            scenery = start(tasks, lambda: scene(stage, interruption))  # noqa: B023 - over within the loop
            await settled()
            before.reject()
            for version in (1, 2, 3, 4, 5, 6):
                await settled()
                stage["E1"].produce(1)
                await settled()
                await lifecycle.publish(SOURCE, version=version)
            while not scenery.done:
                stage["E1"].produce(1)
                await anyio.sleep(0.1)
            budget = lifecycle.budget
            assert books.drift == []
            assert (budget.running, budget.accepted, budget.rejected) == books.counts
            assert (budget.running, lifecycle.running, stage["E1"].in_flight) == (0, 0, 0)
            assert budget.submitted >= 4
            check(stage)
        if not interruption.reached:
            break
    assert at > 1


async def test_a_rollout_whose_fate_is_unknown_counts_as_running_until_it_is_known() -> None:
    """Lost track of by a cancelled caller, it holds its capacity; told later, it gives it back once."""
    stage = rig(1, budget=StalenessBudget(batch_size=2, max_staleness=0))
    async with stage.lifecycle as lifecycle:
        books = Books(lifecycle)
        with anyio.move_on_after(1):
            async with lifecycle.admit() as ticket:
                ticket.hold()
                await anyio.sleep_forever()
        assert (lifecycle.budget.capacity(), *books.counts) == (1, 1, 0, 0)
        ticket.reject()
        ticket.reject()
        assert (lifecycle.budget.capacity(), *books.counts) == (2, 0, 0, 1)
        assert books.drift == []
        check(stage)


# --------------------------------------------------------------------------------------------------------- stragglers


class Hanging:
    """A workflow whose group member 3 never returns, for every prompt that is in `prompts`."""

    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts
        self.begun: list[tuple[str, int]] = []

    async def __call__(self, episode: Episode, data: str) -> str:
        self.begun.append((data, episode.member))
        if data in self.prompts and episode.member == 3:
            await anyio.sleep_forever()
        await episode.generate(prompt())
        return data


@without_deadlock
async def test_a_group_with_a_member_that_hangs_is_closed_without_it() -> None:
    """Seven of eight are there after the deadline; the step goes on, and the eighth holds nothing."""
    async with staged(batch_size=8, max_staleness=0, group_size=8, timeout=60) as stage:
        workflow, begun = Hanging("a"), anyio.current_time()
        stage.executor.submit(workflow, "a")
        [group] = await stage.executor.wait(1)
        assert anyio.current_time() - begun == 60
        assert (group.status, len(group.values), type(group.error)) == (RolloutStatus.ACCEPTED, 7, TimeoutError)
        assert stage.counts == (0, 7, 1)
        await stage.publish()
        stage.executor.submit(workflow, "b")
        assert len((await stage.executor.wait(1))[0].values) == 8
        assert stage.budget.capacity() == 0
        await stage.publish()
        assert stage.budget.capacity() == 8


@without_deadlock
async def test_a_prompt_that_hangs_every_time_is_given_up() -> None:
    """Repeated once and given up, also after a restart that draws it again; the batch is filled without it."""
    for _ in range(2):
        async with staged(batch_size=8, max_staleness=0, group_size=8, min_members=8, timeout=60, retries=1) as stage:
            workflow, trained = Hanging("bad"), []
            async for batch in stage.executor.batches(["bad", "a", "b", "c"], workflow):
                trained += bring(batch)
                await stage.publish()
            assert sorted(trained) == [(data, RolloutStatus.ACCEPTED) for data in ("a", "b", "c")]
            assert workflow.begun.count(("bad", 3)) == 2
            assert (stage.counts, stage.budget.capacity()) == ((0, 24, 16), 8)
