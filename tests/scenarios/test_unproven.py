"""Engines that answer and do not act, or act and do not answer: neither is taken at its word."""

import anyio
import pytest

from lifecycle import Standing, State, errors, events
from lifecycle.events import Request
from lifecycle.testing import LoseReply, Refuse, Silence, Step
from tests.lifecycle.driver.driver_rig import SOURCE, prompt, rig
from tests.lifecycle.driver.invariants import check, cure, engines_named, leave

from .stage import HOLLOW

pytestmark = pytest.mark.anyio

HOLLOW_KINDS = [
    events.PauseGeneration,
    events.BeginUpdate,
    events.TransferWeights,
    events.FinishUpdate,
    events.ContinueGeneration,
]


@pytest.mark.parametrize("min_engines", [None, 1])
@pytest.mark.parametrize("kind", HOLLOW_KINDS)
async def test_an_engine_that_says_yes_and_does_nothing_is_found_out(
    kind: type[Request], min_engines: int | None
) -> None:
    """A front end that answers 200 for an engine core that is dead never gets it routed to."""
    stage = rig(min_engines=min_engines)
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(kind, *[HOLLOW] * 10)
        blamed: set[str] = set()
        try:
            report = await lifecycle.publish(SOURCE, version=1)
            blamed = set(report.fenced)
        except errors.OperationFailed as failure:
            blamed = engines_named(failure)
        assert blamed == {"E2"}
        for engine, view in zip(stage.engines, lifecycle.engines, strict=True):
            whole = engine.whole and engine.paused is None and engine.label == f"run:{lifecycle.version}"
            assert whole or view.standing is not Standing.SERVING or view.debt is not None
        assert all(engine.violations == [] for engine in stage.engines)


async def test_an_engine_blocked_in_a_rendezvous_is_left_out_until_it_answers() -> None:
    """It is not routed to and not asked again, so that nothing queues up behind it; `recover()` takes it back."""
    stage = rig(2, min_engines=1)
    odd = stage["E2"]
    async with stage.lifecycle as lifecycle:
        odd.on(events.OpenTransfer, Silence())
        odd.on(events.ContinueGeneration, *[Silence()] * 40)
        odd.on(events.ProbeEngine, *[Silence()] * 40)
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.publish(SOURCE, version=1)
        assert failure.value.engines == ("E2",)
        assert (lifecycle.state, lifecycle.engines["E2"].standing) == (State.RUNNING, Standing.LOST)
        asked = len(odd.requests)
        begun = anyio.current_time()
        await lifecycle.publish(SOURCE, version=1)
        assert anyio.current_time() == begun
        assert len(odd.requests) == asked
        generations = [await lifecycle.generate(prompt()) for _ in range(4)]
        assert {segment.engine for one in generations for segment in one.segments} == {"E1"}
        check(stage)
        await cure(stage)
    await leave(stage)


@pytest.mark.parametrize("step", [Refuse(), LoseReply(applied=True), Silence()], ids=["refused", "lost", "silent"])
async def test_engines_leave_a_rendezvous_that_not_all_of_them_joined(step: Step) -> None:
    """Attempt after attempt: the channel was cut, so that nobody is left in it, and each name is used once."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(events.OpenTransfer, step, step)
        for _ in range(2):
            with pytest.raises(errors.PublicationFailed):
                await lifecycle.publish(SOURCE, version=1)
        await lifecycle.publish(SOURCE, version=1)
        joined = [event.channel.name for event in stage.of(events.OpenTransfer) if event.engine == "E1"]
        left = [event.channel.name for event in stage.of(events.CloseTransfer) if event.engine == "E1"]
        assert len(set(joined)) == 3
        assert left == joined[:2]
        check(stage)
