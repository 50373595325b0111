"""A proxy on loopback that makes wire faults on purpose."""

import json
import socket
from collections import defaultdict, deque
from types import TracebackType
from typing import Any, Self

import anyio
import h11
import httpx
from anyio.abc import TaskGroup
from attrs import define, field

from adapters.engines.connections import Block, unused_context, verifying_context

from .faults import PASS, Answer, Delay, Drop, Fault, HalfClose, LandLate, Silence, TruncateBody
from .replies import Reply, canned, message
from .wire import HangUp, Line, accepting, bound, unless_hung_up

_OF_ONE_HOP = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding"}


@define(eq=False, kw_only=True)
class Seen:
    """One request that the proxy saw."""

    connection: int
    """Which connection it came on, from 0."""
    method: str
    path: str
    query: str
    headers: dict[str, str] = field(repr=False)
    """Names in lower case."""
    body: bytes = field(repr=False)
    fault: Fault = PASS
    """What it met."""
    forwarded: bool = False
    """Whether the engine may have got it."""
    status: int | None = None
    """What the engine answered; `None` where it was not asked, or did not answer."""

    @property
    def json(self) -> Any:
        """The parsed body; `None` where there is none. Raises `ValueError` where it is not JSON."""
        return json.loads(self.body) if self.body else None

    def matches(self, route: str) -> bool:
        """Whether it was made to `route`: `"*"`, a path, or a method and a path."""
        return route in self.routes

    @property
    def routes(self) -> tuple[str, ...]:
        """The names that it can be scripted by, the narrowest first."""
        return f"{self.method} {self.path}", self.path, "*"


