"""State machines: queues that die with a cancellation, states entered on hope, errors that are told twice or never."""

import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from lifecycle import Outcome, State, Trigger, errors, events
from lifecycle.events import Request
from lifecycle.testing import LoseReply, Refuse, Silence, Step
from tests.lifecycle.driver.driver_rig import SOURCE, Rig, rig, start
from tests.lifecycle.driver.invariants import check, cure, leave

from .stage import break_down

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("whose", ["the holder", "one in line"])
async def test_a_cancelled_operation_passes_the_turn_to_those_behind_it(whose: str) -> None:
    """The queue does not die with a cancelled transition: what comes after it runs, in its order."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        await lifecycle.suspend()
        stage["E1"].on(events.PauseGeneration, Silence(), Silence())
        scopes = [anyio.CancelScope(), anyio.CancelScope()]

        async def pause(scope: anyio.CancelScope) -> None:
            with scope:
                await lifecycle.pause_generation()

        for scope in scopes:
            tasks.start_soon(pause, scope)
            await anyio.wait_all_tasks_blocked()
        resumed = start(tasks, lifecycle.resume)
        await anyio.wait_all_tasks_blocked()
        if whose == "the holder":
            scopes[1].cancel()
            await anyio.wait_all_tasks_blocked()
            assert not resumed.done
        scopes[0].cancel()
        if whose == "one in line":
            scopes[1].cancel()
        await anyio.sleep(1)
        assert (resumed.done, resumed.error, lifecycle.state) == (True, None, State.RUNNING)
        check(stage)


WAYS: list[Step] = [Refuse(), LoseReply(applied=True), LoseReply(applied=False), Silence()]


@pytest.mark.parametrize("way", WAYS, ids=["refused", "done and lost", "lost", "silent"])
@pytest.mark.parametrize("kind", [events.PauseGeneration, events.ProvePaused, events.FinishUpdate])
async def test_a_state_is_entered_only_when_what_it_promises_holds(kind: type[Request], way: Step) -> None:
    """At no event does it say PAUSED over an engine that runs, nor RUNNING over one that is paused."""
    stage = rig(2)
    lies: list[str] = []
    async with stage.lifecycle as lifecycle:

        def compare(event: events.Event) -> None:
            paused = [engine.paused is not None for engine in stage.engines]
            if lifecycle.state in {State.PAUSED, State.UPDATING} and lifecycle.in_flight is None and not all(paused):
                lies.append(f"{lifecycle.state.name} at {type(event).__name__}")
            if lifecycle.state is State.RUNNING and any(paused):
                lies.append(f"RUNNING at {type(event).__name__}")

        lifecycle.subscribe(compare)
        stage["E2"].on(kind, *[way] * 40)
        with pytest.raises(errors.OperationFailed):
            await lifecycle.publish(SOURCE, version=1)
        assert lies == []
        check(stage)
        await cure(stage)
        assert lies == []
    await leave(stage)


async def test_an_operation_started_by_a_subscriber_takes_its_turn_afterwards() -> None:
    """A callback that starts one on entering a state neither nests nor deadlocks: it follows what it was called in."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        begun: list[Trigger] = []

        def on_event(event: events.Event) -> None:
            if isinstance(event, events.TransitionBegun):
                begun.append(event.trigger)
            if isinstance(event, events.TransitionCommitted) and event.target is State.SUSPENDED:
                tasks.start_soon(lifecycle.resume)

        lifecycle.subscribe(on_event)
        await lifecycle.suspend()
        await anyio.wait_all_tasks_blocked()
        assert (begun, lifecycle.state) == ([Trigger.SUSPEND, Trigger.RESUME], State.RUNNING)
        check(stage)


async def test_an_engine_port_that_calls_back_is_freed_by_its_deadline() -> None:
    """It waits for an operation that waits for it: the deadline ends that, and the lifecycle can be used again."""
    stage = rig(1)
    perform = stage["E1"].perform

    async def meddle(request: Request, *arguments: Any, **options: Any) -> Any:
        if isinstance(request, events.PauseGeneration):
            await stage.lifecycle.resume()
        return await perform(request, *arguments, **options)

    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        stage["E1"].perform = meddle  # type: ignore[method-assign]
        begun = anyio.current_time()
        with pytest.raises(errors.PauseFailed):
            await lifecycle.pause_generation()
        assert anyio.current_time() - begun <= lifecycle.deadlines.pause
        stage["E1"].perform = perform  # type: ignore[method-assign]
        await lifecycle.pause_generation()
        assert lifecycle.state is State.PAUSED
        check(stage)


EXCEPTIONS: list[Exception] = [
    errors.IllegalTransition(Trigger.RESUME, State.RUNNING, [Trigger.SUSPEND]),
    errors.TransitionRefused(Trigger.RESUME, State.SUSPENDED, "enough_serving", "1 of 2 are serving"),
    errors.Busy(Trigger.TRANSFER),
    errors.Busy(None),
    errors.EngineFailure("E1", "PauseGeneration", Outcome.UNKNOWN, "no answer"),
    errors.PauseFailed("pause failed", [errors.EngineFailure("E1", "PauseGeneration", Outcome.UNKNOWN, "no answer")]),
    errors.EngineUnavailable("E1", "connection refused"),
    errors.JournalUnreadable(3, "not JSON"),
]


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_an_error_reaches_another_process_as_what_it_was(error: Exception) -> None:
    """Raised in an actor or a pool worker it arrives at the trainer with its class, its words and its facts."""
    received = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(received), str(received)) == (type(error), str(error))
    assert repr(vars(received)) == repr(vars(error))


REFUSED: dict[str, Callable[[Rig], Awaitable[object]]] = {
    "illegal": lambda stage: stage.lifecycle.resume(),
    "refused by a guard": lambda stage: stage.lifecycle.publish(SOURCE, version=0),
    "failed at an engine": lambda stage: stage.lifecycle.publish(SOURCE, version=1),
    "failed in an adapter": lambda stage: stage.lifecycle.publish(SOURCE, version=1),
}


@pytest.mark.parametrize("how", REFUSED)
async def test_every_kind_of_failure_is_told_once(how: str) -> None:
    """What was begun is rolled back in the journal once; what could not begin is told to its caller alone."""
    stage = rig(1)
    async with stage.lifecycle:
        if how == "failed at an engine":
            stage["E1"].on(events.PauseGeneration, Refuse())
        if how == "failed in an adapter":
            break_down(stage["E1"])
        with pytest.raises(errors.LifecycleError):
            await REFUSED[how](stage)
        rolled_back = [event.trigger for event in stage.of(events.TransitionRolledBack)]
        assert rolled_back == ([Trigger.PAUSE_GENERATION] if how.startswith("failed") else [])
        check(stage)
