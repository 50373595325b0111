"""The HTTP driver against a real local server that misbehaves as scripted, on asyncio and on trio."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from adapters.engines import HttpEngine, SGLangEngine, VLLMEngine
from adapters.engines.dialect import Lane
from adapters.engines.sglang import SGLang
from lifecycle import errors
from lifecycle import events as e
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest
from lifecycle.states import Outcome, PauseMode

from .wire_server import Heard, Script, WireServer, answering, reply, serving, until_gone

FACTS = EngineFacts(name="E1")
CONTINUE = e.ContinueGeneration()  # one idempotent call
FINISH = e.FinishUpdate(kind="broadcast", label="run:8")  # one call that is never repeated
OK = reply({"status": "ok"})
TOKENS = reply(
    {
        "output_ids": [7],
        "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None]]},
    }
)
REQUEST = GenerationRequest(input_ids=[1, 2], max_new_tokens=4)
SOON = 30.0
"""Seconds after which a test that ought to be done long ago fails."""


@asynccontextmanager
async def engine_on(script: Script, **options: Any) -> AsyncIterator[tuple[HttpEngine, WireServer]]:
    """Serve `script`, and yield an SGLang engine on it."""
    with anyio.fail_after(SOON):
        async with serving(script) as server:
            engine = SGLangEngine(server.url, **options)
            try:
                yield engine, server
            finally:
                await engine.aclose()


def busy(engine: HttpEngine) -> int:
    """Return how many requests are in flight."""
    return sum(lane.busy for lane in engine._lanes.values())


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def drop(_heard: Heard, _stream: SocketStream) -> bool:
    """Close the connection without an answer."""
    return False


async def hold(_heard: Heard, stream: SocketStream) -> bool:
    """Never answer."""
    await until_gone(stream)
    return False


# ------------------------------------------------------------------------------------------------------------ outcomes


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
    engine = SGLangEngine(f"http://127.0.0.1:{free_port()}")
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


# ----------------------------------------------------------------------------------------------------------------- sent


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


# ---------------------------------------------------------------------------------------------------------- connections


@pytest.mark.anyio
async def test_connections_are_kept_between_idempotent_calls() -> None:
    """An idle connection is used again."""
    async with engine_on(answering(OK)) as (engine, server):
        for _ in range(3):
            assert (await engine.perform(CONTINUE, FACTS, timeout=5)).done
        assert server.connections == 1


@pytest.mark.anyio
async def test_a_call_that_is_never_repeated_has_a_connection_of_its_own() -> None:
    """What can't be repeated is not trusted to a connection that may be dead."""
    async with engine_on(answering(OK)) as (engine, server):
        await engine.perform(CONTINUE, FACTS, timeout=5)
        assert (await engine.perform(FINISH, FACTS, timeout=5)).done
        assert server.connections == 2
        assert server.heard[1].headers["connection"] == "close"


@pytest.mark.anyio
async def test_a_dead_idle_connection_is_replaced() -> None:
    """A server that closed the kept connection, or closes it on the next request, does not fail that request."""

    async def script(heard: Heard, stream: SocketStream) -> bool:
        if heard.connection == 0 and heard.number == 1:
            return False
        await stream.send(OK)
        return heard.connection == 0

    async with engine_on(script) as (engine, server):
        for _ in range(4):
            assert (await engine.perform(CONTINUE, FACTS, timeout=5)).done
        assert server.connections == 4


@pytest.mark.anyio
async def test_a_connection_is_not_used_again_after_a_500() -> None:
    """A server may close the socket after a 500 without saying so: the next call would be lost."""
    async with engine_on(answering(reply({"message": "boom"}, 500), OK)) as (engine, server):
        assert (await engine.perform(CONTINUE, FACTS, timeout=5)).outcome is Outcome.UNKNOWN
        assert (await engine.perform(CONTINUE, FACTS, timeout=5)).done
        assert [heard.connection for heard in server.heard] == [0, 1]


@pytest.mark.anyio
async def test_control_does_not_wait_behind_generation() -> None:
    """However many generations are in flight, a control call goes out at once."""

    async def script(heard: Heard, stream: SocketStream) -> bool:
        if heard.line == "POST /generate":
            await until_gone(stream)
        await stream.send(OK)
        return True

    async with engine_on(script) as (engine, server), anyio.create_task_group() as tasks:
        for _ in range(150):
            tasks.start_soon(_generate_until_cancelled, engine)
        await server.until(lambda: len(server.heard) == 150)
        assert (await engine.perform(CONTINUE, FACTS, timeout=10)).done
        tasks.cancel_scope.cancel()


