"""What httpx gives, as the replies that dialects know: whole ones, those that never came, and streams of events."""

import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx

from .dialect import HttpEnd, HttpEvent, HttpReply, Missing, NoReply, Streamed
from .sse import EventParser

_DONE = "[DONE]"
"""The data of the event that both servers, and OpenAI's, end a stream with."""
_GOODBYE_SECONDS = 1.0
"""How long the connection's end of a stream is waited for after that, so that it can be used again."""


def read_whole(status: int, body: bytes) -> HttpReply:
    """Return a reply that has been read to its end."""
    text = body.decode("utf-8", errors="replace")
    try:
        return HttpReply(status=status, data=json.loads(text), text=text)
    except ValueError:
        return HttpReply(status=status, text=text, json=False)


def late(timeout: float, *, sent: bool) -> NoReply:
    """Return that nothing came within `timeout` seconds."""
    return NoReply(kind=Missing.TIMEOUT, sent=sent, detail=f"within {timeout:.3g} s")


def no_reply(error: httpx.TransportError | httpx.DecodingError, *, sent: bool) -> NoReply:
    """Return why nothing came."""
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
    return NoReply(kind=kind, sent=sent, detail=words[:200])


def streams(response: httpx.Response) -> bool:
    """Whether the body of a response is a stream of events; errors are always read as a whole."""
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")


class EventStream:
    """A reply that comes event by event. It holds its connection until it is closed.

    Args:
        response: One whose headers have come.
        release: Takes the connection back, and whether the response was read to its end.
    """

    def __init__(self, response: httpx.Response, release: Callable[[bool], Awaitable[None]]) -> None:
        stream: Any = response.stream
        self.status = response.status_code
        self._response, self._release = response, release
        self._pieces = aiter(stream)
        self._parser = EventParser()
        self._ready: deque[str] = deque()
        self._end: HttpEnd | NoReply | None = None
        """Set once reading has ended, be it by an error or a cancellation."""
        self._whole = False
        self._closed = False

    async def next(self, *, timeout: float) -> Streamed:
        """Return the next event, or the end, or why neither came within `timeout` seconds. After those nothing follows.

        Cancellation: nothing follows; the stream must still be closed.
        """
        with anyio.move_on_after(timeout):
            while not self._ready and self._end is None:
                await self._receive()
        if self._ready and self._ready[0] == _DONE:
            await self._finish(timeout)
        if self._ready:
            return _event(self._ready.popleft())
        if self._end is None:
            self._end = late(timeout, sent=True)
        return self._end

    async def aclose(self) -> None:
        """Give the connection back; cut it where the stream has not come to its end. Idempotent.

        Cancellation: done nevertheless.
        """
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True) as scope:
            if self._whole:
                await self._response.aclose()
            else:
                # The generators of httpx and httpcore end when reading is cancelled, and close the connection. One that
                # is left suspended is found by the garbage collector, and trio warns about it.
                scope.cancel()
                while self._end is None:
                    await self._receive()
        await self._release(self._whole)

    async def _receive(self) -> None:
        """Read some more."""
        try:
            self._ready.extend(self._parser.feed(await anext(self._pieces)))
        except StopAsyncIteration:
            self._end, self._whole = HttpEnd(), True
        except (httpx.TransportError, httpx.DecodingError) as error:
            self._end = no_reply(error, sent=True)

    async def _finish(self, timeout: float) -> None:
        """Read to the end of the response after the stream has said that it is done; what follows is no event."""
        with anyio.move_on_after(min(timeout, _GOODBYE_SECONDS)):
            while self._end is None:
                await self._receive()
        self._ready.clear()
        self._end = HttpEnd(done=True)


def _event(text: str) -> HttpEvent:
    try:
        return HttpEvent(data=json.loads(text), text=text)
    except ValueError:
        return HttpEvent(text=text)
