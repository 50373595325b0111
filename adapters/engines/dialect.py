"""What a dialect is: a pure mapping from requests to HTTP calls, and from replies to what is now known.

A dialect's methods are generators that yield `HttpCall`, receive an `HttpReply` or a `NoReply`, and return the result,
so they can branch on what a server answers and need no network to be tested. `HttpEngine` drives them.

A reply may be a stream: then its `HttpReply` says `events`, and the generator yields `More` for each `HttpEvent`, until
an `HttpEnd` or a `NoReply` comes instead.
"""

import re
from collections.abc import Callable, Generator, Mapping
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeVar

from attrs import evolve, field, frozen

from lifecycle import events
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest, Segment, Tokens
from lifecycle.ports import Acknowledgement, Capabilities
from lifecycle.states import Outcome

T = TypeVar("T")


class Lane(Enum):
    """Which connections a call uses, so that control never waits behind generation."""

    CONTROL = "control"
    GENERATION = "generation"


@frozen(kw_only=True)
class HttpCall:
    """One HTTP request to an engine."""

    path: str
    method: str = "POST"
    query: Mapping[str, str] = field(factory=dict)
    body: Any = None
    """Sent as JSON. `None`: no body at all."""
    idempotent: bool = False
    """Sending it twice is the same as once, so a lost reply may be answered by sending it again."""
    lane: Lane = Lane.CONTROL
    limit: float | None = None
    """Seconds that this call may take of the whole request's time. `None`: all of it."""
    stream: bool = False
    """Its reply may be a stream of server-sent events, which is then not waited for as a whole."""


@frozen(kw_only=True)
class HttpReply:
    """What a server answered."""

    status: int
    data: Any = None
    """The parsed body; `None` where it is not JSON, or is `null`."""
    text: str = ""
    json: bool = True
    """Whether the body is JSON."""
    doubtful: bool = False
    """An earlier attempt at the same call may have been carried out, so that a refusal is no disproof."""
    events: bool = False
    """The body is a stream, and nothing of it is here: each `More` brings an event of it."""


class Missing(Enum):
    """Why no reply came."""

    CONNECT = "no connection could be made"
    TIMEOUT = "no reply in time"
    DISCONNECTED = "the connection broke before a reply"
    MALFORMED = "the reply was not HTTP"


@frozen(kw_only=True)
class NoReply:
    """No reply came."""

    kind: Missing
    sent: bool = True
    """Whether any byte of the request may have reached the server."""
    detail: str = ""


@frozen(kw_only=True)
class HttpEvent:
    """One event of a stream."""

    data: Any = None
    """Its data, parsed; `None` where that is not JSON."""
    text: str = ""


@frozen(kw_only=True)
class HttpEnd:
    """A stream has come to its end."""

    done: bool = False
    """Whether it said so itself, by `[DONE]`."""


@frozen(kw_only=True)
class More:
    """Asks for the next event of the stream that the last call opened; without one, the answer is `HttpEnd`."""

    news: Tokens | None = None
    """Tokens to pass on before that."""
    limit: float | None = None
    """Seconds to wait at most. `None`: what is left of the whole request's time."""


Reply = HttpReply | NoReply
Steps = Generator[HttpCall, Reply, T]
Streamed = HttpEvent | HttpEnd | NoReply
Streaming = Generator[HttpCall | More, Reply | Streamed, T]


class Dialect(Protocol):
    """How one kind of server is spoken to. One instance an engine: it may remember what that server can do."""

    kind: str
    """The server's name, such as `"sglang"`."""

    @property
    def capabilities(self) -> Capabilities:
        """What the server can do; a probe may refine it."""
        ...

    def perform(self, request: events.Request, engine: EngineFacts) -> Steps[Acknowledgement]:
        """Act on `request`. Raises `TypeError` for a request that no engine is asked."""
        ...

    def probe(self) -> Steps[Acknowledgement]:
        """Ask what the server is and how it stands; the acknowledgement carries an `EngineReport` when it is DONE."""
        ...

    def generate(self, request: GenerationRequest, *, engine: str, stream: bool = False) -> Streaming[Segment]:
        """Generate. Raises `errors.EngineUnavailable`, naming `engine`, or `errors.GenerationRefused`.

        `stream`: let the server send tokens as it makes them, and hand them on as the news of each `More`.
        """
        ...


class Mapped:
    """A dialect whose `perform` looks the request's class up in a table of methods."""

    handlers: ClassVar[Mapping[type[events.Request], Callable[[Any, Any, EngineFacts], Steps[Acknowledgement]]]] = {}

    def perform(self, request: events.Request, engine: EngineFacts) -> Steps[Acknowledgement]:
        """Act on `request`. Raises `TypeError` for a request that no engine is asked."""
        handler = self.handlers.get(type(request))
        if handler is None:
            raise TypeError(f"{type(request).__name__} is not a request to an engine")
        return handler(self, request, engine)


