"""What is not known: pauses that land late, engines that others continue, processes that start anew."""

import pytest

from lifecycle import Outcome, PauseMode, Standing, State, errors, events
from lifecycle.events import Request
from lifecycle.testing import LandLate, LoseReply, Refuse

from .driver_rig import SOURCE, Engine, rig
from .invariants import check, cure, leave

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("landings", [1, 2])
async def test_a_pause_that_lands_after_its_continue_is_continued_again(landings: int) -> None:
    """An acknowledged continue settles no uncertain pause: a probe finds it paused, and it is continued again."""
    stage = rig()
    odd = stage["E2"]
    left = landings

    def land(engine: Engine, request: Request) -> None:
        nonlocal left
        if isinstance(request, events.ContinueGeneration) and left:
            left -= 1
            engine.paused = PauseMode.ABORT

    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        odd.on(events.PauseGeneration, *[LoseReply(applied=False)] * 40)
        odd.acted = land
        with pytest.raises(errors.PauseFailed) as failure:
            await lifecycle.pause_generation()
        assert failure.value.engines == ("E2",)
        assert odd.paused is None
        assert odd.seen.count(events.ContinueGeneration) == landings + 1
        assert lifecycle.engines["E2"].debt is None
        check(stage)
        await lifecycle.resume()
        check(stage)
    await leave(stage)


async def test_a_pause_that_lands_again_and_again_fences_its_engine() -> None:
    """Continues are not sent for ever: the engine is fenced with its debt on record."""
    stage = rig(min_engines=1)
    odd = stage["E2"]

    def land(engine: Engine, request: Request) -> None:
        if isinstance(request, events.ContinueGeneration):
            engine.paused = PauseMode.ABORT

    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        odd.on(events.PauseGeneration, *[LoseReply(applied=False)] * 40)
        odd.acted = land
        with pytest.raises(errors.PauseFailed):
            await lifecycle.pause_generation()
        view = lifecycle.engines["E2"]
        assert view.standing is Standing.STALE
        assert view.debt is not None
        check(stage)
        await cure(stage)
    await leave(stage)


async def test_a_lost_pause_is_sent_again_and_counts_once() -> None:
    """Lost, lost, answered: one logical pause, one debt, no failure."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        stage["E1"].on(events.PauseGeneration, LoseReply(applied=False), LoseReply(applied=True))
        await lifecycle.pause_generation()
        assert stage["E1"].kinds.count("PauseGeneration") == 3
        assert len(stage.of(events.EnginePaused)) == 1
        assert lifecycle._cohort.ledger.pauses == 1
        check(stage)
        await lifecycle.continue_generation()
        check(stage)


async def test_a_refusal_after_a_lost_pause_does_not_disprove_it() -> None:
    """The first pause may have landed: it is a debt, and it is continued."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        stage["E1"].on(events.PauseGeneration, LoseReply(applied=True), Refuse("already pausing"))
        with pytest.raises(errors.PauseFailed):
            await lifecycle.pause_generation()
        assert stage.of(events.EnginePaused)[0].outcome is Outcome.UNKNOWN
        assert stage["E1"].paused is None
        check(stage)


async def test_a_continue_is_sent_until_it_is_acknowledged() -> None:
    """Two lost replies, then an acknowledgement: the debt is settled and nobody is fenced."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        stage["E1"].on(events.ContinueGeneration, LoseReply(applied=False), LoseReply(applied=False))
        await lifecycle.continue_generation()
        assert lifecycle.state is State.SUSPENDED
        assert lifecycle.engines["E1"].standing is Standing.SERVING
        check(stage)


async def test_a_pause_that_lands_when_all_is_settled_is_overcome_by_the_next_publication() -> None:
    """Nobody could have known of it; the next publication pauses, updates and continues the engine like the others."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        stage["E1"].on(events.PauseGeneration, *[LandLate()] * 40)
        with pytest.raises(errors.PauseFailed):
            await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.RUNNING
        check(stage)
        stage["E1"].behave()
        stage["E1"].land()
        assert stage["E1"].paused is PauseMode.ABORT
        await lifecycle.publish(SOURCE, version=1)
        assert stage["E1"].paused is None
        check(stage)