class FaultProxy:
    """A proxy between a client and one engine that behaves, or misbehaves, on a script.

    ```python
    async with FaultProxy(embedded.url) as proxy:
        engine = SGLangEngine(proxy.url)
        proxy.on("/continue_generation", PASS, Drop(applied=True))  # the second continue is carried out, its reply lost
        proxy.always("GET /server_info", Answer(503))
    ```

    What is not scripted passes: each request on a connection of its own, and its reply as a whole once it is complete,
    streams included. When the client hangs up, so does the proxy; when the engine does not answer, the proxy closes
    the connection without a reply.

    Args:
        upstream: Base URL of the engine, `http://` or `https://`. Credentials belong into the client's requests.
    """

    def __init__(self, upstream: str) -> None:
        base = httpx.URL(upstream)
        if base.scheme not in {"http", "https"} or not base.host:
            raise ValueError("upstream must be a URL such as http://HOST:PORT")
        self._upstream = str(base).rstrip("/")
        context = verifying_context() if base.scheme == "https" else unused_context()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._transport = httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits)
        self._script: dict[str, deque[Fault]] = defaultdict(deque)
        self._standing: dict[str, Fault] = {}
        self._socket = bound()
        self._port = int(self._socket.getsockname()[1])
        self._serving = anyio.CancelScope()
        self._refusing = anyio.Event()
        self._changed = anyio.Event()
        self._connections = 0
        self._tasks: TaskGroup | None = None
        self.seen: list[Seen] = []
        """Every request, in the order in which they were complete."""

    def __repr__(self) -> str:
        return f"FaultProxy(url={self.url!r})"

    @property
    def url(self) -> str:
        """Base URL of the proxy, the same for its whole life."""
        return f"http://127.0.0.1:{self._port}"

    # ----------------------------------------------------------------------------------------------------- for the test

    def on(self, route: str, *faults: Fault) -> Self:
        """Let the next requests to `route` meet `faults`, one each, before those that follow pass.

        `route`: a path, a method and a path (`"POST /pause"`), or `"*"` for all. The narrowest script goes first.
        """
        self._script[route].extend(faults)
        return self

    def always(self, route: str, fault: Fault) -> Self:
        """Let every request to `route` meet `fault`, once its script is used up."""
        self._standing[route] = fault
        return self

    def heal(self) -> None:
        """Forget every script: what comes from now on passes."""
        self._script.clear()
        self._standing.clear()

    async def refuse(self) -> None:
        """Cut every connection, and refuse new ones, as a host does whose server has died. Idempotent.

        Raises `RuntimeError` outside of its block.

        Cancellation: it refuses nevertheless.
        """
        if self._tasks is None:
            raise RuntimeError("the proxy is used outside of its block")
        self._serving.cancel()
        await self._refusing.wait()

    def accept(self) -> None:
        """Take connections again, on the same port. Idempotent. Raises `RuntimeError` outside of its block."""
        if self._tasks is None:
            raise RuntimeError("the proxy is used outside of its block")
        if self._refusing.is_set():
            self._listen(self._tasks)

    def requests(self, route: str = "*") -> list[Seen]:
        """Return the requests that were made to `route`, in order."""
        return [seen for seen in self.seen if seen.matches(route)]

    async def until(self, count: int, route: str = "*") -> None:
        """Wait until `count` requests to `route` have come.

        Cancellation: nothing is changed.
        """
        while len(self.requests(route)) < count:
            await self._changed.wait()

    # ---------------------------------------------------------------------------------------------------------- serving

    async def __aenter__(self) -> Self:
        if self._socket.fileno() < 0:
            raise RuntimeError("a proxy serves once; make another one")
        self._tasks = await anyio.create_task_group().__aenter__()
        self._listen(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        try:
            tasks.cancel_scope.cancel()
            # Not told of the block's error, which would come out of it wrapped in a group.
            await tasks.__aexit__(None, None, None)
        finally:
            self._socket.close()
            with anyio.CancelScope(shield=True):
                await self._transport.aclose()

    def _listen(self, tasks: TaskGroup) -> None:
        self._socket.listen(1024)
        self._serving, self._refusing = anyio.CancelScope(), anyio.Event()
        tasks.start_soon(self._serve, tasks)

    async def _serve(self, tasks: TaskGroup) -> None:
        """Take connections until they are to be refused, then hold the port with a socket that does not listen."""
        with self._serving:
            async with anyio.create_task_group() as connections:
                await accepting(self._socket, lambda client: connections.start_soon(self._converse, client, tasks))
        self._socket.close()
        self._socket = bound(self._port)
        self._refusing.set()

    async def _converse(self, client: socket.socket, tasks: TaskGroup) -> None:
        line = Line(client, self._connections)
        self._connections += 1
        try:
            while (received := await line.request()) is not None:
                seen = self._note(line, *received)
                if not await self._meet(line, seen, tasks) or line.http.our_state is not h11.DONE:
                    return
                line.http.start_next_cycle()
        except (HangUp, h11.RemoteProtocolError):
            return  # it is the client's to know
        finally:
            line.close()

    def _note(self, line: Line, head: h11.Request, body: bytes) -> Seen:
        path, _, query = head.target.decode("ascii").partition("?")
        seen = Seen(
            connection=line.number,
            method=head.method.decode("ascii"),
            path=path,
            query=query,
            headers={name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers},
            body=body,
        )
        seen.fault = self._next_fault(seen)
        self.seen.append(seen)
        self._changed.set()
        self._changed = anyio.Event()
        return seen

    def _next_fault(self, seen: Seen) -> Fault:
        for route in seen.routes:
            if self._script[route]:
                return self._script[route].popleft()
        return next((self._standing[route] for route in seen.routes if route in self._standing), PASS)

    async def _meet(self, line: Line, seen: Seen, tasks: TaskGroup) -> bool:
        """Let a request meet its fault. Returns whether a reply was sent."""
        reply: Reply | None = None

        async def happen() -> None:
            nonlocal reply
            reply = await self._happen(seen)

        await unless_hung_up(line, happen)
        match seen.fault:
            case Drop(reset=reset):
                line.close(reset=reset)
            case HalfClose():
                line.half_close()
                await line.hung_up()
            case LandLate(until):
                tasks.start_soon(self._land, seen, until)
            case Answer():
                await line.send(*message(canned(seen.fault)))
                return True
            case _ if reply is not None:
                await line.send(*message(reply, seen.fault))
                return not isinstance(seen.fault, TruncateBody)
        return False

    async def _happen(self, seen: Seen) -> Reply | None:
        """Do to a request what comes before its reply."""
        fault = seen.fault
        if isinstance(fault, Delay) and not fault.applied:
            await _wait(fault)
        reply = await self._forward(seen) if fault.applied or isinstance(fault, Delay) else None
        if isinstance(fault, Delay) and fault.applied:
            await _wait(fault)
        if isinstance(fault, Silence):
            await anyio.sleep_forever()
        return reply

    async def _land(self, seen: Seen, until: anyio.Event) -> None:
        await until.wait()
        await self._forward(seen)

    async def _forward(self, seen: Seen) -> Reply | None:
        """Ask the engine. `None` where it does not answer."""
        seen.forwarded = True
        target = f"{self._upstream}{seen.path}{'?' if seen.query else ''}{seen.query}"
        headers = [(name, value) for name, value in seen.headers.items() if name.encode() not in _OF_ONE_HOP]
        request = httpx.Request(seen.method, target, headers=headers, content=seen.body)
        request.stream = Block(seen.body)
        try:
            response = await self._transport.handle_async_request(request)
            try:
                body = b"".join([piece async for piece in response.aiter_raw()])
            finally:
                await response.aclose()
        except httpx.TransportError:
            return None
        seen.status = response.status_code
        kept = [(name, value) for name, value in response.headers.raw if name.lower() not in _OF_ONE_HOP]
        return Reply(response.status_code, kept, body)


async def _wait(delay: Delay) -> None:
    await (anyio.sleep(delay.seconds) if delay.until is None else delay.until.wait())
