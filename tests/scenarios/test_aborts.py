"""What follows an abort: weights that move too early, and workflows that take it for their own cancellation."""

import asyncio
import concurrent.futures

import anyio
import pytest

from lifecycle import (
    Episode,
    Generation,
    GenerationRequest,
    PauseMode,
    RolloutExecutor,
    RolloutStatus,
    StalenessBudget,
    State,
    errors,
    events,
)
from lifecycle.events import Request
from lifecycle.testing import LoseTokens
from tests.lifecycle.driver.driver_rig import SOURCE, Engine, prompt, rig, start
from tests.lifecycle.driver.invariants import check
from tests.lifecycle.rollouts.rollouts_rig import settled

from .stage import Books, produce_all, without_deadlock

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("seconds", [0.0, 0.3, 5.0])
@pytest.mark.parametrize(
    ("mode", "partial"), [(PauseMode.ABORT, True), (PauseMode.ABORT, False), (PauseMode.WAIT, True)]
)
async def test_an_engine_is_proven_idle_before_its_weights_are_touched(
    mode: PauseMode, seconds: float, partial: bool
) -> None:
    """An abort is no acknowledgement: whatever time it takes, no update begins over an unfinished request."""
    stage = rig(2, manual=True)
    unfinished: list[int] = []
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = []
        for engine in stage.engines:
            slow_to_abort(engine, seconds, tasks)
            engine.received = lambda engine, request: unfinished.append(left_in(engine, request))
            engine.on(GenerationRequest, *[] if partial else [LoseTokens(0)] * 3)
        for _ in range(6):
            later.append(start(tasks, lambda: lifecycle.generate(prompt(12))))
            await settled()
        publication = start(tasks, lambda: lifecycle.publish(SOURCE, version=1, mode=mode))
        await settled()
        await produce_all(stage, [publication, *later])
        if mode is PauseMode.ABORT and seconds > lifecycle.deadlines.abort:
            assert isinstance(publication.error, errors.PauseFailed)
            assert stage.of(events.BeginUpdate) == []
            await anyio.sleep(10)
            await lifecycle.publish(SOURCE, version=1, mode=mode)
        assert (lifecycle.version, lifecycle.state) == (1, State.RUNNING)
        assert set(unfinished) == {0}
        assert [len(one.value.output_ids) for one in later] == [12] * 6
        check(stage)


def slow_to_abort(engine: Engine, seconds: float, tasks: anyio.abc.TaskGroup) -> None:
    """Let the engine acknowledge an abort at once, and carry it out `seconds` later."""
    abort = engine._abort

    async def later() -> None:
        await anyio.sleep(seconds)
        abort()

    def acknowledge() -> None:
        tasks.start_soon(later)

    engine._abort = acknowledge  # type: ignore[method-assign]


def left_in(engine: Engine, request: Request) -> int:
    """Return how many requests are unfinished in the engine when its weights are asked for."""
    touching = isinstance(request, events.OpenTransfer | events.BeginUpdate | events.TransferWeights)
    return len(list(engine._unfinished())) if touching else 0


class ForeignCancelledError(asyncio.CancelledError):
    """What an actor framework raises where it cancels a task."""


class Killed(BaseException):
    """Another library's idea of a cancellation."""


FOREIGN = [ForeignCancelledError, Killed, concurrent.futures.CancelledError, asyncio.CancelledError, ZeroDivisionError]


@pytest.mark.parametrize("error", FOREIGN)
@pytest.mark.parametrize("members", [1, 2])
@without_deadlock
async def test_whatever_a_workflow_raises_at_a_pause_is_its_own_end_and_nobody_elses(
    error: type[BaseException], members: int
) -> None:
    """A rollout whose framework cancels it when generation stops is accounted as lost; executor and fleet go on."""
    stage = rig(1, budget=StalenessBudget(batch_size=4, max_staleness=1), manual=True)
    async with stage.lifecycle as lifecycle, RolloutExecutor(lifecycle, group_size=members) as executor:
        books = Books(lifecycle)
        paused = anyio.Event()
        lifecycle.subscribe(lambda event: paused.set() if isinstance(event, events.EnginePaused) else None)

        async def workflow(episode: Episode, data: str) -> Generation:
            if data == "odd" and episode.member == 0:
                await paused.wait()
                raise error
            return await episode.generate(prompt(2))

        odd, other = executor.submit(workflow, "odd"), executor.submit(workflow, "other")
        await settled()
        stage["E1"].produce(1)
        await lifecycle.publish(SOURCE, version=1)
        await settled()
        stage["E1"].produce(1)
        lost, kept = await executor.wait_for(odd), await executor.wait_for(other)
        assert (lost.status, type(lost.error)) == (RolloutStatus.FAILED, error)
        assert (kept.status, [value.versions for value in kept.values]) == (
            RolloutStatus.ACCEPTED, [(0, 1)] * members,
        )  # fmt: skip
        assert (books.counts, books.drift) == ((0, members, members), [])
        assert lifecycle.state is State.RUNNING
        after = executor.submit(workflow, "after")
        await settled()
        stage["E1"].produce(2)
        assert (await executor.wait_for(after)).accepted
        check(stage)


async def test_a_subscriber_that_raises_a_cancellation_of_its_own_stops_no_pause() -> None:
    """It is told to the log, and the publication is carried to its end."""
    for error in FOREIGN:
        stage = rig(2)
        async with stage.lifecycle as lifecycle:

            def fail(event: events.Event, error: type[BaseException] = error) -> None:
                if isinstance(event, events.EnginePaused | events.GenerationHeld | events.VersionAdvanced):
                    raise error

            lifecycle.subscribe(fail)
            report = await lifecycle.publish(SOURCE, version=1)
            assert (report.version, report.failures, lifecycle.state) == (1, (), State.RUNNING)
            assert [engine.paused for engine in stage.engines] == [None, None]
            check(stage)
