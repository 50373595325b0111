"""The accounting of a streamed generation: which tokens are new, which come again, and which never came. Pure.

Servers stream in different ways. Each event may hold what is new (vLLM), or everything so far (SGLang, unless it is
started with `--incremental-streaming-output`). Events are left out where the next one comes too soon, and the last one
of an aborted request may repeat the last token, or hold nothing at all. What both servers send with each event is how
many tokens there are by now, and that tells all these apart.
"""

from collections.abc import Callable
from typing import Any

from attrs import define, evolve, field, frozen

from lifecycle import errors
from lifecycle.generation import Segment, Tokens, VersionSpan

from .dialect import HttpEvent, HttpReply, More, NoReply, Streaming, classify
from .generation import out_of_step, refuses, said_of_generation

AFTERWORD_SECONDS = 1.0
"""How long the end of a stream is waited for once the generation has ended: it is only politeness."""
_ENDINGS = {"length", "abort"}


@frozen(kw_only=True)
class Chunk:
    """What one event says of a generation."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """One a token."""
    total: int | None = None
    """Tokens of the whole generation by now, as the server counts them; the last of `ids` is the last of them.
    `None`: all of `ids` are new."""
    finish_reason: str | None = None
    spans: tuple[VersionSpan, ...] | None = None


@define
class Arrivals:
    """What has arrived of one generation."""

    engine: str
    ids: list[int] = field(factory=list, init=False)
    logprobs: list[float] = field(factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)
    _spans: tuple[VersionSpan, ...] | None = field(default=None, init=False)
    _made: int = field(default=0, init=False)
    """Tokens that there are, by the highest number told. Where fewer have come, later ones can't be used."""
    _lost: int = field(default=0, init=False)

    def add(self, chunk: Chunk) -> Tokens | None:
        """Take in a chunk and return what is new in it; `None` where nothing is.

        Raises `EngineUnavailable` for tokens whose log-probabilities did not come with them.
        """
        total = len(self.ids) + len(chunk.ids) if chunk.total is None else chunk.total
        new = total - len(self.ids)
        if chunk.finish_reason is not None:
            self.finish_reason, self._spans, self._lost = chunk.finish_reason, chunk.spans, max(0, -new)
        self._made = max(self._made, total)
        if new <= 0 or new > len(chunk.ids):
            return None
        if len(chunk.ids) != len(chunk.logprobs):
            raise out_of_step(self.engine, len(chunk.ids), len(chunk.logprobs))
        tokens = Tokens(ids=chunk.ids[-new:], logprobs=chunk.logprobs[-new:])
        self.ids.extend(tokens.ids)
        self.logprobs.extend(tokens.logprobs)
        return tokens

    def segment(self) -> Segment:
        """Return what was generated. Where tokens are missing it ends before them, so that they are made again."""
        count, reason = len(self.ids), self.finish_reason
        if self._made > count:
            reason = "abort"
        elif reason not in _ENDINGS:
            reason = "stop"
        spans = self._spans
        if spans is not None:
            spans = tuple(evolve(span, end=min(span.end, count)) for span in spans if span.start < count)
        return Segment(
            output_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            spans=spans,
            engine=self.engine,
            lost=self._lost,
        )


Reader = Callable[[dict[str, Any], Arrivals], Chunk]
"""Reads the object of an event. May raise what `follow` raises, and whatever a strange object makes it raise."""


def follow(read: Reader, *, engine: str, abort_is_silent: bool = False) -> Streaming[Segment]:
    """Take a stream to its end and return what was generated.

    `abort_is_silent`: the server ends the stream of a request that was aborted before its first token without a word.

    Raises `EngineUnavailable` where it ends before the generation has, `GenerationRefused` for an error of the
    caller's before the first token.
    """
    arrivals = Arrivals(engine)
    said = yield More()
    while isinstance(said, HttpEvent):
        news = arrivals.add(_read(said, read, arrivals))
        said = yield More(news=news, limit=None if arrivals.finish_reason is None else AFTERWORD_SECONDS)
    if arrivals.finish_reason is None:
        if isinstance(said, NoReply):
            raise errors.EngineUnavailable(engine, f"the stream broke off: {classify(said).detail}")
        if arrivals.ids or not abort_is_silent:
            raise errors.EngineUnavailable(engine, "the stream ended before the generation did")
        arrivals.add(Chunk(finish_reason="abort"))
    return arrivals.segment()


def hand_on(segment: Segment) -> Streaming[Segment]:
    """Return a segment that came as a whole where a stream was asked for; its tokens are news, too."""
    if segment.output_ids:
        yield More(news=Tokens(ids=segment.output_ids, logprobs=segment.logprobs))
    return segment


def _read(event: HttpEvent, read: Reader, arrivals: Arrivals) -> Chunk:
    body = event.data
    if not isinstance(body, dict):
        raise errors.EngineUnavailable(arrivals.engine, "an event of the stream is not a JSON object")
    if "error" in body or body.get("object") == "error":
        raise _failure(body, arrivals)
    try:
        return read(body, arrivals)
    except errors.LifecycleError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError):
        raise errors.EngineUnavailable(arrivals.engine, "an event of the stream is not a generation") from None


def _failure(body: dict[str, Any], arrivals: Arrivals) -> errors.LifecycleError:
    """Return what an error in the middle of a stream means: behind a status of 200 comes the real one."""
    told = body.get("error", body)
    code = told.get("code") if isinstance(told, dict) else None
    error = "error" if code is None else f"error {code}"
    words = f"{error} in the stream: {said_of_generation(HttpReply(status=200, data=body))}"
    # Once it has made tokens, the request was none to refuse.
    if isinstance(code, int) and refuses(code) and not arrivals.ids:
        return errors.GenerationRefused(f"{arrivals.engine} refused a generation request: {words}")
    return errors.EngineUnavailable(arrivals.engine, words)
