"""Connections to one engine: one request at a time on each, kept while idle, cut on any doubt.

httpx's own pool scans every connection for every request and can lose a slot to a cancellation; with one transport a
connection, taking and giving back are O(1), and a failed or cancelled request takes its connection with it.
"""

import functools
import itertools
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import httpx
from anyio.lowlevel import RunVar
from attrs import define, field

from .dialect import HttpReply, Reply
from .replies import EventStream, late, no_reply, read_whole, streams

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
        self,
        request: httpx.Request,
        *,
        timeout: float,
        written: Callable[[], None],
        fresh: bool = False,
        stream: bool = False,
    ) -> Reply | EventStream:
        """Send `request` and return its reply, or why none came within `timeout` seconds.

        Calls `written` once the whole request has been written. `fresh`: on a connection of its own. `stream`: where
        the reply is a stream of events, return that as soon as it begins; it must be closed.

        Cancellation: the connection is closed.
        """
        progress = _Progress(written)
        connect = min(CONNECT_SECONDS, timeout)
        request.extensions = {"timeout": {"connect": connect}, "trace": progress}
        wire = self._take(fresh=fresh)
        self._wires().busy.add(wire)
        reply: Reply | EventStream | None = None
        try:
            # One deadline for everything, since a server that drips bytes renews httpx's own read timeout for ever.
            with anyio.move_on_after(timeout):
                response = await wire.transport.handle_async_request(request)
                if stream and streams(response):
                    reply = EventStream(response, functools.partial(self._release, wire, fresh=fresh))
                else:
                    reply = read_whole(response.status_code, await response.aread())
        except (httpx.TransportError, httpx.DecodingError) as error:
            reply = no_reply(error, sent=progress.started)
        finally:
            if not isinstance(reply, EventStream):
                # vLLM closes the socket after an unhandled 500 without saying so: the next request would be lost.
                await self._release(wire, isinstance(reply, HttpReply) and reply.status < 500, fresh=fresh)
        return reply or late(timeout, sent=progress.started)

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

    async def _release(self, wire: _Wire, whole: bool, *, fresh: bool) -> None:
        """Take `wire` out of use. `whole`: its reply was read to the end, so that another may follow."""
        self._wires().busy.discard(wire)
        await _cut(self._give_back(wire) if whole and not fresh else [wire])

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
