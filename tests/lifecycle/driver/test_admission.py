"""The submission gate: who may start a rollout, in which order, and when draining ends."""

import anyio
import anyio.lowlevel
import pytest

from lifecycle import StalenessBudget, State

from .driver_rig import SOURCE, rig, start
from .invariants import check

pytestmark = pytest.mark.anyio


async def test_rollouts_are_admitted_in_running_only_and_in_order() -> None:
    """While suspended nobody starts; on RESUME the first to come is the first to go."""
    stage = rig(1, budget=StalenessBudget(batch_size=2, max_staleness=0))
    tickets: dict[int, int] = {}
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        await lifecycle.suspend()

        async def roll(number: int) -> None:
            async with lifecycle.admit() as ticket:
                tickets[number] = ticket.id
                ticket.accept()

        for number in range(4):
            group.start_soon(roll, number)
            await anyio.wait_all_tasks_blocked()
        assert tickets == {}
        await lifecycle.resume()
        await anyio.wait_all_tasks_blocked()
        assert tickets == {0: 1, 1: 2}
        await lifecycle.publish(SOURCE, version=1)
        await anyio.wait_all_tasks_blocked()
        assert tickets == {0: 1, 1: 2, 2: 3, 3: 4}
        check(stage)


async def test_an_evaluation_is_admitted_while_suspended_but_not_while_paused() -> None:
    """Evaluations run between training steps, outside the budget."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        await lifecycle.suspend()
        async with lifecycle.admit(evaluation=True) as ticket:
            assert ticket.evaluation
        await lifecycle.pause_generation()
        waiting = start(group, lambda: lifecycle.admit(evaluation=True).__aenter__())
        await anyio.wait_all_tasks_blocked()
        assert not waiting.done
        await lifecycle.continue_generation()
        await anyio.wait_all_tasks_blocked()
        assert waiting.done
        waiting.value.reject()
        check(stage)


async def test_draining_ends_when_the_last_ticket_returns() -> None:
    """It wakes at once, and counts whoever still runs."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        tickets = [await lifecycle.admit().__aenter__() for _ in range(3)]
        await lifecycle.suspend()
        draining = start(group, lifecycle.drain)
        for ticket in tickets:
            await anyio.wait_all_tasks_blocked()
            assert not draining.done
            ticket.reject()
        await anyio.wait_all_tasks_blocked()
        assert draining.done
        await lifecycle.drain()
        check(stage)


async def test_resuming_while_somebody_drains_lets_new_rollouts_start_at_once() -> None:
    """A straggler does not keep others out: the drain goes on, and so does submission."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        straggler = await lifecycle.admit().__aenter__()
        await lifecycle.suspend()
        draining = start(group, lifecycle.drain)
        await anyio.wait_all_tasks_blocked()
        await lifecycle.resume()
        async with lifecycle.admit():
            assert lifecycle.running == 2
        assert not draining.done
        straggler.reject()
        await anyio.wait_all_tasks_blocked()
        assert draining.done


@pytest.mark.parametrize("how", ["normally", "by an exception", "by cancellation"])
async def test_submission_suspended_for_a_while_opens_again(how: str) -> None:
    """However the block is left, submission is as it was before."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        with anyio.CancelScope() as scope:
            try:
                async with lifecycle.suspended():
                    assert lifecycle.state is State.SUSPENDED
                    if how == "by an exception":
                        raise ZeroDivisionError
                    if how == "by cancellation":
                        scope.cancel()
                        await anyio.sleep_forever()
            except ZeroDivisionError:
                pass
        assert lifecycle.state is State.RUNNING
        check(stage)


async def test_submission_that_was_closed_before_stays_closed_after() -> None:
    """`suspended()` opens only what it has closed."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        async with lifecycle.suspended():
            pass
        assert lifecycle.state is State.SUSPENDED
        check(stage)