async def test_an_engine_continued_from_outside_is_found_out_before_weights_are_at_risk() -> None:
    """BEGIN_UPDATE proves the pause again, whatever is remembered: no session is opened in a running engine."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        stage["E3"].resume_from_outside()
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.begin_update(version=1)
        assert "E3" in str(failure.value)
        assert lifecycle.state is State.PAUSED
        assert all(events.BeginUpdate not in engine.seen for engine in stage.engines)
        assert lifecycle.engines["E3"].debt is None
        check(stage)
        await lifecycle.continue_generation()
        await lifecycle.publish(SOURCE, version=1)
        await lifecycle.resume()
        check(stage)
    await leave(stage)


async def test_a_publication_survives_an_engine_continued_from_outside() -> None:
    """It fails, goes back to RUNNING, and the next one succeeds."""
    stage = rig()
    outside = stage["E3"]
    outside.acted = lambda engine, request: (
        engine.resume_from_outside() if isinstance(request, events.PauseGeneration) else None
    )
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.RUNNING
        check(stage)
        outside.behave()
        await lifecycle.publish(SOURCE, version=1)
        check(stage)
    await leave(stage)


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        (events.AbortGeneration, "received"),
        (events.PauseGeneration, "received"),
        (events.PauseGeneration, "acted"),
        (events.BeginUpdate, "acted"),
        (events.TransferWeights, "received"),
        (events.TransferWeights, "acted"),
        (events.FinishUpdate, "received"),
        (events.FinishUpdate, "acted"),
        (events.VerifyWeights, "received"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("min_engines", [None, 1])
async def test_an_engine_that_starts_anew_during_a_publication_never_serves_old_weights(
    kind: type[Request], when: str, min_engines: int | None
) -> None:
    """A new process remembers neither pause, session nor weights, and serves only after a publication on it."""
    stage = rig(min_engines=min_engines)
    odd = stage["E2"]
    restarted = False

    def restart(engine: Engine, request: Request) -> None:
        nonlocal restarted
        if isinstance(request, kind) and not restarted:
            restarted = True
            engine.crash()
            engine.restart()

    async with stage.lifecycle as lifecycle:
        setattr(odd, when, restart)
        try:
            await lifecycle.publish(SOURCE, version=1)
        except errors.OperationFailed:
            assert lifecycle.version == 0
        assert restarted
        view = lifecycle.engines["E2"]
        if view.standing is Standing.SERVING:
            assert odd.label == f"run:{lifecycle.version}"
        await cure(stage)
    await leave(stage)


async def test_recovery_finds_an_engine_that_started_anew_and_keeps_it_out_until_it_is_published_to() -> None:
    """Whoever restarted it, what it holds is not this run's version."""
    stage = rig(min_engines=1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        stage["E1"].crash()
        stage["E1"].restart()
        await lifecycle.suspend()
        await lifecycle.recover()
        assert lifecycle.engines["E1"].standing is Standing.STALE
        assert lifecycle.engines["E1"].incarnation == "2"
        check(stage)
        report = await lifecycle.publish(SOURCE, version=2)
        assert report.engines == ("E1", "E2", "E3")
        check(stage)
    await leave(stage)


async def test_a_crashed_engine_is_forgotten_with_its_debt_when_it_starts_anew() -> None:
    """The pause was the old process's; the new one owes nothing."""
    stage = rig(min_engines=1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        stage["E1"].crash()
        await lifecycle.continue_generation()
        assert lifecycle.engines["E1"].debt is not None
        assert lifecycle.engines["E1"].standing is Standing.LOST
        check(stage)
        stage["E1"].restart()
        await lifecycle.recover()
        assert lifecycle.engines["E1"].debt is None
        check(stage)
    await leave(stage)
