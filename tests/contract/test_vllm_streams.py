"""vLLM's two routes that stream, and what they leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from anyio import to_thread

from .streams import engine_of, greedy, streaming
from .wire import PROMPT

if TYPE_CHECKING:
    from .conftest import Weights
    from .engines.servers import Server
    from .flights import Flight
    from .wire import Wire

DIALECT = "vllm"
pytestmark = pytest.mark.anyio
_ROUTES = pytest.mark.parametrize("completions", [False, True], ids=["tokens", "completions"])
_COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture
def anyio_backend() -> str:
    """Run on one event loop: what is looked at here is the servers."""
    return "asyncio"


def raw(wire: Wire, *, completions: bool, tokens: int) -> Flight:
    """Send a streaming request with the number of tokens in each event."""
    params = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    if completions:
        body: dict[str, Any] = {"prompt": PROMPT, "return_token_ids": True, **params}
        return wire.later("/v1/completions", {**body, "stream": True, **_COUNTED})
    body = {"token_ids": PROMPT, "sampling_params": params}
    return wire.later("/inference/v1/generate", {**body, "stream": True, **_COUNTED})


@_ROUTES
def test_each_event_holds_what_is_new_and_counts_what_there_is(wire: Wire, *, completions: bool) -> None:
    """Last of all an event without a choice counts once more."""
    *events, last, done = raw(wire, completions=completions, tokens=6).answer().body
    assert done == "[DONE]"
    counts, made = [], 0
    for event in events:
        made += len(event["choices"][0]["token_ids"])
        counts.append(event["usage"]["completion_tokens"])
        assert counts[-1] == made
    assert (last["choices"], last["usage"]["completion_tokens"], made) == ([], 6, 6)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]


@_ROUTES
def test_what_is_aborted_before_its_first_token_says_so_by_tokens_only(wire: Wire, *, completions: bool) -> None:
    """A stream of completions ends as if nothing had been asked for."""
    wire.pause("abort")
    flight = raw(wire, completions=completions, tokens=6)
    wire.exchange()
    wire.abort_all()
    *events, last, done = flight.answer().body
    said = [(choice["finish_reason"], choice["token_ids"]) for event in events for choice in event["choices"]]
    assert said == ([] if completions else [("abort", [])])
    assert (last["choices"], last["usage"]["completion_tokens"], done) == ([], 0, "[DONE]")


@_ROUTES
async def test_both_routes_stream_the_same(server: Server, wire: Wire, old: Weights, *, completions: bool) -> None:
    """Ids and log-probabilities in step; only generation by tokens tells versions."""
    async with engine_of(server, completions=completions) as engine:
        async with streaming(engine, greedy(40), wire.patience) as stream:
            pass
        whole = await engine.generate(greedy(40), timeout=wire.patience)
    assert (stream.segment.output_ids, stream.segment.finish_reason) == (whole.output_ids, "length")
    assert stream.arrived.ids[: len(old.tokens)] == old.tokens
    assert (stream.segment.spans is None) == completions


@_ROUTES
async def test_a_stream_that_is_aborted_before_its_first_token_is_aborted(
    server: Server, wire: Wire, *, completions: bool
) -> None:
    """It may be sent again, however little the server says."""
    wire.pause("abort")
    async with (
        engine_of(server, completions=completions) as engine,
        streaming(engine, greedy(40), wire.patience) as stream,
    ):
        # What has only just been sent may not be known yet, and is not aborted then.
        await to_thread.run_sync(wire.until, lambda: wire.abort_all().body["aborted"] == 1)
    assert (stream.segment.output_ids, stream.segment.finish_reason) == ((), "abort")