async def _generate_until_cancelled(engine: HttpEngine) -> None:
    await engine.generate(REQUEST, timeout=SOON)


@pytest.mark.anyio
async def test_cancelled_calls_leave_nothing_behind() -> None:
    """200 calls cancelled at every stage, also while connecting, close their connections and hold no slot."""
    answered = anyio.Event()

    async def script(heard: Heard, stream: SocketStream) -> bool:
        if not answered.is_set():
            await until_gone(stream)
        await stream.send(TOKENS if heard.line == "POST /generate" else OK)
        return True

    async with engine_on(script) as (engine, server):
        async with anyio.create_task_group() as tasks:
            for index in range(200):
                tasks.start_soon(_generate_until_cancelled, engine)
                if index % 20 == 0:
                    await anyio.lowlevel.checkpoint()
            await server.until(lambda: len(server.heard) >= 50)
            tasks.cancel_scope.cancel()
        assert busy(engine) == 0
        await server.until(lambda: server.open == 0)
        answered.set()
        assert (await engine.generate(REQUEST, timeout=5)).output_ids == (7,)
        assert (await engine.perform(CONTINUE, FACTS, timeout=5)).done


@pytest.mark.anyio
async def test_cancellation_reaches_the_caller() -> None:
    """A cancelled caller gets its cancellation, also when it cancels itself with a deadline."""
    async with engine_on(hold) as (engine, _):
        with anyio.move_on_after(0.05) as scope:
            await engine.perform(CONTINUE, FACTS, timeout=SOON)
        assert scope.cancelled_caught


@pytest.mark.anyio
async def test_closing_ends_what_is_in_flight_and_can_be_repeated() -> None:
    """A closed engine's requests end without a reply; closing twice is closing once; a later call connects anew."""
    outcomes: list[Outcome] = []
    answer_now = anyio.Event()

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        if not answer_now.is_set():
            await until_gone(stream)
        await stream.send(OK)
        return True

    async with engine_on(script) as (engine, server):

        async def finish() -> None:
            outcomes.append((await engine.perform(FINISH, FACTS, timeout=SOON)).outcome)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(finish)
            await server.until(lambda: len(server.heard) == 1)
            await engine.aclose()
            await engine.aclose()
        answer_now.set()
        assert (await engine.perform(CONTINUE, FACTS, timeout=5)).done
    assert outcomes == [Outcome.UNKNOWN]


@pytest.mark.anyio
async def test_idle_connections_are_bounded() -> None:
    """A burst of control calls does not leave a connection each."""
    async with engine_on(answering(OK)) as (engine, server):
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(_continue, engine)
        assert len(server.heard) == 20
        assert engine._lanes[Lane.CONTROL].idle <= 4


async def _continue(engine: HttpEngine) -> None:
    assert (await engine.perform(CONTINUE, FACTS, timeout=SOON)).done


def test_an_engine_outlives_its_event_loop(anyio_backend: str) -> None:
    """Connections belong to an event loop, the engine does not: a second loop connects anew."""
    engines: list[HttpEngine] = []

    async def once() -> None:
        async with serving(answering(OK)) as server:
            engine = SGLangEngine(server.url) if not engines else engines[0]
            engines.append(engine)
            engine._base = server.url
            assert (await engine.perform(CONTINUE, FACTS, timeout=5)).done
            await engine.aclose()

    anyio.run(once, backend=anyio_backend)
    anyio.run(once, backend=anyio_backend)


# ----------------------------------------------------------------------------------------------------------- generation


@pytest.mark.anyio
async def test_a_generation_comes_back_with_its_engine() -> None:
    """A segment names the engine that made it."""
    async with engine_on(answering(TOKENS), name="left") as (engine, _):
        segment = await engine.generate(REQUEST, timeout=5)
    assert (segment.output_ids, segment.logprobs, segment.engine) == ((7,), (-0.5,), "left")


