"""Ages that are not what they seem: which version counts, when it advances, and what is too old."""

from itertools import pairwise
from typing import Any

import anyio
import pytest

from lifecycle import (
    Episode,
    Generation,
    MeasuredFrom,
    OnStale,
    PauseMode,
    RolloutExecutor,
    RolloutStatus,
    StalenessBudget,
    State,
    errors,
    events,
)
from lifecycle.events import Request
from lifecycle.testing import Delay, Refuse
from tests.lifecycle.driver.driver_rig import SOURCE, prompt, rig, start
from tests.lifecycle.driver.invariants import check, cure
from tests.lifecycle.rollouts.rollouts_rig import settled

from .stage import Books, produce_all, without_deadlock

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------------------------------------------------- old tokens


async def generate(episode: Episode, tokens: int) -> Generation:
    """Generate, and nothing else."""
    return await episode.generate(prompt(tokens))


@pytest.mark.parametrize("on_stale", [OnStale.DROP, OnStale.WAIT, OnStale.MASK, OnStale.KEEP])
@without_deadlock
async def test_a_long_rollout_is_as_old_as_its_oldest_token(on_stale: OnStale) -> None:
    """Begun at 1 and interrupted by five versions, it passed at admission, and is looked at again at its end."""
    budget = StalenessBudget(batch_size=2, max_staleness=2, on_stale=on_stale, measured_from=MeasuredFrom.OLDEST_TOKEN)
    stage = rig(1, budget=budget, initial_version=1, manual=True)
    async with stage.lifecycle as lifecycle, RolloutExecutor(lifecycle) as executor:
        books = Books(lifecycle)
        number = executor.submit(generate, 6)
        for version in range(2, 7):
            await settled()
            stage["E1"].produce(1)
            await lifecycle.publish(SOURCE, version=version, consumed=0)
        await settled()
        stage["E1"].produce(1)
        rollout = await executor.wait_for(number)
        dropped = on_stale in {OnStale.DROP, OnStale.WAIT}
        assert rollout.status is (RolloutStatus.STALE if dropped else RolloutStatus.ACCEPTED)
        assert (rollout.version, rollout.staleness) == (1, 5)
        assert rollout.value.versions == (1, 2, 3, 4, 5, 6)
        assert budget.mask(rollout.value.versions) == (False, False, False, True, True, True)
        assert [len(stage.of(kind)) for kind in (events.RolloutDiscarded, events.RolloutConsumed)] == (
            [1, 0] if dropped else [0, 1]
        )
        # What was dropped is free at once, and once; what was taken with the next version.
        assert budget.capacity() == (6 if dropped else 5)
        await lifecycle.publish(SOURCE, version=7, consumed=0 if dropped else None)
        assert (budget.capacity(), budget.running, books.drift) == (6, 0, [])
        check(stage)


@pytest.mark.parametrize("measured_from", MeasuredFrom)
@without_deadlock
async def test_age_is_counted_from_the_beginning_and_not_from_the_end(measured_from: MeasuredFrom) -> None:
    """Submitted at 3 and completed at 6: it is 3 versions old, and not fresh."""
    budget = StalenessBudget(batch_size=4, max_staleness=3, measured_from=measured_from)
    stage = rig(1, budget=budget, initial_version=3, manual=True)
    async with stage.lifecycle as lifecycle, RolloutExecutor(lifecycle) as executor:
        executor.submit(generate, 2)
        await settled()
        stage["E1"].produce(1)
        for version in (4, 5, 6):
            await lifecycle.publish(SOURCE, version=version)
        await settled()
        stage["E1"].produce(1)
        [rollout] = await executor.wait(1)
        assert rollout.value.versions == (3, 6)
        assert (rollout.version, rollout.staleness) == (3, 3)
        assert [event.staleness for event in stage.of(events.RolloutConsumed)] == [3]
        check(stage)


@pytest.mark.parametrize("admitted", [5, 6, 7, 8])
@pytest.mark.parametrize("measured_from", MeasuredFrom)
@without_deadlock
async def test_every_version_within_the_window_is_usable_and_none_before_it(
    admitted: int, measured_from: MeasuredFrom
) -> None:
    """With a bound of 2, at version 8: what was made at 6, 7 and 8 is taken, and 5 makes room."""
    budget = StalenessBudget(batch_size=4, max_staleness=2, measured_from=measured_from)
    stage = rig(1, budget=budget, initial_version=admitted)
    async with stage.lifecycle as lifecycle, RolloutExecutor(lifecycle) as executor:
        number = executor.submit(generate, 4)
        await settled()
        assert executor.finished == 1
        for version in range(admitted + 1, 9):
            assert executor.finished == 1
            await lifecycle.publish(SOURCE, version=version)
        usable = admitted >= 6
        assert executor.finished == usable
        rollout = await executor.wait_for(number)
        assert (rollout.accepted, rollout.staleness) == (usable, 8 - admitted)
        assert set(budget.mask(rollout.value.versions)) == {usable}
        check(stage)


# ------------------------------------------------------------------------------------- what is published, and when


