"""close() before all others: whoever loses, and whoever waits, is told, and nothing whole is left paused."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lifecycle import StalenessBudget, Trigger, errors, events
from lifecycle.testing import Delay

from .driver_rig import SOURCE, Rig, bring_to, prompt, rig, start
from .invariants import leave, tasks
from .test_cancellation import OPERATIONS

pytestmark = pytest.mark.anyio


def slow(stage: Rig) -> None:
    """Let every transfer take half of its deadline."""
    for engine in stage.engines:
        engine.on(events.TransferWeights, *[Delay(0.5)] * 20)


@pytest.mark.parametrize("after", [False, True], ids=["before it acts", "after it acted"])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_closing_pre_empts_an_operation_at_each_of_its_requests(name: str, after: bool) -> None:
    """Whoever loses gets `LifecycleClosed`, nobody is left waiting, and no whole engine is left paused."""
    count, reached = 1, True
    while reached:
        reached = False
        stage = rig(2, budget=StalenessBudget(batch_size=1, max_staleness=0))
        lifecycle = stage.lifecycle
        state, action = OPERATIONS[name]
        before = tasks()
        closing = anyio.Event()

        def close() -> None:
            nonlocal reached
            reached = True
            closing.set()  # noqa: B023 - called before the loop goes on

        await lifecycle.attach()
        await lifecycle.resume()
        async with anyio.create_task_group() as group, lifecycle.admit() as ticket:
            await bring_to(lifecycle, state)
            at_gate = start(group, lambda: lifecycle.admit().__aenter__())  # noqa: B023
            evaluating = start(group, lambda: lifecycle.generate(prompt()))  # noqa: B023
            await anyio.wait_all_tasks_blocked()
            stage.when(count, close, after=after)
            operation = start(group, lambda: action(stage))  # noqa: B023
            with anyio.move_on_after(60):
                await closing.wait()
            if reached:
                await lifecycle.close()
            else:
                ticket.reject()
                group.cancel_scope.cancel()
        if reached:
            # Its last request answered, an operation may have come to its end before it could be pre-empted.
            assert operation.error is None or isinstance(operation.error, errors.LifecycleClosed)
            assert [outcome.done for outcome in (operation, at_gate, evaluating)] == [True] * 3
        assert tasks() == before
        await leave(stage)
        count += 1
    assert count > 1


async def test_closing_ends_whatever_runs_and_whatever_waits_with_the_same_error() -> None:
    """The publication that moves weights, the operations behind it and the rollouts at the gate: `LifecycleClosed`."""
    stage = rig(2, budget=StalenessBudget(batch_size=1, max_staleness=0))
    slow(stage)
    lifecycle = stage.lifecycle
    await lifecycle.attach()
    await lifecycle.resume()
    async with anyio.create_task_group() as group, lifecycle.admit() as ticket:
        running = start(group, lambda: lifecycle.publish(SOURCE, version=1))
        await anyio.sleep(0.1)
        assert lifecycle.in_flight is Trigger.TRANSFER
        waiting: list[Callable[[], Awaitable[Any]]] = [
            lambda: lifecycle.publish(SOURCE, version=2),
            lifecycle.suspend,
            lifecycle.abort_generation,
            lambda: lifecycle.admit().__aenter__(),
            lambda: lifecycle.admit(evaluation=True).__aenter__(),
            lambda: lifecycle.generate(prompt()),
            lambda: lifecycle.generate(prompt(), ticket=ticket),
        ]
        outcomes = [running, *(start(group, call) for call in waiting)]
        await anyio.sleep(0.1)
        await lifecycle.close()
        await anyio.wait_all_tasks_blocked()
        assert [type(outcome.error) for outcome in outcomes] == [errors.LifecycleClosed] * len(outcomes)
    assert "stop" in stage.transfer.calls
    await leave(stage)


async def test_closing_while_nothing_runs_frees_whoever_waits() -> None:
    """Callers at the gate, draining ones and held generations all come back."""
    stage = rig(1, budget=StalenessBudget(batch_size=1, max_staleness=0))
    lifecycle = stage.lifecycle
    await lifecycle.attach()
    async with anyio.create_task_group() as group:
        waiting = [start(group, lambda: lifecycle.admit().__aenter__()) for _ in range(3)]
        await anyio.wait_all_tasks_blocked()
        assert not any(outcome.done for outcome in waiting)
        await lifecycle.close()
        await anyio.wait_all_tasks_blocked()
        assert [type(outcome.error) for outcome in waiting] == [errors.LifecycleClosed] * 3
    await leave(stage)


async def test_closing_twice_at_once_closes_once() -> None:
    """Both callers return when it is done."""
    stage = rig(2)
    await stage.lifecycle.attach()
    async with anyio.create_task_group() as group:
        outcomes = [start(group, stage.lifecycle.close) for _ in range(2)]
        await anyio.wait_all_tasks_blocked()
        assert [outcome.value for outcome in outcomes] == [(), ()]
    assert len([event for event in stage.of(events.TransitionBegun) if event.trigger is Trigger.CLOSE]) == 1
    await leave(stage)
