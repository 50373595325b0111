"""Connections to one engine: one request at a time on each, kept while idle, cut on any doubt.

httpx's own pool scans every connection for every request and can lose a slot to a cancellation; with one transport a
connection, taking and giving back are O(1), and a failed or cancelled request takes its connection with it.
"""

import functools
import itertools
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import httpx
from anyio.lowlevel import RunVar
from attrs import define, field

from .dialect import HttpReply, Missing, NoReply, Reply

CONNECT_SECONDS = 5.0
"""Longest wait for a connection, however much time a request has."""
IDLE_SECONDS = 4.0
"""Below uvicorn's 5 s keep-alive, so that the server is rarely the first to close."""

_numbers = itertools.count()


@functools.cache
def verifying_context() -> ssl.SSLContext:
    """Return the one context that verifies certificates: loading the CA bundle costs 20 ms."""
    return httpx.create_ssl_context(trust_env=False)


@functools.cache
def unused_context() -> ssl.SSLContext:
    """Return the context for plain HTTP, where none is used but httpx wants one."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@define
class Block(httpx.AsyncByteStream):
    """The body of a request. httpx's own is a generator, which trio finds left behind when the request is cancelled."""

    _body: bytes | None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the body, once."""
        body, self._body = self._body, None
        if body is None:
            raise StopAsyncIteration
        return body


@define(eq=False)
class _Wire:
    """A transport that holds at most one connection."""

    transport: httpx.AsyncHTTPTransport
    idle_since: float = 0.0


@define(eq=False)
class _Progress:
    """How far a request got, as httpcore's trace tells it."""

    written: Callable[[], None]
    started: bool = False

    async def __call__(self, event: str, _: dict[str, Any]) -> None:
        if event == "http11.send_request_headers.started":
            self.started = True
        elif event == "http11.send_request_body.complete":
            self.written()


@define(eq=False)
class _Wires:
    """The connections of one event loop."""

    idle: deque[_Wire] = field(factory=deque)
    busy: set[_Wire] = field(factory=set)


class Connections:
    """The connections of one lane of one engine. Usable from any event loop; each loop has its own."""

    def __init__(self, context: ssl.SSLContext, *, max_idle: int) -> None:
        self._context = context
        self._max_idle = max_idle
        self._of_loop: RunVar[_Wires] = RunVar(f"rollout-lifecycle connections {next(_numbers)}")

    @property
    def busy(self) -> int:
        """Requests in flight in this event loop."""
        return len(self._wires().busy)

    @property
    def idle(self) -> int:
        """Connections kept for another request in this event loop."""
        return len(self._wires().idle)

    async def exchange(
        self, request: httpx.Request, *, timeout: float, written: Callable[[], None], fresh: bool = False
    ) -> Reply:
        """Send `request` and return its reply, or why none came within `timeout` seconds.

        Calls `written` once the whole request has been written. `fresh`: on a connection of its own.

        Cancellation: the connection is closed.
        """
        progress = _Progress(written)
        connect = min(CONNECT_SECONDS, timeout)
        request.extensions = {"timeout": {"connect": connect}, "trace": progress}
        wire = self._take(fresh=fresh)
        self._wires().busy.add(wire)
        reply: Reply | None = None
        try:
            # One deadline for everything, since a server that drips bytes renews httpx's own read timeout for ever.
            with anyio.move_on_after(timeout):
                response = await wire.transport.handle_async_request(request)
                reply = _read(response.status_code, await response.aread())
        except (httpx.TransportError, httpx.DecodingError) as error:
            reply = _no_reply(error, progress)
        finally:
            self._wires().busy.discard(wire)
            # vLLM closes the socket after an unhandled 500 without saying so: the next request on it would be lost.
            keep = isinstance(reply, HttpReply) and reply.status < 500 and not fresh
            doomed = self._give_back(wire) if keep else [wire]
            await _cut(doomed)
        return reply or NoReply(kind=Missing.TIMEOUT, sent=progress.started, detail=f"within {timeout:.3g} s")

    async def aclose(self) -> None:
        """Close this event loop's connections, also those in use, whose requests then end without a reply. Idempotent.

        Cancellation: the connections are closed nevertheless.
        """
        wires = self._wires()
        doomed = [*wires.idle, *wires.busy]
        wires.idle.clear()
        await _cut(doomed)

    def _wires(self) -> _Wires:
        try:
            return self._of_loop.get()
        except LookupError:
            wires = _Wires()
            self._of_loop.set(wires)
            return wires

    def _take(self, *, fresh: bool) -> _Wire:
        """Take the connection that was used last, so that the others can grow old and be closed."""
        kept = self._wires().idle
        if kept and not fresh:
            return kept.pop()
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_SECONDS)
        return _Wire(httpx.AsyncHTTPTransport(verify=self._context, trust_env=False, limits=limits))

    def _give_back(self, wire: _Wire) -> list[_Wire]:
        """Keep `wire` and return the connections that are too old or too many."""
        kept = self._wires().idle
        now = wire.idle_since = anyio.current_time()
        kept.append(wire)
        doomed = []
        while kept and (len(kept) > self._max_idle or now - kept[0].idle_since > IDLE_SECONDS):
            doomed.append(kept.popleft())
        return doomed


async def _cut(wires: list[_Wire]) -> None:
    if wires:
        with anyio.CancelScope(shield=True):
            for wire in wires:
                await wire.transport.aclose()


def _read(status: int, body: bytes) -> HttpReply:
    text = body.decode("utf-8", errors="replace")
    try:
        return HttpReply(status=status, data=json.loads(text), text=text)
    except ValueError:
        return HttpReply(status=status, text=text, json=False)


def _no_reply(error: httpx.TransportError | httpx.DecodingError, progress: _Progress) -> NoReply:
    words = str(error)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        kind = Missing.CONNECT
    elif isinstance(error, httpx.TimeoutException):
        kind = Missing.TIMEOUT
    # One exception class for both: h11's own sentences tell a peer that left from one that spoke nonsense.
    elif isinstance(error, httpx.NetworkError) or "disconnected" in words or "closed connection" in words:
        kind = Missing.DISCONNECTED
    else:
        kind = Missing.MALFORMED
    return NoReply(kind=kind, sent=progress.started, detail=words[:200])
