"""Streams over real connections that end in every way there is, on asyncio and on trio."""

import gc
import json
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from adapters.engines import HttpEngine, streaming
from adapters.engines.dialect import Lane
from lifecycle import errors
from lifecycle.generation import Tokens

from .http_stage import REQUEST, SOON, TOKENS, busy, drop, engine_on
from .wire_server import Heard, Script, answering, reply, until_gone

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
IDS = [7, 8, 9]
DONE = b"data: [DONE]\n\n"
KEY = "key-of-mine"


def said(count: int, *, ended: bool = False, **more: Any) -> bytes:
    """Return an event with the first `count` tokens."""
    meta = {
        "finish_reason": {"type": "length"} if ended else None,
        "output_token_logprobs": [[-token / 10, token, None] for token in IDS[:count]],
        "completion_tokens": count,
    }
    return f"data: {json.dumps({'output_ids': IDS[:count], 'meta_info': meta, **more})}\n\n".encode()


def chunk(data: bytes) -> bytes:
    """Return a piece of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


WHOLE = [said(1), said(2), said(3, ended=True), DONE]


def sending(*pieces: bytes, end: bytes = b"0\r\n\r\n", keep: bool = True) -> Script:
    """Stream these pieces, and end the body; an empty `end` leaves it open."""

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(CHUNKED)
        for piece in pieces:
            await stream.send(chunk(piece))
        await stream.send(end)
        return keep

    return script


async def heard_of(engine: HttpEngine, *, timeout: float = SOON) -> tuple[list[int], Any]:
    """Stream a generation. Returns the tokens that arrived, and the segment or the error."""
    ids: list[int] = []
    try:
        segment = await engine.generate(REQUEST, timeout=timeout, arrived=lambda tokens: ids.extend(tokens.ids))
    except (errors.EngineUnavailable, errors.GenerationRefused) as error:
        return ids, error
    return ids, segment


@pytest.mark.anyio
async def test_a_stream_is_asked_for_and_read() -> None:
    """Each event's tokens arrive, the segment holds them all, and the connection serves the next request."""
    async with engine_on(sending(*WHOLE)) as (engine, server):
        for _ in range(3):
            ids, segment = await heard_of(engine)
            assert (ids, segment.output_ids, segment.finish_reason) == (IDS, tuple(IDS), "length")
        assert [heard.body["stream"] for heard in server.heard] == [True] * 3
        assert (server.connections, busy(engine)) == (1, 0)


@pytest.mark.anyio
async def test_tokens_arrive_before_the_stream_ends() -> None:
    """The server sends on only when the first token has been seen."""
    seen = anyio.Event()

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(CHUNKED + chunk(said(1)))
        await seen.wait()
        await stream.send(chunk(said(3, ended=True)) + chunk(DONE) + b"0\r\n\r\n")
        return True

    async with engine_on(script) as (engine, _):
        segment = await engine.generate(REQUEST, timeout=SOON, arrived=lambda _: seen.set())
    assert segment.output_ids == tuple(IDS)


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 7, 64])
async def test_events_may_be_cut_anywhere(size: int) -> None:
    """Pieces of the body are not events: lines, characters and events may lie across them."""
    wire = b": keep-alive\r\n\r\n" + b"".join(WHOLE).replace(b"\n", b"\r\n")
    pieces = [wire[at : at + size] for at in range(0, len(wire), size)]
    async with engine_on(sending(*pieces)) as (engine, _):
        ids, segment = await heard_of(engine)
    assert (ids, segment.finish_reason) == (IDS, "length")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "script",
    [
        sending(*WHOLE[:2], end=b"", keep=False),
        sending(*WHOLE[:2], end=b"ffff\r\ndata: {", keep=False),
        sending(*WHOLE[:2]),
        sending(*WHOLE[:2], DONE),
        sending(*WHOLE[:2], end=b"nonsense\r\n", keep=False),
        sending(*WHOLE[:2], b"data: {what?\n\n"),
        sending(*WHOLE[:2], b'data: {"error": {"message": "boom", "code": 500}}\n\n', DONE),
        sending(*WHOLE[:2], b'data: {"error": {"message": "no", "code": 400}}\n\n', DONE),
    ],
    ids=["closed", "cut in a chunk", "ended", "done", "not HTTP", "not JSON", "an error", "a late refusal"],
)
async def test_a_stream_that_breaks_off_leaves_its_tokens(script: Script) -> None:
    """The engine is unavailable after the tokens have arrived, whatever it is that ended the stream."""
    async with engine_on(script, name="left") as (engine, server):
        ids, error = await heard_of(engine)
        assert busy(engine) == 0
    assert ids == IDS[:2]
    assert isinstance(error, errors.EngineUnavailable)
    assert (error.engine, len(server.heard)) == ("left", 1)


