"""The HTTP driver: an `EnginePort` that runs a dialect's generators over real connections."""

import base64
import json
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import httpx
from attrs import evolve

from lifecycle import errors, events
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest, Segment, Tokens
from lifecycle.ports import Acknowledgement, Capabilities

from .connections import Block, Connections, unused_context, verifying_context
from .dialect import (
    Dialect,
    HttpCall,
    HttpEnd,
    HttpReply,
    Lane,
    Missing,
    More,
    NoReply,
    Reply,
    Steps,
    Streamed,
    Streaming,
)
from .replies import EventStream
from .sglang import SGLang
from .vllm import VLLM

T = TypeVar("T")

BACKOFF_SECONDS = 0.05
"""Before the first repetition; doubled for each further one."""


def _nothing() -> None:
    """Stand in where nobody waits for the request to be written."""


class HttpEngine:
    """One inference server behind one base URL, spoken to in `dialect`.

    Control calls and generation never share connections. Every operation keeps within its `timeout`, connecting and
    repetitions included. A call is repeated only when it can't have been received, or when it is idempotent and the
    connection broke, or it was turned away for now (429); nothing is repeated on a timeout.

    Args:
        url: Base URL, `http://` or `https://`, with an optional path prefix. `user:password@` becomes basic
            authentication and is shown nowhere.
        dialect: How this server is spoken to. One instance belongs to one engine.
        name: Name in the fleet, facts and errors. `None`: `host:port` and the path prefix.
        api_key: Sent as a bearer token with every call and shown nowhere. `None`: no token.
        ssl_context: For `https://`. `None`: one that verifies against the usual authorities.
        retries: How often a call may be repeated, int ≥ 0.

    Raises:
        ValueError: The URL or another argument makes no sense.
    """

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        *,
        name: str | None = None,
        api_key: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        retries: int = 2,
    ) -> None:
        base = _validated(url)
        if retries < 0:
            raise ValueError(f"retries must be at least 0, got {retries}")
        if name is not None and not name:
            raise ValueError("name must not be empty")
        self._base, self._headers, self._secrets = _split(base, api_key)
        self._name = _name_of(base) if name is None else name
        self._dialect = dialect
        self._retries = retries
        secure = base.scheme == "https"
        context = ssl_context or (verifying_context() if secure else unused_context())
        self._lanes = {
            Lane.CONTROL: Connections(context, max_idle=4),
            Lane.GENERATION: Connections(context, max_idle=2048),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self._name!r}, kind={self._dialect.kind!r})"

    @property
    def name(self) -> str:
        """A name unique in the fleet, without credentials."""
        return self._name

    @property
    def address(self) -> str:
        """Its URL without credentials: for the journal, so that whoever comes after a killed trainer finds it."""
        return self._base

    @property
    def dialect(self) -> Dialect:
        """How this server is spoken to."""
        return self._dialect

    @property
    def capabilities(self) -> Capabilities:
        """What it can do. A probe may refine it."""
        return self._dialect.capabilities

    async def perform(
        self, request: events.Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = _nothing
    ) -> Acknowledgement:
        """Act on `request` within `timeout` seconds and say what is known afterwards.

        Calls `sent` once, when the request's first call has been written and before its reply is awaited: a request
        that a transfer waits for consists of one call. Not called when nothing had to be, or could be, written.

        Raises `TypeError` for a request that no engine is asked; trouble with the engine is an outcome, not an error.

        Cancellation: connections in use are closed; the request may or may not have taken effect.
        """
        steps = self._dialect.perform(request, facts)
        ack = await self._drive(steps, timeout=timeout, written=_once(sent))
        return evolve(ack, detail=self._without_secrets(ack.detail))

    async def generate(
        self, request: GenerationRequest, *, timeout: float, arrived: Callable[[Tokens], None] | None = None
    ) -> Segment:
        """Generate until a stop, the budget, or an abort, within `timeout` seconds.

        `arrived`: called with tokens as they come, each once and in order, also with those that come before an error.
        Given only to an engine that can stream.

        Raises `errors.EngineUnavailable` when the engine did not answer, or not to the end; `errors.GenerationRefused`
        when it refused the request for good.

        Cancellation: the connection is closed, on which servers abort the request.
        """
        steps = self._dialect.generate(request, engine=self._name, stream=arrived is not None)
        try:
            return await self._drive(steps, timeout=timeout, written=_nothing, arrived=arrived)
        except errors.EngineUnavailable as error:
            raise errors.EngineUnavailable(self._name, self._without_secrets(error.detail)) from None
        except errors.GenerationRefused as error:
            raise errors.GenerationRefused(self._without_secrets(str(error))) from None

    async def aclose(self) -> None:
        """Close connections. The engine itself is left as it is. Idempotent.

        Cancellation: connections are dropped without waiting for the peer.
        """
        for lane in self._lanes.values():
            await lane.aclose()

    # ------------------------------------------------------------------------------------------------------- driving

    async def _drive(
        self,
        steps: Steps[T] | Streaming[T],
        *,
        timeout: float,
        written: Callable[[], None],
        arrived: Callable[[Tokens], None] | None = None,
    ) -> T:
        # A little is kept back to say what happened, since the caller's own deadline is the same.
        deadline = anyio.current_time() + timeout - min(0.05, timeout / 20)
        stream: EventStream | None = None
        said: Any = None
        try:
            while True:
                asked = steps.send(said)
                if isinstance(asked, More):
                    if asked.news is not None and arrived is not None:
                        arrived(asked.news)
                    said = await _next(stream, asked, deadline)
                    continue
                said = await self._call(asked, deadline=deadline, written=written)
                if isinstance(said, EventStream):
                    stream, said = said, HttpReply(status=said.status, events=True)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            steps.close()
            if stream is not None:
                await stream.aclose()

    async def _call(self, call: HttpCall, *, deadline: float, written: Callable[[], None]) -> Reply | EventStream:
        """Make one call, repeated where that is safe, before `deadline`. A stream must be closed."""
        if call.limit is not None:
            deadline = min(deadline, anyio.current_time() + call.limit)
        fresh = not call.idempotent
        sent = False
        for attempt in range(self._retries + 1):
            remaining = deadline - anyio.current_time()
            if remaining <= 0:
                break
            request = self._request(call, close=fresh)
            lane = self._lanes[call.lane]
            reply = await lane.exchange(request, timeout=remaining, written=written, fresh=fresh, stream=call.stream)
            if isinstance(reply, EventStream):
                return reply
            if isinstance(reply, NoReply):
                # What an earlier attempt may have delivered stays delivered, whatever the later ones meet.
                sent = sent or reply.sent
                reply = evolve(reply, sent=sent)
            elif sent:
                reply = evolve(reply, doubtful=True)
            if attempt == self._retries or not _worth_repeating(call, reply):
                return reply
            # A kept connection that broke says nothing about the server; a second one from the stack might be as old.
            fresh = True
            await anyio.sleep(min(BACKOFF_SECONDS * 2**attempt, max(0.0, deadline - anyio.current_time())))
        return NoReply(kind=Missing.TIMEOUT, sent=sent, detail="no time was left")

    def _request(self, call: HttpCall, *, close: bool) -> httpx.Request:
        headers = dict(self._headers)
        content: bytes | None = None
        if close:
            headers["Connection"] = "close"
        if call.body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(call.body, separators=(",", ":")).encode()
        params: Any = dict(call.query) or None
        url = f"{self._base}{call.path}"
        request = httpx.Request(call.method, url, params=params, headers=headers, content=content)
        request.stream = Block(content or b"")
        return request

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class SGLangEngine(HttpEngine):
    """An `HttpEngine` that speaks to an SGLang server; `options` as for `HttpEngine`."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, SGLang(), **options)


class VLLMEngine(HttpEngine):
    """An `HttpEngine` that speaks to a vLLM server; `options` as for `HttpEngine`.

    The server's control routes exist only with `VLLM_SERVER_DEV_MODE=1` in its environment.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, VLLM(), **options)


