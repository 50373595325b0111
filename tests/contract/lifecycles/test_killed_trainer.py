"""A trainer is killed while it holds the engine paused, and another takes over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from anyio import to_thread

from lifecycle import FleetPolicy, PauseMode, Standing, State, errors

from .killed_trainer import PAUSED
from .stage import NAME

if TYPE_CHECKING:
    from .stage import Stage

pytestmark = pytest.mark.anyio

SCRIPT = Path(__file__).with_name("killed_trainer.py")


def leave_paused(stage: Stage, mode: str) -> None:
    """Let a trainer of its own process pause the engine, and kill it."""
    arguments = [stage.server.url, stage.wire.dialect, mode, str(stage.journal)]
    with subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == f"{PAUSED}\n"
        finally:
            trainer.kill()
    assert stage.wire.paused()
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched, verdict.closed) == ([], (NAME,), False)


async def test_an_engine_that_its_journal_knows_to_be_whole_is_continued_at_once(stage: Stage, mode: str) -> None:
    """The journal of the trainer that was killed says that it had paused, and written nothing."""
    await to_thread.run_sync(leave_paused, stage, mode)
    async with stage.lifecycle() as lifecycle:
        (engine,) = lifecycle.engines
        assert (lifecycle.state, engine.standing, engine.debt) == (State.RUNNING, Standing.SERVING, None)
        assert not stage.wire.paused()
        assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(0).tokens
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched, verdict.version) == ([], (), 0)


async def test_an_engine_found_paused_serves_nothing_before_a_publication(stage: Stage, mode: str) -> None:
    """Nothing proves that its weights are whole: it is neither continued nor routed to, until it holds whole ones."""
    await to_thread.run_sync(leave_paused, stage, mode)
    async with stage.lifecycle(journal=stage.other_journal) as lifecycle:
        (engine,) = lifecycle.engines
        assert (lifecycle.state, engine.standing, engine.dirty) == (State.SUSPENDED, Standing.STALE, True)
        assert engine.debt is not None
        with pytest.raises(errors.TransitionRefused):
            await lifecycle.resume()
        assert stage.wire.paused()
        report = await lifecycle.publish(stage.source(1), version=1)
        assert (report.engines, report.fenced, report.failures) == ((NAME,), {}, ())
        await lifecycle.resume()
        assert [(view.debt, view.dirty) for view in lifecycle.engines] == [(None, False)]
        assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(1).tokens
    verdict = stage.verdict(stage.other_journal)
    assert (verdict.violations, verdict.unmatched, verdict.version) == ([], (), 1)


async def test_a_request_that_a_dead_trainers_pause_kept_does_not_hold_up_the_next(stage: Stage, keeping: str) -> None:
    """It is still in the engine when the next trainer aborts, publishes and continues."""
    flight = stage.wire.fly()
    await to_thread.run_sync(leave_paused, stage, keeping)
    async with stage.lifecycle(pause_mode=PauseMode.ABORT, journal=stage.other_journal) as lifecycle:
        await lifecycle.publish(stage.source(1), version=1)
        await lifecycle.resume()
        kept = await to_thread.run_sync(flight.completed)
        assert kept.finish == "abort"
        assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(1).tokens


async def test_an_engine_found_paused_is_continued_at_once_where_it_is_trusted(stage: Stage, mode: str) -> None:
    """The user says that no update was under way: attaching continues it, and it serves what it held."""
    await to_thread.run_sync(leave_paused, stage, mode)
    async with stage.lifecycle(policy=FleetPolicy(trust_paused=True), journal=None) as lifecycle:
        (engine,) = lifecycle.engines
        assert (lifecycle.state, engine.standing, engine.debt) == (State.RUNNING, Standing.SERVING, None)
        assert not stage.wire.paused()
        assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(0).tokens
