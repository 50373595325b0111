"""Updates that fail half-way: what is known of the engine then, and what cures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from anyio import to_thread

from lifecycle import PauseMode, Standing, State, errors

from .stage import NAME, RUN
from .transfers import Cutting, KillingBetweenBuckets, KillingInFlight

if TYPE_CHECKING:
    from lifecycle import Lifecycle

    from .stage import Stage
    from .transfers import Killing

pytestmark = pytest.mark.anyio


async def fail_half_way(stage: Stage, lifecycle: Lifecycle) -> None:
    """Publish version 1 through a transfer that is cut off after its first bucket.

    Cancellation: as for the publication.
    """
    cutting = Cutting(timeout=stage.seconds)
    try:
        with pytest.raises(errors.PublicationFailed) as failed:
            await lifecycle.publish(stage.source(1), version=1, transfer=cutting)
    finally:
        await cutting.close()
    assert failed.value.engines == (NAME,)


async def test_after_a_failed_update_the_engine_stays_paused(stage: Stage, mode: str) -> None:
    """By its own word and on record: half-written weights generate nothing, whoever asks."""
    async with stage.lifecycle(pause_mode=PauseMode(mode)) as lifecycle:
        await fail_half_way(stage, lifecycle)
        (engine,) = lifecycle.engines
        assert (lifecycle.state, lifecycle.version, stage.wire.paused()) == (State.PAUSED, 0, True)
        assert (engine.standing, engine.dirty) == (Standing.STALE, True)
        assert engine.debt is not None
        with pytest.raises(errors.TransitionRefused):
            await lifecycle.continue_generation()
        request = stage.wire.start(1)
        await to_thread.run_sync(stage.wire.exchange)
        assert (stage.wire.paused(), request.landed) == (True, False)


async def test_a_whole_publication_cures_what_a_failed_one_left(stage: Stage, mode: str) -> None:
    """It serves the new version, exactly, and the lifecycle runs as before."""
    async with stage.lifecycle(pause_mode=PauseMode(mode)) as lifecycle:
        await fail_half_way(stage, lifecycle)
        report = await lifecycle.publish(stage.source(2), version=2)
        assert (report.state, report.previous, report.engines) == (State.RUNNING, 0, (NAME,))
        assert (report.fenced, report.failures) == ({}, ())
        assert [(view.debt, view.dirty) for view in lifecycle.engines] == [(None, False)]
        served = await to_thread.run_sync(stage.wire.generate)
        assert (served.tokens, served.versions) == (stage.weights(2).tokens, [(f"{RUN}:2", 0, 8)])
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched, verdict.version) == ([], (), 2)


async def test_closing_after_a_failed_update_leaves_the_engine_paused(stage: Stage) -> None:
    """Nobody continues half-written weights on the way out: the journal names the engine that is left."""
    async with stage.lifecycle() as lifecycle:
        await fail_half_way(stage, lifecycle)
    assert [view.name for view in await lifecycle.close()] == [NAME]
    assert stage.wire.paused()
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched, verdict.closed) == ([], (NAME,), True)


@pytest.mark.parametrize("killing", [KillingBetweenBuckets, KillingInFlight], ids=["between buckets", "in flight"])
async def test_a_server_that_is_killed_during_an_update_faults_the_lifecycle(
    stage: Stage, killing: type[Killing]
) -> None:
    """The publication names it; once it is there again, recovering and publishing put it back into service."""
    async with stage.lifecycle(transfer=killing(stage.server.kill, timeout=stage.seconds)) as lifecycle:
        with pytest.raises(errors.PublicationFailed) as failed:
            await lifecycle.publish(stage.source(1), version=1)
        assert failed.value.engines == (NAME,)
        assert (lifecycle.state, lifecycle.version) == (State.FAULTED, 0)
        assert [view.standing for view in lifecycle.engines] == [Standing.LOST]
        await to_thread.run_sync(stage.server.start, stage.server.port)
        await lifecycle.recover()
        report = await lifecycle.publish(stage.source(1), version=1, transfer=stage.broadcast())
        assert (report.engines, report.fenced, report.failures) == ((NAME,), {}, ())
        assert report.state is State.RUNNING
        assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(1).tokens
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched, verdict.version) == ([], (), 1)