FAILING = [
    events.PauseGeneration,
    events.BeginUpdate,
    events.TransferWeights,
    events.FinishUpdate,
    events.VerifyWeights,
]


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("consumed", [None, 3])
@without_deadlock
async def test_only_a_publication_that_succeeded_is_a_version(kind: type[Request], consumed: int | None) -> None:
    """One that fails leaves 7, and no room; what was admitted at 7 stays so at 8, and is too old for a bound of 0."""
    budget = StalenessBudget(batch_size=4, max_staleness=0)
    stage = rig(2, budget=budget, initial_version=7, manual=True)
    async with stage.lifecycle as lifecycle, RolloutExecutor(lifecycle) as executor:
        first, *others = [executor.submit(generate, 2) for _ in range(4)]
        await settled()
        for engine in stage.engines:
            engine.produce(1)
        stage["E2"].on(kind, *[Refuse()] * 40)
        with pytest.raises(errors.OperationFailed):
            await lifecycle.publish(SOURCE, version=8, consumed=consumed)
        assert (lifecycle.version, budget.version, budget.capacity()) == (7, 7, 0)
        assert stage.of(events.VersionAdvanced) == []
        stage.behave()
        if lifecycle.state is State.FAULTED:
            await lifecycle.recover()
        await lifecycle.publish(SOURCE, version=8, consumed=consumed)
        if lifecycle.state is State.SUSPENDED:
            await lifecycle.resume()
        assert [(event.previous, event.version) for event in stage.of(events.VersionAdvanced)] == [(7, 8)]
        assert budget.capacity() == (4 if consumed is None else consumed)
        second = executor.submit(generate, 2)
        for _ in range(3):
            await settled()
            for engine in stage.engines:
                engine.produce(1)
        results = [await executor.wait_for(number) for number in (first, *others, second)]
        assert [(result.version, result.status) for result in results] == [
            *[(7, RolloutStatus.STALE)] * 4, (8, RolloutStatus.ACCEPTED),
        ]  # fmt: skip
        assert [result.value.versions for result in results] == [(7, 8)] * 4 + [(8, 8)]
        check(stage)


@pytest.mark.parametrize("fails", [None, 1, 2, 3])
@pytest.mark.parametrize("stepwise", [False, True], ids=["publish()", "step by step"])
async def test_a_model_in_three_buckets_is_one_version(fails: int | None, stepwise: bool) -> None:
    """The version is a name, not a count of calls: it advances once when all is there, and not at all otherwise."""
    stage = rig(2, buckets=3, initial_version=7)
    async with stage.lifecycle as lifecycle:
        seen: list[int] = []
        lifecycle.subscribe(lambda event: seen.append(event.version or 0))
        if fails is not None:
            stage["E2"].on(events.TransferWeights, *[Delay(0)] * (fails - 1), Refuse())

        async def publish() -> None:
            if not stepwise:
                await lifecycle.publish(SOURCE, version=8)
                return
            await lifecycle.suspend()
            await lifecycle.pause_generation()
            await lifecycle.begin_update(version=8)
            assert await lifecycle.transfer(SOURCE) == 3
            await lifecycle.finish_update()

        if fails is None:
            await publish()
        else:
            with pytest.raises(errors.PublicationFailed):
                await publish()
        [*advanced] = stage.of(events.VersionAdvanced)
        assert [event.version for event in advanced] == ([8] if fails is None else [])
        assert seen == sorted(seen)
        assert set(seen) == ({7, 8} if fails is None else {7})
        moved = [event.seq for event in stage.of(events.WeightsTransferred)]
        assert all(seq < event.seq for event in advanced for seq in moved)
        assert [engine.label for engine in stage.engines] == (["run:8"] * 2 if fails is None else ["run:7"] * 2)
        check(stage)
        await cure(stage)


# ------------------------------------------------------------------------------------------------------- the idle clock


async def test_the_time_that_generation_is_held_is_counted_once() -> None:
    """Failures, recoveries and publications in PAUSED: every span begins anew, and none is told twice."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        reported = [(await lifecycle.publish(SOURCE, version=version)).pause_seconds for version in (1, 2, 3)]
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        stage["E1"].on(events.BeginUpdate, Refuse())
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=4)
        reported.append((await lifecycle.publish(SOURCE, version=4)).pause_seconds)
        await lifecycle.continue_generation()
        await lifecycle.resume()
        history: list[Any] = stage.sink.events
        clock = [type(event) for event in history]
        clock = [kind for kind in clock if kind in {events.GenerationHeld, events.GenerationReleased}]
        assert clock == [events.GenerationHeld, events.GenerationReleased] * 5
        before = {event.seq: last.monotonic for last, event in pairwise(history)}
        spans = list(zip(stage.of(events.GenerationHeld), stage.of(events.GenerationReleased), strict=True))
        told = [released.seconds for _, released in spans]
        most = [released.monotonic - before[held.seq] for held, released in spans]
        assert [0 < seconds <= span for seconds, span in zip(told, most, strict=True)] == [True] * 5
        assert reported == told[:4]
        assert sum(told) <= history[-1].monotonic - history[0].monotonic
        check(stage)


async def test_a_rollout_that_survives_a_pause_is_not_admitted_anew() -> None:
    """Whatever keeps its request, and however often: one ticket, one version at admission, one consumption."""
    stage = rig(1, budget=StalenessBudget(batch_size=2, max_staleness=4), manual=True)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        async with lifecycle.admit() as ticket:
            later = start(tasks, lambda: lifecycle.generate(prompt(8), ticket=ticket))
            for version, mode in enumerate([mode for mode in PauseMode if mode is not PauseMode.WAIT], 1):
                await settled()
                stage["E1"].produce(1)
                await lifecycle.publish(SOURCE, version=version, mode=mode)
                assert (ticket.version, lifecycle.budget.running) == (0, 1)
            await produce_all(stage, [later])
            ticket.accept()
        assert lifecycle.consume([ticket]) == (4,)
        assert len(stage.of(events.RolloutAdmitted)) == len(stage.of(events.RolloutSettled)) == 1
        check(stage)
