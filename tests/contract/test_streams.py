"""Streams as the adapters read them: what arrives is what was made, whatever happens in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import to_thread

from lifecycle import errors

from .expectations import MODES
from .streams import engine_of, greedy, streaming

if TYPE_CHECKING:
    from .conftest import Weights
    from .engines.servers import Server
    from .wire import Wire

pytestmark = pytest.mark.anyio

TOKENS = 40
FIRST = 3
"""Tokens after which a stream is well under way."""
_NEAR = 0.02
"""Log-probabilities of one prompt differ so much in bfloat16, computed in one batch or another."""


@pytest.fixture
def anyio_backend() -> str:
    """Run on one event loop: what is looked at here is the servers."""
    return "asyncio"


async def test_a_stream_brings_what_a_whole_answer_holds(server: Server, wire: Wire, old: Weights) -> None:
    """Token by token the same ids and log-probabilities, each with the version that made it."""
    wire.brake()
    async with engine_of(server) as engine:
        whole = await engine.generate(greedy(TOKENS), timeout=wire.patience)
        async with streaming(engine, greedy(TOKENS), wire.patience) as stream:
            pass
    assert stream.segment.output_ids == whole.output_ids
    assert list(stream.segment.logprobs) == pytest.approx(whole.logprobs, abs=_NEAR)
    assert (stream.segment.finish_reason, stream.segment.lost) == ("length", 0)
    assert [(span.label, span.start, span.end) for span in stream.segment.spans or ()] == [("old", 0, TOKENS)]
    assert stream.arrived.chunks > 1
    assert stream.arrived.ids[: len(old.tokens)] == old.tokens


async def test_an_abort_pause_ends_a_stream_with_the_tokens_so_far(server: Server, wire: Wire, old: Weights) -> None:
    """No token that was shown is taken back, and none comes twice."""
    wire.brake()
    async with engine_of(server) as engine:
        async with streaming(engine, greedy(wire.long), wire.patience) as stream:
            await stream.until(FIRST)
            assert (await to_thread.run_sync(wire.pause, "abort")).status == 200
        assert stream.segment.finish_reason == "abort"
        assert FIRST <= len(stream.segment.output_ids) < wire.long
        wire.resume()
        rest = greedy(2, input_ids=[*greedy(1).input_ids, *stream.segment.output_ids[:FIRST]])
        after = await engine.generate(rest, timeout=wire.patience)
    assert [*stream.segment.output_ids[:FIRST], *after.output_ids] == old.tokens[: FIRST + 2]


async def test_a_stream_goes_on_after_a_pause_that_keeps_it(server: Server, wire: Wire, keeping: str) -> None:
    """Its tokens are those of a stream without a pause, and those after it carry the new version."""
    tokens = wire.enough * 3
    wire.brake()
    async with engine_of(server) as engine, streaming(engine, greedy(tokens), wire.patience) as stream:
        await stream.until(FIRST)
        assert (await to_thread.run_sync(wire.pause, keeping)).status == 200
        assert (await to_thread.run_sync(wire.label, "new")).status == 200
        await to_thread.run_sync(wire.exchange)
        assert stream.outcome is None
        assert (await to_thread.run_sync(wire.resume)).status == 200
        await to_thread.run_sync(wire.hurry)
    assert (stream.segment.finish_reason, len(stream.segment.output_ids)) == ("length", tokens)
    before, after = stream.segment.spans or ()
    assert (before.label, before.start, after.label, after.end) == ("old", 0, "new", tokens)
    assert FIRST <= before.end == after.start < tokens
    assert await to_thread.run_sync(lambda: wire.generate(FIRST + 2).tokens) == stream.arrived.ids[: FIRST + 2]


async def test_an_abort_of_a_kept_stream_repeats_and_loses_nothing(server: Server, wire: Wire, keeping: str) -> None:
    """Where it waits in the queue the server tells its tokens again; where it stands in place, after the continue."""
    wire.brake()
    async with engine_of(server) as engine, streaming(engine, greedy(wire.long), wire.patience) as stream:
        await stream.until(FIRST)
        assert (await to_thread.run_sync(wire.pause, keeping)).status == 200
        assert (await to_thread.run_sync(wire.abort_all)).status == 200
        if not MODES[wire.dialect][keeping].flushes:
            wire.resume()
    assert (stream.segment.finish_reason, stream.segment.lost) == ("abort", 0)
    assert FIRST <= len(stream.segment.output_ids) < wire.long


async def test_a_cancelled_stream_ends_at_the_server(server: Server, wire: Wire) -> None:
    """Its connection is closed, and the engine is idle long before the request would have ended."""
    wire.brake()
    async with engine_of(server) as engine:
        with anyio.CancelScope() as scope:
            async with streaming(engine, greedy(wire.long), wire.patience) as stream:
                await stream.until(FIRST)
                assert not await to_thread.run_sync(wire.flush)
                scope.cancel()
    assert stream.outcome is None
    await to_thread.run_sync(wire.until_idle)


async def test_a_request_that_makes_no_sense_is_refused_without_its_prompt(server: Server, wire: Wire) -> None:
    """Behind a status of 200 an event says so, or a status does; it is the caller's fault either way."""
    bad = {"sglang": greedy(10**6), "vllm": greedy(5, input_ids=[11, 12, 13, 10**6])}[wire.dialect]
    async with engine_of(server) as engine, streaming(engine, bad, wire.patience) as stream:
        pass
    assert isinstance(stream.outcome, errors.GenerationRefused)
    assert ("error 400" in str(stream.outcome), "11, 12" in str(stream.outcome)) == (True, False)


async def test_the_tokens_of_a_killed_server_have_arrived(server: Server, wire: Wire) -> None:
    """The engine is unavailable, and what it had sent is there to go on from elsewhere."""
    wire.brake()
    async with engine_of(server) as engine, streaming(engine, greedy(wire.long), wire.patience) as stream:
        await stream.until(FIRST)
        await to_thread.run_sync(server.kill)
    assert isinstance(stream.outcome, errors.EngineUnavailable)
    assert "the stream broke off" in stream.outcome.detail
    assert FIRST <= len(stream.arrived.ids) == len(stream.arrived.logprobs) < wire.long
