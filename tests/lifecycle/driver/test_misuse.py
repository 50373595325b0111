"""What makes no sense is refused before anything is done with it."""

from typing import Any

import pytest

from lifecycle import Lifecycle, StalenessBudget, State, errors, events
from lifecycle.testing import ScriptedEngine, ScriptedTransfer

from .driver_rig import SOURCE, rig
from .invariants import leave

pytestmark = pytest.mark.anyio


class Source:
    """A source that the scripted transfer does not look at."""

    def tensors(self) -> list[tuple[str, Any]]:
        """Yield nothing."""
        return []


@pytest.mark.parametrize("version", [7.5, "7", None, True, -1])
async def test_a_version_that_is_no_version_is_refused_before_anything_is_paused(version: Any) -> None:
    """`publish` and `begin_update` raise ValueError and send nothing; a good version goes on as if nothing had been."""
    engine = ScriptedEngine("E1")
    async with Lifecycle([engine], transfer=ScriptedTransfer()) as lifecycle:
        sent = len(engine.requests)
        with pytest.raises(ValueError, match="version must be an int of at least 0"):
            await lifecycle.publish(Source(), version=version)
        with pytest.raises(ValueError, match="version must be an int of at least 0"):
            await lifecycle.begin_update(version=version)
        assert (len(engine.requests), lifecycle.state, lifecycle.version) == (sent, State.RUNNING, 0)
        await lifecycle.publish(Source(), version=1)
        assert lifecycle.version == 1
    assert engine.violations == []


async def test_a_rollout_leaves_the_buffer_once() -> None:
    """A second consume or discard of a ticket is refused, so that capacity is not freed twice."""
    budget = StalenessBudget(batch_size=1, max_staleness=0)
    async with Lifecycle([ScriptedEngine("E1")], budget=budget) as lifecycle:
        async with lifecycle.admit() as ticket:
            ticket.accept()
        assert budget.capacity() == 0
        with pytest.raises(ValueError, match="leaves the buffer once"):
            lifecycle.consume([ticket, ticket])
        assert lifecycle.discard([ticket]) == (0,)
        for leave in (lifecycle.discard, lifecycle.consume):
            with pytest.raises(ValueError, match="leaves the buffer once"):
                leave([ticket])
        assert budget.capacity() == 1


@pytest.mark.anyio
@pytest.mark.parametrize("source", [{"weight": 1}, None, object()])
async def test_what_is_no_weight_source_is_refused_before_anything_is_done(source: Any) -> None:
    """A state dict is not a source: the error says what is, and no engine is asked anything."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        asked = len(stage.engines[0].requests)
        with pytest.raises(errors.UnusableWeights, match=r"has a method tensors\(\), such as ModuleSource\(model\)"):
            await lifecycle.publish(source, version=1)
        assert (lifecycle.state, len(stage.engines[0].requests)) == (State.RUNNING, asked)
    await leave(stage)


@pytest.mark.anyio
@pytest.mark.parametrize("consumed", ["x", 2.5, True, -1])
async def test_a_count_that_makes_no_sense_is_refused_before_anything_is_done(consumed: Any) -> None:
    """After the commit point is too late: nothing is paused, and the history stays readable."""
    stage = rig(2, budget=StalenessBudget(batch_size=4, max_staleness=1))
    async with stage.lifecycle as lifecycle:
        with pytest.raises(ValueError, match="consumed must be an int of at least 0"):
            await lifecycle.publish(SOURCE, version=1, consumed=consumed)
        assert (lifecycle.state, lifecycle.version) == (State.RUNNING, 0)
        assert not stage.of(events.PauseGeneration)
    await leave(stage)


@pytest.mark.parametrize("options", [{}, {"initial_version": 4}])
def test_a_budget_beyond_the_initial_version_is_refused(options: dict[str, Any]) -> None:
    """Everything admitted would be too old at once: who takes up a run again says what its engines hold."""
    budget = StalenessBudget(batch_size=4, max_staleness=1)
    budget.restore(5)
    with pytest.raises(ValueError, match="the budget is at version 5 and initial_version is"):
        rig(1, budget=budget, **options)
    rig(1, budget=budget, initial_version=5)
    assert budget.capacity() == 8


@pytest.mark.anyio
async def test_a_version_behind_the_budget_is_refused_before_anything_is_done() -> None:
    """A budget that somebody else has advanced would not take the version after the commit."""
    stage = rig(2, budget=StalenessBudget(batch_size=4, max_staleness=1))
    stage.lifecycle.budget.advance(5)
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.TransitionRefused, match="version 1 is behind the staleness budget's 5"):
            await lifecycle.publish(SOURCE, version=1)
        assert (stage.state(), stage.of(events.PauseGeneration)) == (State.RUNNING, [])
        report = await lifecycle.publish(SOURCE, version=6)
        assert report.state is State.RUNNING
    await leave(stage)


@pytest.mark.parametrize(
    "wrong",
    [{"name": 3}, {"pause_mode": "abort"}, {"budget": 3}, {"deadlines": 3}, {"policy": 3}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_is_of_another_type_is_refused_at_once(wrong: dict[str, Any]) -> None:
    """The error names the argument and what was given, before anything is opened."""
    (name,) = wrong
    with pytest.raises(TypeError, match=f"^{name} must be a "):
        Lifecycle([ScriptedEngine("E1")], **wrong)
    with pytest.raises(TypeError, match="an engine is an engine port such as"):
        Lifecycle(["http://127.0.0.1:1"])  # type: ignore[list-item]
