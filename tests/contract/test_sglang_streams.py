"""SGLang's streams: growing lists, or what is new, and how each of them ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from anyio import to_thread

from .dialects import wire_to
from .engines.servers import Server
from .streams import engine_of, greedy, streaming
from .wire import PROMPT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .conftest import Weights
    from .flights import Flight
    from .wire import Wire

DIALECT = "sglang"
pytestmark = pytest.mark.anyio

SHOWN = 3
"""Tokens after which a stream is well under way."""


@pytest.fixture
def anyio_backend() -> str:
    """Run on one event loop: what is looked at here is the servers."""
    return "asyncio"


def raw(wire: Wire, tokens: int, **more: Any) -> Flight:
    """Send a streaming request with log-probabilities."""
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    asked = {"input_ids": PROMPT, "sampling_params": params}
    return wire.later("/generate", {**asked, "return_logprob": True, "stream": True})


def shown(flight: Flight) -> int:
    """Return how many tokens the stream has counted."""
    return int(flight.events[-1]["meta_info"]["completion_tokens"]) if flight.events else 0


def aborted_in_queue(wire: Wire) -> list[Any]:
    """Abort a stream that a pause has put back into the queue, and return its events."""
    wire.brake()
    flight = raw(wire, wire.long)
    wire.until(lambda: shown(flight) >= SHOWN)
    assert wire.pause("retract").status == 200
    wire.exchange()
    assert wire.abort_all().status == 200
    events: list[Any] = flight.answer().body
    assert events.pop() == "[DONE]"
    return events


def tokens_of(event: Any) -> list[int]:
    """Return the tokens that an event's log-probabilities name."""
    return [token for _, token, _ in event["meta_info"]["output_token_logprobs"]]


def test_each_event_holds_everything_so_far(wire: Wire) -> None:
    """Ids and log-probabilities in step, counted; which version made them, only in the last."""
    wire.brake()
    *events, done = raw(wire, 6).answer().body
    assert done == "[DONE]"
    for event in events:
        assert len(event["output_ids"]) == event["meta_info"]["completion_tokens"]
        assert tokens_of(event) == event["output_ids"] == events[-1]["output_ids"][: len(event["output_ids"])]
    assert len(events[-1]["output_ids"]) == 6
    first, *between, last = [event["meta_info"] for event in events]
    for meta in (first, *between):
        assert (meta["finish_reason"], "weight_versions" in meta, "e2e_latency" in meta) == (None, False, False)
    assert last["weight_versions"] == [{"version": "old", "start": 0, "end": 6}]
    assert ["response_sent_to_client_ts" in meta for meta in (first, last)] == [True, False]


def test_an_abort_in_the_queue_tells_everything_once_more(wire: Wire) -> None:
    """Tokens and log-probabilities of a retracted stream, the last made one included, and little besides."""
    *_, before, last = aborted_in_queue(wire)
    assert last["output_ids"] == tokens_of(last)
    assert last["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert last["meta_info"]["completion_tokens"] == len(last["output_ids"]) >= SHOWN
    assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "prompt_tokens" not in last["meta_info"]


@pytest.mark.parametrize("bad", [{"max_new_tokens": 10**6}, {"top_p": 3.0}])
def test_what_makes_no_sense_is_refused_within_the_stream(wire: Wire, bad: dict[str, Any]) -> None:
    """The status is 200, and the error's own is 400."""
    answer = raw(wire, 3, **bad).answer()
    error, done = answer.body
    assert (answer.status, done) == (200, "[DONE]")
    assert (error["error"]["code"], error["error"]["type"]) == (400, "invalid_request_error")


@contextmanager
def incremental(server: Server, old: Weights, log: Path) -> Iterator[Wire]:
    """Serve with events that hold what is new, in place of the usual server: there is memory for one."""
    server.stop()
    embedded = server.kind.name.startswith("embedded")

    def command(model: Path, port: int) -> list[str]:
        *words, last = server.kind.command(model, port)
        if embedded:
            return [*words, last.replace("{", '{"incremental_streaming_output": true, ', 1)]
        return [*words, last, "--incremental-streaming-output"]

    other = Server(attrs.evolve(server.kind, command=command), old.path, log)
    try:
        other.start()
        with wire_to(other) as wire:
            yield wire
    finally:
        other.stop()


async def test_a_server_may_stream_what_is_new(server: Server, old: Weights, tmp_path: Path) -> None:
    """Its abort in the queue repeats the last token beside every log-probability, and the adapter drops it."""
    with incremental(server, old, tmp_path / "server.log") as wire:
        *events, last = aborted_in_queue(wire)
        made = [token for event in events for token in event["output_ids"]]
        everything = tokens_of(last)
        # A token that was made and not sent yet when the abort came stands before the one that is repeated.
        unsent = everything[len(made) :]
        assert (everything[: len(made)], last["output_ids"]) == (made, [*unsent, everything[-1]])
        assert [token for event in events for token in tokens_of(event)] == made
        assert last["meta_info"]["completion_tokens"] == len(everything)
        wire.resume()
        async with engine_of(wire.server) as engine:
            async with streaming(engine, greedy(wire.long), wire.patience) as stream:
                await stream.until(SHOWN)
                await to_thread.run_sync(wire.pause, "retract")
                await to_thread.run_sync(wire.abort_all)
            assert stream.segment.finish_reason == "abort"
            both = min(len(made), len(stream.segment.output_ids))
            assert list(stream.segment.output_ids[:both]) == made[:both]
            wire.resume()
            wire.hurry()
            async with streaming(engine, greedy(20), wire.patience) as stream:
                pass
    assert (len(stream.segment.output_ids), stream.segment.finish_reason) == (20, "length")
    assert stream.arrived.ids[: len(old.tokens)] == old.tokens