# ------------------------------------------------------------------------------------------------------ classification


_DEAD = ("EngineDead", "EngineCore encountered an issue")


def classify(reply: Reply, *, json: bool = True) -> Acknowledgement:
    """Return what is known after a call that got `reply`, where the server's dialect knows no better.

    `json`: whether a body that is not JSON is suspicious, since something else than the engine may have answered.
    """
    if isinstance(reply, NoReply):
        detail = f"{reply.kind.value}{': ' if reply.detail else ''}{reply.detail}"
        outcome = Outcome.UNKNOWN if reply.sent else Outcome.NOT_DONE
        return Acknowledgement(outcome=outcome, detail=detail, unreachable=reply.kind is Missing.CONNECT)
    detail = f"HTTP {reply.status}: {message_of(reply)}".removesuffix(": ")
    refused = Outcome.UNKNOWN if reply.doubtful else Outcome.NOT_DONE
    if reply.status >= 500:
        dead = any(words in str(reply.data or reply.text) for words in _DEAD)
        outcome = refused if dead else Outcome.UNKNOWN
        return Acknowledgement(outcome=outcome, detail=detail, unreachable=dead)
    if not 200 <= reply.status < 300 or _denied(reply.data):
        return Acknowledgement(outcome=refused, detail=detail)
    # A page is somebody else's answer, whatever the route.
    if not reply.json and (json or reply.text.lstrip().startswith("<")):
        return Acknowledgement(outcome=Outcome.UNKNOWN, detail=f"HTTP {reply.status} with a body that is not JSON")
    return Acknowledgement(outcome=Outcome.DONE)


def _denied(data: Any) -> bool:
    """Whether a body takes back what its status says: servers answer 200 with `{"success": false}`."""
    return isinstance(data, dict) and (data.get("success") is False or data.get("status") == "error")


def message_of(reply: HttpReply) -> str:
    """Return the server's own words in one line of at most 300 characters; empty when it gave none."""
    # Validators quote the field that they refuse.
    return re.split(r"['\"]?input(?:_value)?['\"]?\s*[:=]", words_of(reply), maxsplit=1)[0][:300]


def words_of(reply: HttpReply) -> str:
    """Return the server's own words in one line, with whatever they quote."""
    words: Any = reply.data if reply.json else reply.text
    for key in ("error", "message", "detail"):
        if isinstance(words, dict) and key in words:
            words = words[key]
    return "" if words is None or words in ({}, []) else " ".join(str(words).split())


def field_of(reply: Reply, key: str) -> Any:
    """Return `key` of a JSON object that was answered, else `None`."""
    if isinstance(reply, HttpReply) and reply.status < 300 and isinstance(reply.data, dict):
        return reply.data.get(key)
    return None


def status_of(reply: Reply) -> int:
    """Return the HTTP status; 0 where no reply came."""
    return reply.status if isinstance(reply, HttpReply) else 0


def says(reply: Reply, status: int, words: str) -> bool:
    """Whether the server answered `status` and its message contains `words`."""
    return isinstance(reply, HttpReply) and reply.status == status and words in message_of(reply)


# ------------------------------------------------------------------------------------------------------- pieces to use

DONE = Acknowledgement(outcome=Outcome.DONE)


def refuse(detail: str) -> Acknowledgement:
    """Return that nothing was done, and why."""
    return Acknowledgement(outcome=Outcome.NOT_DONE, detail=detail)


def nothing_to_do(detail: str = "", *, untouched: bool = False) -> Steps[Acknowledgement]:
    """Make no call: the server needs none for this."""
    yield from ()
    return Acknowledgement(outcome=Outcome.DONE, detail=detail, untouched=untouched)


def ask(call: HttpCall) -> Steps[Reply]:
    """Make one call and return its reply."""
    return (yield call)


def simply(call: HttpCall, *, json: bool = True) -> Steps[Acknowledgement]:
    """Make one call and return what its reply says."""
    reply = yield call
    return classify(reply, json=json)


def get(path: str, *, limit: float | None = None) -> HttpCall:
    """Return a question: a GET that changes nothing."""
    return HttpCall(method="GET", path=path, idempotent=True, limit=limit)


def explained(ack: Acknowledgement, detail: str) -> Acknowledgement:
    """Return `ack` with a sentence put before its own."""
    return evolve(ack, detail=f"{detail}: {ack.detail}" if ack.detail else detail)