@pytest.mark.anyio
async def test_a_silent_stream_is_given_up_in_time() -> None:
    """One deadline covers the whole stream, also where comments keep coming; its connection is closed."""

    async def drip(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(CHUNKED + chunk(said(1)))
        while True:
            await stream.send(chunk(b": ping\n\n"))
            await anyio.sleep(0.01)

    async with engine_on(drip) as (engine, server):
        ids, error = await heard_of(engine, timeout=0.3)
        await server.until(lambda: server.open == 0)
        assert (ids, busy(engine)) == (IDS[:1], 0)
    assert "no reply in time" in str(error)


@pytest.mark.anyio
async def test_a_stream_whose_generation_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that forgets to close costs a moment, and no token."""
    monkeypatch.setattr(streaming, "AFTERWORD_SECONDS", 0.01)

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(CHUNKED + chunk(b"".join(WHOLE[:3])))
        await until_gone(stream)
        return False

    async with engine_on(script) as (engine, _):
        assert (await heard_of(engine, timeout=SOON))[1].output_ids == tuple(IDS)


@pytest.mark.anyio
async def test_a_refusal_by_status_is_read_as_a_whole() -> None:
    """An error has its status, and its JSON, as if no stream had been asked for."""
    async with engine_on(answering(reply({"message": "prompt is too long"}, 400))) as (engine, _):
        ids, error = await heard_of(engine)
    assert (ids, type(error)) == ([], errors.GenerationRefused)
    assert "prompt is too long" in str(error)


@pytest.mark.anyio
async def test_a_refusal_in_the_stream_is_one() -> None:
    """Before the first token, behind a status of 200."""
    refusal = b'data: {"error": {"message": "too long, said key-of-mine", "code": 400}}\n\n'
    async with engine_on(sending(refusal, DONE), api_key=KEY) as (engine, _):
        ids, error = await heard_of(engine)
    assert (ids, type(error)) == ([], errors.GenerationRefused)
    assert "too long, said ***" in str(error)


@pytest.mark.anyio
async def test_a_whole_answer_arrives_at_once() -> None:
    """Where something in between collects the stream, or the server knows none."""
    async with engine_on(answering(TOKENS)) as (engine, _):
        ids, segment = await heard_of(engine)
    assert (ids, segment.output_ids) == ([7], (7,))


@pytest.mark.anyio
async def test_a_stream_on_a_dead_idle_connection_is_asked_for_again() -> None:
    """Nothing had been answered, so nothing is lost."""

    async def script(heard: Heard, stream: SocketStream) -> bool:
        return await sending(*WHOLE)(heard, stream) if heard.number != 1 else False  # type: ignore[return-value]

    async with engine_on(script) as (engine, server):
        assert [(await heard_of(engine))[0] for _ in range(2)] == [IDS, IDS]
        assert len(server.heard) == 3


@pytest.mark.anyio
async def test_a_server_that_never_answers_a_stream_is_unavailable() -> None:
    """After the retries that a generation has, as without a stream."""
    async with engine_on(drop, retries=1) as (engine, server):
        assert isinstance((await heard_of(engine))[1], errors.EngineUnavailable)
        assert len(server.heard) == 2


def _after(count: int, scope: anyio.CancelScope) -> Callable[[Tokens], None]:
    def cancel(tokens: Tokens) -> None:
        if tokens.ids[-1] == IDS[count - 1]:
            scope.cancel()

    return cancel


@pytest.mark.anyio
@pytest.mark.parametrize("count", [1, 2])
async def test_a_cancelled_stream_closes_its_connection(count: int) -> None:
    """The server notices at once; the next request is none the worse, and nothing is left to the garbage collector."""

    async def script(heard: Heard, stream: SocketStream) -> bool:
        if heard.number:
            return bool(await sending(*WHOLE)(heard, stream))
        await stream.send(CHUNKED + b"".join(map(chunk, WHOLE[:2])))
        await until_gone(stream)
        return False

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with engine_on(script) as (engine, server):
            with anyio.CancelScope() as scope:
                await engine.generate(REQUEST, timeout=SOON, arrived=_after(count, scope))
            assert scope.cancelled_caught
            await server.until(lambda: server.open == 0)
            assert busy(engine) == 0
            assert (await heard_of(engine))[0] == IDS
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.anyio
async def test_an_error_of_the_listener_ends_the_stream() -> None:
    """It reaches the caller as it is, and the connection is closed with events still unread."""

    def refuse(_tokens: Tokens) -> None:
        raise KeyError("mine")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with engine_on(sending(*WHOLE)) as (engine, server):
            with pytest.raises(KeyError, match="mine"):
                await engine.generate(REQUEST, timeout=SOON, arrived=refuse)
            await server.until(lambda: server.open == 0)
            assert busy(engine) == 0
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.anyio
async def test_streams_cancelled_anywhere_leave_nothing_behind() -> None:
    """Whichever step of the event loop it is, no connection and no generator is left."""

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(CHUNKED + chunk(said(1)) + chunk(said(2)))
        await until_gone(stream)
        return False

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with engine_on(script) as (engine, server):
            for steps in range(60):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(heard_of, engine)
                    for _ in range(steps):
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
                assert busy(engine) == 0
            await server.until(lambda: server.open == 0)
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.anyio
async def test_closing_the_engine_ends_its_streams() -> None:
    """What is in flight comes back as unavailable, with its tokens."""
    outcomes: list[Any] = []
    under_way = anyio.Event()

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(CHUNKED + chunk(said(1)))
        await until_gone(stream)
        return False

    async def generate(engine: HttpEngine) -> None:
        try:
            await engine.generate(REQUEST, timeout=SOON, arrived=lambda _: under_way.set())
        except errors.EngineUnavailable as error:
            outcomes.append(error)

    async with engine_on(script) as (engine, _), anyio.create_task_group() as tasks:
        tasks.start_soon(generate, engine)
        await under_way.wait()
        await engine.aclose()
    assert len(outcomes) == 1
    assert engine._lanes[Lane.GENERATION].idle == 0
