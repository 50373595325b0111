"""What can go wrong outside: replies that are lost or late, connections that are cut, a process that is stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import attrs
import pytest
from anyio import to_thread

from adapters.testing import Drop, FaultProxy, LandLate
from lifecycle import Deadlines, Standing, State, errors

from .stage import NAME

if TYPE_CHECKING:
    from .stage import Stage

pytestmark = pytest.mark.anyio

_PAUSE = {"sglang": "POST /pause_generation", "vllm": "POST /pause"}
_BUCKET = {"sglang": "POST /update_weights_from_distributed", "vllm": "POST /update_weights"}
_SHORT = 2.0
"""Seconds that an answer is waited for which will not come."""


def impatient(stage: Stage, *kinds: str) -> Deadlines:
    """Return deadlines of which those named are short."""
    patience = stage.server.kind.patience
    every = dict.fromkeys((field.name for field in attrs.fields(Deadlines)), patience)
    return Deadlines(**{**every, **dict.fromkeys(kinds, min(_SHORT, patience))})


async def test_a_pause_whose_reply_is_lost_is_undone(stage: Stage) -> None:
    """It may have happened, and has: the engine is continued, and a probe says that it runs."""
    async with FaultProxy(stage.server.url) as proxy:
        proxy.always(_PAUSE[stage.wire.dialect], Drop(applied=True))
        deadlines = impatient(stage, "pause")
        async with stage.lifecycle(url=proxy.url, deadlines=deadlines) as lifecycle:
            await lifecycle.suspend()
            with pytest.raises(errors.PauseFailed) as failed:
                await lifecycle.pause_generation()
            assert failed.value.engines == (NAME,)
            assert (lifecycle.state, lifecycle.engines[0].debt) == (State.SUSPENDED, None)
            assert not await to_thread.run_sync(stage.wire.paused)
            assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(0).tokens
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched) == ([], ())


async def test_a_pause_that_lands_late_is_found_and_continued(stage: Stage) -> None:
    """It lands after it was given up and undone: recovering finds the engine paused, and continues it."""
    landing = anyio.Event()
    async with FaultProxy(stage.server.url) as proxy:
        proxy.always(_PAUSE[stage.wire.dialect], LandLate(landing))
        async with stage.lifecycle(url=proxy.url, deadlines=impatient(stage, "pause")) as lifecycle:
            await lifecycle.suspend()
            with pytest.raises(errors.PauseFailed):
                await lifecycle.pause_generation()
            landing.set()
            with anyio.fail_after(stage.server.kind.patience):
                while not await to_thread.run_sync(stage.wire.paused):
                    await anyio.lowlevel.checkpoint()
            await lifecycle.recover()
            assert (lifecycle.state, lifecycle.engines[0].debt) == (State.SUSPENDED, None)
            assert not await to_thread.run_sync(stage.wire.paused)
            assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(0).tokens
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched) == ([], ())


async def test_a_bucket_whose_reply_is_lost_is_never_sent_again(stage: Stage) -> None:
    """The engine holds whatever it holds: it stays paused and dirty, and a whole publication cures it."""
    async with FaultProxy(stage.server.url) as proxy:
        proxy.on(_BUCKET[stage.wire.dialect], Drop(applied=True))
        async with stage.lifecycle(url=proxy.url) as lifecycle:
            with pytest.raises(errors.PublicationFailed) as failed:
                await lifecycle.publish(stage.source(1), version=1)
            assert failed.value.engines == (NAME,)
            assert len(proxy.requests(_BUCKET[stage.wire.dialect])) == 1
            assert (lifecycle.version, lifecycle.engines[0].dirty) == (0, True)
            assert await to_thread.run_sync(stage.wire.paused)
            report = await lifecycle.publish(stage.source(1), version=1)
            assert (report.state, report.fenced, report.failures) == (State.RUNNING, {}, ())
            assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(1).tokens
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched, verdict.version) == ([], (), 1)


async def test_a_server_that_is_stopped_is_lost_until_it_goes_on(stage: Stage) -> None:
    """It accepts, and answers nothing: every operation ends, names it, and what it does later is settled."""
    kinds = ("pause", "abort", "resume", "probe")
    async with stage.lifecycle(deadlines=impatient(stage, *kinds)) as lifecycle:
        stage.server.freeze()
        try:
            with pytest.raises(errors.PauseFailed) as failed:
                await lifecycle.publish(stage.source(1), version=1)
            assert failed.value.engines == (NAME,)
            assert (lifecycle.state, lifecycle.engines[0].standing) == (State.FAULTED, Standing.LOST)
        finally:
            stage.server.thaw()
        await to_thread.run_sync(stage.wire.exchange)
        lifecycle.deadlines.probe = lifecycle.deadlines.resume = stage.server.kind.patience
        await lifecycle.recover()
        assert (lifecycle.state, lifecycle.engines[0].debt) == (State.SUSPENDED, None)
        assert not await to_thread.run_sync(stage.wire.paused)
        lifecycle.deadlines.pause = lifecycle.deadlines.abort = stage.server.kind.patience
        report = await lifecycle.publish(stage.source(1), version=1)
        assert (report.engines, report.fenced) == ((NAME,), {})
        assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(1).tokens
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched, verdict.version) == ([], (), 1)
