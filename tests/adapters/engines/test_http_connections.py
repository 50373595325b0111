"""Connections of the HTTP driver: kept while good, replaced when doubtful, never leaked; and generation over them."""

import anyio
import pytest
from anyio.abc import SocketStream

from adapters.engines import HttpEngine, SGLangEngine
from adapters.engines.dialect import Lane
from lifecycle import errors
from lifecycle.states import Outcome

from .http_stage import CONTINUE, FACTS, FINISH, OK, REQUEST, SOON, TOKENS, busy, engine_on, hold
from .wire_server import Heard, answering, reply, serving, until_gone


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
