"""The fault proxy makes the faults that it says, when it says, and no others."""

import json

import anyio
import httpx
import pytest

from adapters.testing import (
    PASS,
    Answer,
    Delay,
    Drop,
    HalfClose,
    LandLate,
    TruncateBody,
    TruncateJSON,
)
from tests.adapters.engines.wire_server import answering, reply

from .stage import WHOLE, ask, in_between, raw


@pytest.mark.anyio
async def test_what_is_not_scripted_passes() -> None:
    """Method, path, query, headers and body arrive; status, headers and body come back."""
    answer = reply(WHOLE, 201, headers="x-engine: 7\r\n")
    async with in_between(answering(answer)) as (proxy, server):
        response = await ask(proxy, "PUT", "/weights?mode=keep", json={"a": 1}, headers={"X-Mine": "3"})
    (heard,) = server.heard
    assert (heard.line, heard.body, heard.headers["x-mine"]) == ("PUT /weights?mode=keep", {"a": 1}, "3")
    assert (response.status_code, response.json(), response.headers["x-engine"]) == (201, WHOLE, "7")


@pytest.mark.anyio
async def test_it_remembers_what_it_saw() -> None:
    """Each request is on record with what it met, and what the engine answered to it."""
    async with in_between(answering(reply(WHOLE))) as (proxy, _):
        proxy.on("/b", Answer(429))
        await ask(proxy, "POST", "/a?x=1", json=[1])
        await ask(proxy, "POST", "/b")
    assert [(s.method, s.path, s.query, s.forwarded, s.status) for s in proxy.seen] == [
        ("POST", "/a", "x=1", True, 200),
        ("POST", "/b", "", False, None),
    ]
    assert (proxy.seen[0].json, proxy.seen[1].json) == ([1], None)
    assert (proxy.seen[0].fault, proxy.seen[1].fault) == (PASS, Answer(429))


@pytest.mark.anyio
async def test_what_it_remembers_shows_no_key() -> None:
    """A repr of what was seen can go to a log: neither headers nor bodies are in it."""
    async with in_between(answering(reply(WHOLE))) as (proxy, _):
        await ask(proxy, "POST", "/a", json={"prompt": "sesame"}, headers={"Authorization": "Bearer sesame"})
    assert proxy.seen[0].headers["authorization"] == "Bearer sesame"
    assert "sesame" not in repr(proxy.seen)


@pytest.mark.anyio
async def test_a_fault_meets_one_occurrence_of_one_route() -> None:
    """The script of a route is used up request by request; other routes, and what follows, pass."""
    async with in_between(answering(reply(WHOLE))) as (proxy, _):
        proxy.on("/a", PASS, Answer(409))
        statuses = [(await ask(proxy, "GET", path)).status_code for path in ("/a", "/b", "/a", "/a")]
    assert statuses == [200, 200, 409, 200]


@pytest.mark.anyio
async def test_the_narrowest_script_goes_first_and_a_standing_fault_last() -> None:
    """Method and path before path before everything; what always happens, after what happens once."""
    async with in_between(answering(reply(WHOLE))) as (proxy, _):
        proxy.always("*", Answer(500)).always("/a", Answer(501)).on("*", Answer(502)).on("POST /a", Answer(503))
        statuses = [(await ask(proxy, *line.split())).status_code for line in ("POST /a", "POST /a", "GET /a", "GET /")]
        proxy.heal()
        assert (await ask(proxy, "GET", "/a")).status_code == 200
    assert statuses == [503, 502, 501, 500]


@pytest.mark.anyio
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
async def test_a_dropped_request_was_applied_or_not_as_scripted(applied: bool, reset: bool) -> None:
    """The client gets nothing; the engine got the request, or did not; a reset is one."""
    async with in_between(answering(reply(WHOLE))) as (proxy, server):
        proxy.on("/a", Drop(applied=applied, reset=reset))
        expected = httpx.ReadError if reset else httpx.RemoteProtocolError
        with pytest.raises(expected):
            await ask(proxy, "POST", "/a")
        assert len(server.heard) == applied
        assert (await ask(proxy, "POST", "/a")).status_code == 200


