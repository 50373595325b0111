"""Sockets that can be ended in every way a peer's can be, which no stream of anyio's offers."""

import socket
import struct
from collections.abc import Awaitable, Callable

import anyio
import h11
from attrs import define, field

_AT_ONCE = struct.pack("ii", 1, 0)  # linger for no time: closing sends a RST


class HangUp(Exception):
    """The client closed the connection, or broke it."""


@define(eq=False)
class Line:
    """One connection of a client, read and written as HTTP/1.1."""

    socket: socket.socket
    number: int
    http: h11.Connection = field(factory=lambda: h11.Connection(h11.SERVER))

    async def request(self) -> tuple[h11.Request, bytes] | None:
        """Return the next request and its body; `None` where the client is done. Raises `HangUp`.

        Cancellation: a request that has come in part is lost.
        """
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self.http.next_event()
            if isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif event is h11.NEED_DATA:
                self.http.receive_data(await self._receive())
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return head, bytes(body)
            else:
                return None

    async def send(self, *events: h11.Event) -> None:
        """Send events of one reply. Raises `HangUp`.

        Cancellation: a part of them may have been sent.
        """
        data = memoryview(b"".join(self.http.send(event) or b"" for event in events))
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                await anyio.wait_writable(self.socket)
            except OSError as error:
                raise HangUp from error

    async def hung_up(self) -> None:
        """Return when the client hangs up. What it sends meanwhile is kept for the next request.

        Cancellation: nothing is lost.
        """
        try:
            while data := await self._receive():
                self.http.receive_data(data)
        except HangUp:
            return
        self.http.receive_data(b"")

    def half_close(self) -> None:
        """Tell the client that nothing more will be sent."""
        self.socket.shutdown(socket.SHUT_WR)

    def close(self, *, reset: bool = False) -> None:
        """Close it, with a RST where asked for. Idempotent."""
        if reset and self.socket.fileno() >= 0:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.socket.close()

    async def _receive(self) -> bytes:
        while True:
            try:
                return self.socket.recv(65536)
            except BlockingIOError:
                await anyio.wait_readable(self.socket)
            except OSError as error:
                raise HangUp from error


def bound(port: int = 0) -> socket.socket:
    """Return a socket that has a loopback port and does not listen: connecting to it is refused."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    held.setblocking(False)
    return held


async def accepting(listener: socket.socket, take: Callable[[socket.socket], object]) -> None:
    """Hand every connection that comes to `take`, for ever.

    Cancellation: no connection is lost; the listener stays open.
    """
    while True:
        await anyio.wait_readable(listener)
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # whoever wanted in has gone again
            continue
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        take(client)


async def unless_hung_up(line: Line, work: Callable[[], Awaitable[None]]) -> None:
    """Do `work`, and give it up when the client hangs up. Raises `HangUp` then.

    Cancellation: `work` is cancelled.
    """
    gone = False
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            nonlocal gone
            await line.hung_up()
            gone = True
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        await work()
        tasks.cancel_scope.cancel()
    if gone:
        raise HangUp