async def _next(stream: EventStream | None, asked: More, deadline: float) -> Streamed:
    """Return what comes next on `stream`, before `deadline`."""
    if stream is None:
        return HttpEnd()
    remaining = max(0.0, deadline - anyio.current_time())
    return await stream.next(timeout=remaining if asked.limit is None else min(remaining, asked.limit))


def _worth_repeating(call: HttpCall, reply: Reply) -> bool:
    """Whether another attempt may fare better, and does no harm."""
    if isinstance(reply, NoReply):
        return reply.kind is Missing.CONNECT or (reply.kind is Missing.DISCONNECTED and call.idempotent)
    # Turned away for now. A generation had better go to another engine.
    return reply.status == 429 and call.idempotent and call.lane is Lane.CONTROL


def _once(callback: Callable[[], None]) -> Callable[[], None]:
    pending = [callback]

    def call() -> None:
        if pending:
            pending.pop()()

    return call


def _validated(url: str) -> httpx.URL:
    """Return `url` parsed, or raise `ValueError` in words that do not repeat it: it may hold a password."""
    try:
        base = httpx.URL(url)
    except (httpx.InvalidURL, TypeError, ValueError):
        raise ValueError("the engine's URL can't be parsed; give http://HOST:PORT") from None
    if base.scheme not in {"http", "https"}:
        raise ValueError(f"the engine's URL must start with http:// or https://, not {base.scheme!r}")
    if not base.host:
        raise ValueError("the engine's URL has no host; give http://HOST:PORT")
    if base.port is not None and not 0 < base.port < 65536:
        raise ValueError(f"the engine's URL has port {base.port}; ports go from 1 to 65535")
    if base.query or base.fragment:
        raise ValueError(f"the URL of {_name_of(base)} must end with its path: no query, no fragment")
    return base


def _name_of(base: httpx.URL) -> str:
    host = f"[{base.host}]" if ":" in base.host else base.host
    port = base.port or {"http": 80, "https": 443}[base.scheme]
    return f"{host}:{port}{base.path.rstrip('/')}"


def _split(base: httpx.URL, api_key: str | None) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Return the URL without credentials, the headers that carry them, and what must never be shown."""
    plain = str(base.copy_with(username=None, password=None)).rstrip("/")
    if api_key is not None:
        if base.userinfo:
            raise ValueError(f"{_name_of(base)} is given credentials both in its URL and as api_key; choose one")
        if not api_key or not api_key.isascii() or not api_key.isprintable():
            raise ValueError("api_key must be printable ASCII text")
        return plain, {"Authorization": f"Bearer {api_key}"}, (api_key,)
    if not base.userinfo:
        return plain, {}, ()
    token = base64.b64encode(f"{base.username}:{base.password}".encode()).decode()
    secrets = tuple(s for s in (token, base.password, base.username if not base.password else "") if s)
    return plain, {"Authorization": f"Basic {token}"}, secrets
