"""Drive a dialect with plain values: no network, no mock."""

from typing import Any, TypeVar

from adapters.engines.dialect import (
    HttpCall,
    HttpEnd,
    HttpEvent,
    HttpReply,
    Missing,
    More,
    NoReply,
    Reply,
    Steps,
    Streamed,
    Streaming,
)
from lifecycle.fleet import EngineFacts
from lifecycle.generation import Tokens
from lifecycle.ports import Bucket, Channel

T = TypeVar("T")

REFUSED = NoReply(kind=Missing.CONNECT, sent=False, detail="Connection refused")
LATE = NoReply(kind=Missing.TIMEOUT)
CUT = NoReply(kind=Missing.DISCONNECTED)
CLEAN = EngineFacts(name="E1")
CHANNEL = Channel(
    kind="broadcast",
    name="group-1",
    master_address="10.0.0.1",
    master_port=29500,
    world_size=5,
    rank_offsets={"E1": 1, "E2": 3},
    backend="gloo",
    bucket_bytes=1024,
    timeout=30.0,
)
DISK = Channel(kind="disk", name="disk-1")
BUCKET = Bucket(index=1, last=True, names=("a", "b"), dtypes=("bfloat16", "float32"), shapes=((2, 3), (4,)))
FIRST = Bucket(index=0, last=False, names=("c",), dtypes=("bfloat16",), shapes=((1,),))
ON_DISK = Bucket(index=0, last=True, path="/weights/v8")


def answer(data: Any = None, status: int = 200) -> HttpReply:
    """Return a JSON answer."""
    return HttpReply(status=status, data=data, text="json")


def words(text: str, status: int = 200) -> HttpReply:
    """Return an answer that is not JSON."""
    return HttpReply(status=status, text=text, json=False)


def converse(steps: Steps[T] | Streaming[T], *replies: Reply) -> tuple[list[HttpCall], T]:
    """Answer the dialect's calls in turn; return the calls and its result. Every reply must be asked for."""
    calls: list[HttpCall] = []
    waiting = list(replies)
    try:
        call = next(steps)
        while True:
            assert isinstance(call, HttpCall), f"a whole reply is asked for more: {call}"
            calls.append(call)
            assert waiting, f"one call too many: {call}"
            call = steps.send(waiting.pop(0))
    except StopIteration as stop:
        assert not waiting, f"never asked for: {waiting}"
        result: T = stop.value
        return calls, result


def lines(calls: list[HttpCall]) -> list[str]:
    """Return calls as `METHOD /path`."""
    return [f"{call.method} {call.path}" for call in calls]


OPENED = HttpReply(status=200, events=True)
END = HttpEnd(done=True)


def event(data: Any) -> HttpEvent:
    """Return an event of a stream."""
    return HttpEvent(data=data, text="json")


def listen(steps: Streaming[T], *said: Streamed, news: list[Tokens]) -> T:
    """Open a stream, say its events in turn, and return the result; `news` gets what the dialect hands on.

    A stream that is listened to longer than it speaks has ended.
    """
    call = next(steps)
    assert isinstance(call, HttpCall)
    assert call.stream
    waiting: list[Reply | Streamed] = [OPENED, *said]
    try:
        while True:
            asked = steps.send(waiting.pop(0) if waiting else HttpEnd())
            assert isinstance(asked, More)
            if asked.news is not None:
                news.append(asked.news)
    except StopIteration as stop:
        assert not waiting, f"never asked for: {waiting}"
        result: T = stop.value
        return result
