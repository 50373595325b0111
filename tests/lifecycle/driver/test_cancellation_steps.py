"""Cancellation at every step of the event loop, with rollouts under way: nothing leaks, and the next one works."""

import threading

import anyio
import anyio.lowlevel
import pytest

from lifecycle import StalenessBudget, State
from lifecycle.testing import ScriptedTransfer

from .driver_rig import NAMES, Rig, bring_to, prompt, rig
from .invariants import check_now, cure, leave, tasks
from .test_cancellation import OPERATIONS

pytestmark = pytest.mark.anyio

_ROLLOUTS = 3


async def _rollout(stage: Rig) -> None:
    async with stage.lifecycle.admit() as ticket:
        await stage.lifecycle.generate(prompt(), ticket=ticket)
        ticket.accept()


async def _after_steps(count: int, scope: anyio.CancelScope) -> None:
    """Cancel `scope` after so many rounds of the event loop."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


async def _cancelled_after(count: int, name: str) -> bool:
    """Cancel operation `name` after `count` steps. Returns whether it took so many."""
    budget = StalenessBudget(batch_size=8, max_staleness=1, max_concurrent=_ROLLOUTS)
    stage = rig(3, manual=True, budget=budget)
    state, action = OPERATIONS[name]
    await stage.lifecycle.attach()
    await stage.lifecycle.resume()
    async with anyio.create_task_group() as rollouts:
        for _ in range(_ROLLOUTS):
            rollouts.start_soon(_rollout, stage)
        await anyio.wait_all_tasks_blocked()
        await bring_to(stage.lifecycle, state)
        before = tasks()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as clock:
                clock.start_soon(_after_steps, count, scope)
                await action(stage)
                clock.cancel_scope.cancel()
        assert tasks() <= before  # a rollout may have ended
        check_now(stage)
        await cure(stage)
        while budget.running:
            for engine in stage.engines:
                engine.produce(4)
            await anyio.lowlevel.checkpoint()
    assert (budget.running, budget.accepted, budget.rejected) == (0, _ROLLOUTS, 0)
    assert stage.lifecycle._context.segments.in_flight == 0
    await leave(stage)
    return scope.cancelled_caught


@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_can_be_cancelled_at_every_step(name: str) -> None:
    """Wherever it is cancelled, tasks, threads and capacity are as before, and the fleet comes back to RUNNING."""
    threads = threading.active_count()
    count = 0
    while await _cancelled_after(count, name):
        count += 1
    assert count > len(NAMES)
    assert threading.active_count() == threads


@pytest.mark.parametrize("state", [State.RUNNING, State.PAUSED, State.UPDATING])
async def test_a_close_that_is_cancelled_at_any_step_is_carried_to_its_end(state: State) -> None:
    """Closing is shielded: every engine is continued, whoever cancels."""
    count, reached = 0, True
    while reached:
        stage = rig(3)
        await stage.lifecycle.attach()
        await stage.lifecycle.resume()
        await bring_to(stage.lifecycle, state)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as clock:
                clock.start_soon(_after_steps, count, scope)
                await stage.lifecycle.close()
                clock.cancel_scope.cancel()
        reached = scope.cancel_called
        assert stage.lifecycle.state is State.CLOSED
        await leave(stage)
        count += 1
    assert count > len(NAMES)


async def test_a_generation_can_be_cancelled_at_every_step() -> None:
    """Its capacity returns, nothing is in flight, and the engine serves the next."""
    count, reached = 0, True
    while reached:
        stage = rig(1, budget=StalenessBudget(batch_size=4, max_staleness=0), transfer=ScriptedTransfer())
        async with stage.lifecycle as lifecycle:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as clock:
                    clock.start_soon(_after_steps, count, scope)
                    await _rollout(stage)
                    clock.cancel_scope.cancel()
            assert stage.lifecycle.budget.running == 0
            assert lifecycle._context.segments.in_flight == 0
            await _rollout(stage)
        reached = scope.cancelled_caught
        count += 1
