"""A raw HTTP server that answers as a test scripts it, misbehaviour included."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketListener, SocketStream
from attrs import define, field, frozen


@frozen(kw_only=True)
class Heard:
    """A request as it came over the wire."""

    connection: int
    """Which connection it came on, from 0."""
    number: int
    """Which request of the server it was, from 0."""
    line: str
    headers: dict[str, str]
    body: Any


Script = Callable[[Heard, SocketStream], Awaitable[bool | None]]
"""Answers one request; a false value closes the connection."""


@define(eq=False)
class WireServer:
    """What the server heard."""

    listener: SocketListener
    heard: list[Heard] = field(factory=list)
    connections: int = 0
    open: int = 0
    changed: anyio.Event = field(factory=anyio.Event)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.listener.extra(SocketAttribute.local_port)}"  # noqa: S610 - no Django

    def change(self) -> None:
        """Wake those who wait for something."""
        self.changed.set()
        self.changed = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds."""
        while not condition():
            await self.changed.wait()


async def until_gone(stream: SocketStream) -> None:
    """Wait until the client closes the connection."""
    while await stream.receive():
        pass


def reply(data: Any = None, status: int = 200, *, headers: str = "", text: str | None = None) -> bytes:
    """Return the bytes of an answer."""
    body = (json.dumps(data) if text is None else text).encode()
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


def answering(*answers: bytes) -> Script:
    """Answer with each of `answers` in turn, and then with the last again; keep connections."""

    async def script(heard: Heard, stream: SocketStream) -> bool:
        await stream.send(answers[min(heard.number, len(answers) - 1)])
        return True

    return script


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[WireServer]:
    """Serve `script` on a free port until the block ends."""
    server = WireServer(await _listener())

    async def handle(stream: SocketStream) -> None:
        connection = server.connections
        server.connections += 1
        server.open += 1
        try:
            async with stream:
                await _converse(server, connection, stream, script)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            pass
        finally:
            server.open -= 1
            server.change()

    async def listen() -> None:
        try:
            await server.listener.serve(handle)
        except* anyio.ClosedResourceError:  # a script closed it
            pass

    async with server.listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        yield server
        tasks.cancel_scope.cancel()


async def _listener() -> SocketListener:
    listeners = await anyio.create_tcp_listener(local_host="127.0.0.1")
    (only,) = listeners.listeners
    assert isinstance(only, SocketListener)
    return only


async def _converse(server: WireServer, connection: int, stream: SocketStream, script: Script) -> None:
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            data += await stream.receive()
        head, _, data = data.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        length = int(headers.get("content-length", "0"))
        while len(data) < length:
            data += await stream.receive()
        body, data = data[:length], data[length:]
        heard = Heard(
            connection=connection,
            number=len(server.heard),
            line=first.removesuffix(" HTTP/1.1"),
            headers=headers,
            body=json.loads(body) if body else None,
        )
        server.heard.append(heard)
        server.change()
        if not await script(heard, stream):
            return
