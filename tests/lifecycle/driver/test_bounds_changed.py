"""Bounds that are changed while rollouts run and wait."""

from typing import Any

import anyio
import pytest

from lifecycle import StalenessBudget
from lifecycle.events import BudgetChanged

from .driver_rig import SOURCE, rig
from .invariants import check

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("batch_size", "capacity"), [(4, 0), (8, 8), (16, 24)])
async def test_another_batch_size_counts_from_now_on(batch_size: int, capacity: int) -> None:
    """What earlier versions consumed stays consumed: capacity is the new bound less what waits now."""
    budget = StalenessBudget(batch_size=8, max_staleness=1)
    for version in range(1, 101):
        for _ in range(8):
            budget.admit().accept()
        budget.advance(version)
    for _ in range(8):
        budget.admit().accept()
    budget.batch_size = batch_size
    assert budget.capacity() == capacity


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 3), ("max_staleness", 2), ("max_concurrent", None), ("max_concurrent", 4)]
)
async def test_a_wider_bound_wakes_whoever_waits_and_the_journal_knows(name: str, value: Any) -> None:
    """At once; and a run within its new bounds is sound."""
    budget = StalenessBudget(batch_size=2, max_staleness=0, max_concurrent=2)
    stage = rig(1, budget=budget)
    through: list[int] = []

    async def rollout() -> None:
        async with stage.lifecycle.admit() as ticket:
            through.append(ticket.id)
            await anyio.sleep_forever()

    if name == "max_concurrent":
        budget.max_staleness = 1
    else:
        budget.max_concurrent = None
    async with stage.lifecycle, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(rollout)
        await anyio.wait_all_tasks_blocked()
        assert len(through) == 2
        setattr(budget, name, value)
        await anyio.wait_all_tasks_blocked()
        assert len(through) == 3
        tasks.cancel_scope.cancel()
    check(stage)
    told = [(event.batch_size, event.max_staleness, event.max_concurrent) for event in stage.of(BudgetChanged)]
    assert told == [(budget.batch_size, budget.max_staleness, budget.max_concurrent)]


async def test_a_bound_that_makes_no_sense_changes_nothing() -> None:
    """It is refused as it is at the beginning."""
    stage = rig(1, budget=StalenessBudget(batch_size=2, max_staleness=0))
    async with stage.lifecycle as lifecycle:
        with pytest.raises(ValueError, match="batch_size must be an int of at least 1"):
            lifecycle.budget.batch_size = 0
        assert lifecycle.budget.capacity() == 2
        await lifecycle.publish(SOURCE, version=1)