@pytest.mark.anyio
async def test_a_half_closed_connection_still_takes_what_the_client_sends() -> None:
    """The client reads the end of the stream, and can write on until it closes, too."""
    async with in_between(answering(reply(WHOLE))) as (proxy, server), await raw(proxy) as stream:
        proxy.on("/a", HalfClose())
        await stream.send(b"POST /a HTTP/1.1\r\nhost: x\r\n\r\n")
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        for _ in range(3):
            await stream.send(b"more")
    assert server.heard == []


@pytest.mark.anyio
async def test_a_truncated_body_ends_before_what_its_head_announced() -> None:
    """The head is the engine's; the body stops short of it, and the connection closes."""
    async with in_between(answering(reply(WHOLE))) as (proxy, server):
        proxy.on("/a", TruncateBody(5))
        with pytest.raises(httpx.RemoteProtocolError, match=f"received 5 bytes, expected {len(json.dumps(WHOLE))}"):
            await ask(proxy, "POST", "/a")
    assert len(server.heard) == 1


@pytest.mark.anyio
async def test_truncated_json_is_whole_http() -> None:
    """The reply is complete as far as HTTP can tell, and its JSON is not."""
    async with in_between(answering(reply(WHOLE))) as (proxy, _):
        proxy.on("/a", TruncateJSON(5))
        response = await ask(proxy, "POST", "/a")
    assert (response.status_code, response.text) == (200, json.dumps(WHOLE)[:5])


@pytest.mark.anyio
@pytest.mark.parametrize(("body", "sent"), [({"a": 1}, '{"a": 1}'), ("text", "text"), (b"\x00", "\x00"), (None, "")])
async def test_a_canned_answer_is_what_was_given(body: object, sent: str) -> None:
    """Values become JSON, text and bytes stay as they are; the engine is not asked."""
    async with in_between(answering(reply(WHOLE))) as (proxy, server):
        proxy.on("/a", Answer(403, body, {"retry-after": "1"}))
        response = await ask(proxy, "POST", "/a")
    assert (response.status_code, response.text, response.headers["retry-after"]) == (403, sent, "1")
    assert server.heard == []


@pytest.mark.anyio
async def test_a_gateway_can_answer_for_an_engine_that_did_it() -> None:
    """A canned answer, after the engine was asked: the client is told 504, and it was done."""
    async with in_between(answering(reply(WHOLE))) as (proxy, server):
        proxy.on("/a", Answer(504, applied=True))
        assert (await ask(proxy, "POST", "/a")).status_code == 504
    assert (len(server.heard), proxy.seen[0].status) == (1, 200)


@pytest.mark.anyio
@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
async def test_a_delay_ends_with_its_event(applied: bool) -> None:
    """The request waits before the engine, or its reply after it, until the test says so; nothing is lost."""
    go = anyio.Event()
    async with in_between(answering(reply(WHOLE))) as (proxy, server), anyio.create_task_group() as tasks:
        proxy.on("/a", Delay(go, applied=applied))

        async def client() -> None:
            assert (await ask(proxy, "POST", "/a")).json() == WHOLE
            assert go.is_set()

        tasks.start_soon(client)
        await proxy.until(1)
        await server.until(lambda: len(server.heard) == applied)
        go.set()
    assert len(server.heard) == 1


@pytest.mark.anyio
async def test_a_delay_of_seconds_ends_by_itself() -> None:
    """Where no event is given, time passes."""
    async with in_between(answering(reply(WHOLE))) as (proxy, _):
        proxy.on("/a", Delay(seconds=0.01))
        assert (await ask(proxy, "POST", "/a")).json() == WHOLE


@pytest.mark.anyio
async def test_a_request_can_land_after_its_client_was_told_nothing() -> None:
    """The reply is lost at once; the engine gets the request when the test says so."""
    go = anyio.Event()
    async with in_between(answering(reply(WHOLE))) as (proxy, server):
        proxy.on("/pause", LandLate(go))
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(proxy, "POST", "/pause")
        assert (await ask(proxy, "POST", "/resume")).status_code == 200
        go.set()
        await server.until(lambda: len(server.heard) == 2)
    assert [heard.line for heard in server.heard] == ["POST /resume", "POST /pause"]
