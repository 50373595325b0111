"""The HTTP driver against a real local server that misbehaves as scripted, on asyncio and on trio."""

import socket

import anyio
import pytest
from anyio.abc import SocketStream

from adapters.engines import SGLangEngine
from lifecycle import events as e
from lifecycle.states import Outcome, PauseMode

from .http_stage import CONTINUE, FACTS, FINISH, OK, drop, engine_on, hold
from .wire_server import Heard, WireServer, answering, reply


@pytest.mark.anyio
async def test_a_call_carries_its_body_and_brings_its_answer() -> None:
    """Method, path and JSON body arrive; the server's answer becomes the outcome."""
    async with engine_on(answering(OK)) as (engine, server):
        ack = await engine.perform(CONTINUE, FACTS, timeout=5)
    assert ack.done
    assert (server.heard[0].line, server.heard[0].body) == ("POST /continue_generation", {"torch_empty_cache": False})
    assert server.heard[0].headers["content-type"] == "application/json"


@pytest.mark.anyio
async def test_a_path_prefix_and_a_query_are_kept() -> None:
    """A base URL may end in a path, as behind a router."""
    async with engine_on(answering(reply(text="Cache flushed."))) as (_, server):
        engine = SGLangEngine(server.url + "/engines/3/")
        assert engine.name.endswith("/engines/3")
        assert (await engine.perform(e.FlushCache(), FACTS, timeout=5)).done
        await engine.aclose()
    assert server.heard[0].line == "POST /engines/3/flush_cache?timeout=0"


@pytest.mark.anyio
async def test_a_refused_connection_is_not_done_and_nothing_was_sent() -> None:
    """Where nobody listens nothing was done, however often it was tried, and `sent` is not called."""
    sent: list[int] = []
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and never listens: the port is refused, and nobody else can take it
        engine = SGLangEngine(f"http://127.0.0.1:{unheard.getsockname()[1]}")
        for request in (CONTINUE, FINISH):
            ack = await engine.perform(request, FACTS, timeout=5, sent=lambda: sent.append(1))
            assert (ack.outcome, ack.unreachable) == (Outcome.NOT_DONE, True)
        assert sent == []
        await engine.aclose()


@pytest.mark.anyio
async def test_a_silent_server_is_unknown_within_the_timeout() -> None:
    """A server that takes the request and never answers leaves the outcome unknown, and is not asked again."""
    async with engine_on(hold) as (engine, server):
        ack = await engine.perform(CONTINUE, FACTS, timeout=0.2)
    assert (ack.outcome, ack.unreachable, len(server.heard)) == (Outcome.UNKNOWN, False, 1)


@pytest.mark.anyio
async def test_a_dripping_server_does_not_outlive_the_timeout() -> None:
    """One deadline covers everything, also a body that comes byte by byte for ever."""

    async def drip(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while True:
            await stream.send(b" ")
            await anyio.sleep(0.01)

    async with engine_on(drip) as (engine, _):
        assert (await engine.perform(CONTINUE, FACTS, timeout=0.3)).outcome is Outcome.UNKNOWN


@pytest.mark.anyio
async def test_no_time_at_all_is_not_done() -> None:
    """A request that there was no time to send was not sent."""
    async with engine_on(answering(OK)) as (engine, server):
        assert (await engine.perform(FINISH, FACTS, timeout=0)).outcome is Outcome.NOT_DONE
        assert server.connections == 0


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
        b"this is not HTTP at all\r\n\r\n",
        reply(text="<html>who knows</html>"),
        reply({"message": "boom"}, 500),
    ],
    ids=["dropped", "cut in the head", "cut in the body", "not HTTP", "not JSON", "500"],
)
async def test_a_bad_answer_is_unknown_and_not_asked_for_again(answer: bytes) -> None:
    """After the request was sent, anything but a clear answer leaves it unknown; it is never sent a second time."""

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(answer)
        return False

    async with engine_on(script) as (engine, server):
        ack = await engine.perform(FINISH, FACTS, timeout=5)
    assert (ack.outcome, len(server.heard)) == (Outcome.UNKNOWN, 1)
    assert ack.detail


@pytest.mark.anyio
async def test_an_idempotent_call_is_repeated_when_the_connection_breaks() -> None:
    """A lost reply to an idempotent call is answered by sending it again."""

    async def script(heard: Heard, stream: SocketStream) -> bool:
        if heard.number >= 1:
            await stream.send(OK)
        return False

    async with engine_on(script) as (engine, server):
        assert (await engine.perform(CONTINUE, FACTS, timeout=5)).done
    assert len(server.heard) == 2


@pytest.mark.anyio
async def test_repetitions_are_bounded() -> None:
    """A server that always drops is given up after the retries."""
    async with engine_on(drop, retries=1) as (engine, server):
        assert (await engine.perform(CONTINUE, FACTS, timeout=5)).outcome is Outcome.UNKNOWN
    assert len(server.heard) == 2


@pytest.mark.anyio
async def test_what_may_have_been_delivered_stays_unknown() -> None:
    """A request that was lost on the way and then meets a dead server is unknown: the first one may have acted."""

    async def die(_heard: Heard, _stream: SocketStream) -> bool:
        await servers[0].listener.aclose()
        return False

    servers: list[WireServer] = []
    async with engine_on(die) as (engine, server):
        servers.append(server)
        ack = await engine.perform(CONTINUE, FACTS, timeout=5)
    assert (ack.outcome, ack.unreachable, len(server.heard)) == (Outcome.UNKNOWN, True, 1)


@pytest.mark.anyio
async def test_a_request_that_no_engine_is_asked_raises() -> None:
    """Misuse is an error; trouble with an engine is an outcome."""
    engine = SGLangEngine("http://127.0.0.1:1")
    with pytest.raises(TypeError):
        await engine.perform(e.Settle(), FACTS, timeout=1)


@pytest.mark.anyio
@pytest.mark.parametrize("request_", [CONTINUE, FINISH, e.FlushCache()])
async def test_sent_is_called_before_the_answer_is_awaited(request_: e.Request) -> None:
    """The trainer may enter the collective once the request is written: the answer comes only afterwards."""
    written = anyio.Event()

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        await written.wait()
        await stream.send(OK)
        return True

    async with engine_on(script) as (engine, _):
        assert (await engine.perform(request_, FACTS, timeout=5, sent=written.set)).done


@pytest.mark.anyio
async def test_sent_is_called_once_however_many_calls_and_repetitions() -> None:
    """Several calls, or the same one repeated, are one request."""
    sent: list[int] = []

    async def script(heard: Heard, stream: SocketStream) -> bool:
        if heard.number == 0:
            return False
        await stream.send(OK)
        return True

    async with engine_on(script) as (engine, server):
        pause = e.PauseGeneration(mode=PauseMode.RETRACT)
        ack = await engine.perform(pause, FACTS, timeout=5, sent=lambda: sent.append(1))
    assert (ack.stopped, len(server.heard), sent) == (True, 3, [1])