@pytest.mark.anyio
@pytest.mark.parametrize("answer", [b"", reply({"message": "boom"}, 503), reply(text="?"), reply({"x": 1})])
async def test_an_engine_that_does_not_generate_is_unavailable(answer: bytes) -> None:
    """The error names the engine, so that the generation can go on at another."""

    async def script(_heard: Heard, stream: SocketStream) -> bool:
        await stream.send(answer)
        return False

    async with engine_on(script, name="left") as (engine, _):
        with pytest.raises(errors.EngineUnavailable, match=r"^left did not answer") as caught:
            await engine.generate(REQUEST, timeout=5)
    assert caught.value.engine == "left"


@pytest.mark.anyio
async def test_a_late_generation_is_unavailable() -> None:
    """A generation that does not end in time is given up, and its connection with it."""
    async with engine_on(hold) as (engine, server):
        with pytest.raises(errors.EngineUnavailable, match="no reply in time"):
            await engine.generate(REQUEST, timeout=0.1)
        await server.until(lambda: server.open == 0)


@pytest.mark.anyio
async def test_a_refused_generation_says_why() -> None:
    """A 4xx is the caller's, in the server's words."""
    async with engine_on(answering(reply({"message": "prompt is too long"}, 400))) as (engine, _):
        with pytest.raises(errors.GenerationRefused, match="prompt is too long"):
            await engine.generate(REQUEST, timeout=5)


# -------------------------------------------------------------------------------------------------- names and secrets


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["key", "url"])
async def test_credentials_are_sent_and_never_shown(how: str) -> None:
    """A server that echoes the credentials does not get them into a detail, an error, a name or a repr."""
    secret = "s3cr3t-of-mine"  # noqa: S105 - it is what must not be shown

    async def echo(heard: Heard, stream: SocketStream) -> bool:
        await stream.send(reply({"message": f"{heard.headers['authorization']} {secret}"}, 401))
        return True

    async with engine_on(echo) as (_, server):
        if how == "key":
            engine = SGLangEngine(server.url, api_key=secret)
        else:
            engine = SGLangEngine(server.url.replace("http://", f"http://me:{secret}@"))
        ack = await engine.perform(CONTINUE, FACTS, timeout=5)
        with pytest.raises(errors.GenerationRefused) as caught:
            await engine.generate(REQUEST, timeout=5)
        await engine.aclose()
        sent = server.heard[0].headers["authorization"]
    token = sent.split(" ")[1]
    assert sent.split(" ")[0] == ("Bearer" if how == "key" else "Basic")
    shown = f"{ack} {caught.value} {engine!r} {engine.name}"
    assert "***" in ack.detail
    assert secret not in shown
    assert token not in shown


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/", "10.0.0.1:8000"),
        ("https://engine", "engine:443"),
        ("http://engine/a/b", "engine:80/a/b"),
        ("http://me:pass@engine:8000", "engine:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_the_name_is_host_port_and_path(url: str, name: str) -> None:
    """A name tells engines apart and holds no credentials."""
    engine = HttpEngine(url, SGLang())
    assert (engine.name, HttpEngine(url, SGLang(), name="left").name) == (name, "left")
    assert repr(engine) == f"HttpEngine(name='{name}', kind='sglang')"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("10.0.0.1:8000", "http://"),
        ("ftp://me:hush@engine", "not 'ftp'"),
        ("http://", "no host"),
        ("http://me:hush@engine:99999", "port"),
        ("http://me:hush@engine?x=1", "no query"),
        ("http://me:hush@engine#x", "no query"),
        ("", "http://"),
    ],
)
def test_a_senseless_url_is_refused_without_repeating_it(url: str, words: str) -> None:
    """The error says what is wrong; it does not show a password."""
    with pytest.raises(ValueError, match=words) as caught:
        SGLangEngine(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"api_key": ""}, {"api_key": "a\nb"}, {"api_key": "ключ"}, {"name": ""}, {"retries": -1}]
)
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    """What can't work is refused when the engine is made."""
    with pytest.raises(ValueError, match=r"api_key|name|retries"):
        SGLangEngine("http://engine:1", **options)


def test_credentials_are_given_once() -> None:
    """Two sets of credentials are a mistake."""
    with pytest.raises(ValueError, match="choose one"):
        SGLangEngine("http://me:x@engine:1", api_key="k")


def test_each_server_has_its_capabilities() -> None:
    """An engine can do what its dialect can."""
    assert PauseMode.IN_PLACE in SGLangEngine("http://e:1").capabilities.pause_modes
    assert VLLMEngine("http://e:1").capabilities.at_risk_from_begin == {"broadcast"}
