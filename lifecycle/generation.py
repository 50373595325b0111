"""Generation requests and what comes back."""

import copy
import json
import operator
import re
from collections.abc import Iterator
from typing import Any

import attrs
from attrs import field, frozen


def _token_ids(_: object, attribute: Any, value: tuple[int, ...]) -> None:
    if not value:
        raise ValueError(f"{attribute.name} must hold at least one token")


def _tuple(values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes):
        raise TypeError(f"a list is wanted, not a single {type(values).__name__}: it would be taken apart")
    return tuple(values)


def _ints(values: Any) -> tuple[int, ...]:
    """Return plain ints, also of a tensor or an array: what goes on the wire is JSON."""
    return tuple(map(operator.index, _tuple(values)))


def _own(values: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(values)


@frozen(kw_only=True)
class GenerationRequest:
    """What to generate. Frozen: vary it with `attrs.evolve`; a retry never shares a list with the original."""

    input_ids: tuple[int, ...] = field(converter=_ints, validator=_token_ids)
    max_new_tokens: int = field(validator=attrs.validators.ge(1))
    max_tokens: int | None = field(default=None, validator=attrs.validators.optional(attrs.validators.ge(1)))
    """Context limit: prompt and generated tokens together. `None`: the engine's own."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: every token."""
    stop: tuple[str, ...] = field(default=(), converter=_tuple)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ints)
    ignore_eos: bool = False
    request_id: str | None = None
    """Names the request at the engine; what goes on after an interruption gets a number appended. `None`: unnamed."""
    session: str | None = None
    """Requests of one session go to one engine while it serves."""
    stream: bool = False
    """Have the engine send tokens as it makes them, so that those it sent before it died are kept. Costs CPU time. An
    engine that cannot (`Capabilities.streams`) answers as a whole."""
    partial_rollout: bool = True
    """After an interruption go on from the tokens made so far. `False`: discard them, and begin again."""
    retry_budget: int = field(default=8, validator=attrs.validators.ge(1))
    """Attempts in a row that keep no token, and that no pause explains, after which `GenerationInterrupted` is raised,
    int ≥ 1."""
    images: tuple[str, ...] = field(default=(), converter=_tuple)
    extra: dict[str, Any] = field(factory=dict, converter=_own)
    """Passed through to the server's sampling parameters."""


@frozen(kw_only=True)
class Tokens:
    """Tokens on their way: what one chunk of a stream brought."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One a token."""


@frozen(kw_only=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of a segment were made by the weights labelled `label`."""

    label: str
    start: int
    end: int


@frozen(kw_only=True)
class Segment:
    """The tokens that one HTTP request generated."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probabilities under the sampling engine's weights, one a token."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    spans: tuple[VersionSpan, ...] | None = None
    """As the engine reports them; `None` where it does not."""
    engine: str = ""
    versions: tuple[int | None, ...] = ()
    """One a token: from the spans, or the version pinned when the request was sent."""
    exact: bool = True
    """`False`: a publication happened within the request and the engine does not report which token it fell on; then
    `versions` holds the oldest version that can have made each token."""
    lost: int = 0
    """Tokens at its end that the engine's answer left out, though its stream had shown them. They are kept here."""


@frozen(kw_only=True)
class Generation:
    """A whole generation, over however many interruptions."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int | None, ...]
    """One a token."""
    segments: tuple[Segment, ...]
    finish_reason: str
    """`stop` or `length`; `abort` only after `Lifecycle.abort_generation()`."""
    discarded: int = 0
    """Tokens that interruptions cost: with `partial_rollout=False` each begins again without those made so far."""

    @property
    def interruptions(self) -> int:
        """How often it was interrupted and went on from the tokens made so far."""
        return max(0, len(self.segments) - 1)


class GenerationInProgress:
    """The pure half of a generation: what was generated so far, and what to ask for next."""

    def __init__(self, request: GenerationRequest) -> None:
        # A copy where there is something to share: the caller may change its `extra` while we are at it.
        self._request = attrs.evolve(request) if request.extra else request
        self._segments: list[Segment] = []
        self._tokens: list[int] = []
        self._asked = 0
        self._discarded = 0
        self.fruitless = 0
        """Segments in a row that brought no token to keep, and that nothing explains."""
        budget = request.max_new_tokens
        if request.max_tokens is not None:
            budget = min(budget, request.max_tokens - len(request.input_ids))
        self._budget = max(0, budget)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated, by budget and by context."""
        return self._budget - len(self._tokens)

    def next_request(self) -> GenerationRequest:
        """Return the request that goes on after the tokens so far: prompt + tokens, with the remaining budget.

        Where partial rollouts are not wanted it begins again, and the tokens so far are discarded. Not before: an abort
        by the user may still come, and returns them.
        """
        if not self._request.partial_rollout:
            self._discarded += len(self._tokens)
            self._tokens.clear()
            self._segments.clear()
        request_id = self._request.request_id
        if request_id is not None and self._asked:
            # A server may still hold the one before under its id, and would refuse a second.
            request_id = f"{request_id}-{self._asked}"
        self._asked += 1
        return attrs.evolve(
            self._request,
            input_ids=(*self._request.input_ids, *self._tokens),
            max_new_tokens=self.remaining,
            request_id=request_id,
        )

    def add(self, segment: Segment, *, explained: bool = False) -> bool:
        """Take in a segment, but never more than the budget. Returns whether the generation has come to its end.

        `explained`: by a pause, so that an abort tells nothing about the engine.
        """
        if len(segment.output_ids) > self.remaining:
            segment = _cut(segment, self.remaining)
        if segment.output_ids or segment.finish_reason != "abort":
            self._segments.append(segment)
        self._tokens.extend(segment.output_ids)
        fruitful = bool(segment.output_ids) and self._request.partial_rollout
        self.fruitless = 0 if fruitful or explained else self.fruitless + 1
        return segment.finish_reason != "abort" or self.remaining <= 0

    def result(self, finish_reason: str | None = None) -> Generation:
        """Return the whole. An abort exactly at the budget is `length`: nothing was left to generate."""
        reason = finish_reason or (self._segments[-1].finish_reason if self._segments else "length")
        return Generation(
            output_ids=tuple(self._tokens),
            logprobs=tuple(logprob for s in self._segments for logprob in s.logprobs),
            versions=tuple(version for s in self._segments for version in s.versions),
            segments=tuple(self._segments),
            finish_reason="length" if reason == "abort" and self.remaining <= 0 else reason,
            discarded=self._discarded,
        )


def _cut(segment: Segment, count: int) -> Segment:
    """Drop tokens that an engine made beyond what it was asked for."""
    return attrs.evolve(
        segment,
        output_ids=segment.output_ids[:count],
        logprobs=segment.logprobs[:count],
        versions=segment.versions[:count],
        spans=None if segment.spans is None else tuple(_clip(s, count) for s in segment.spans if s.start < count),
        finish_reason="length",
        lost=max(0, segment.lost - (len(segment.output_ids) - count)),
    )


def _clip(span: VersionSpan, count: int) -> VersionSpan:
    return attrs.evolve(span, end=min(span.end, count))


_MARK = r"""(?:[\s,;|'"\[\]()]|\\[nrt"'])"""
_NUMBERS = re.compile(
    rf"""[\[(]?-?\b\d+(?:{_MARK}+-?\d+){{2,}}(?:,?[\])])?|\[{_MARK}*\d+(?:{_MARK}+\d+)?{_MARK}*\]"""
    r"""|\(\s*\d+\s*,\s*(?:\d+[\s,]*)?\)"""
)
"""Three integers and more in a row, however they are separated; one or two where they are written as a list."""
_FIELDS = re.compile(
    r"""\b(\w*(?:prompt|text|input|content)\w*\\?["']?\s*[:=]\s*\[?\s*)"""
    r"""(?:\\?"(?:\\.|[^"\\])*(?:"|$)|'(?:\\.|[^'\\])*(?:'|$))""",
    re.IGNORECASE | re.DOTALL,
)
"""A field of a quoted request, such as `"text": "..."`."""
_QUOTES = re.compile(
    r"""(?<!\w)(?<!"message":)(?<!"message": )(?<!"detail":)(?<!"detail": )(["'])"""
    r"""(?:\\.|(?!\1)[^\\]){33,}(?:\1(?!\w)|$)""",
    re.DOTALL,
)
"""A long quotation; the message of a JSON error is none."""
_BLOBS = re.compile(r"[A-Za-z0-9+/=_-]{65,}")
"""Something encoded, such as an image."""
_LONGEST = 2000
_TELLING = 4
"""Shorter strings give nothing away, and to cut them out would tear other words apart."""


def without_prompt(text: str, request: GenerationRequest) -> str:
    """Return what a server or a port said about `request`, at most 500 characters, without what the request holds.

    Servers echo the request, or a part of it, in their refusals: token ids in any notation, its text, its stop strings,
    its images. Quotations of more than 32 characters go too, since the prompt's text is not known here.
    """
    text = text[:_LONGEST]
    for secret in sorted(_strings((request.stop, request.images, request.extra)), key=len, reverse=True):
        for written in {said := secret[:_LONGEST], json.dumps(said)[1:-1], repr(said)[1:-1]}:
            text = text.replace(written, "[...]")
            # Whoever cut the text to size may have cut through it.
            longest = next(
                (n for n in range(min(len(written), len(text)), _TELLING, -1) if text.endswith(written[:n])), 0
            )
            text = f"{text[:-longest]}[...]" if longest else text
    for pattern, instead in ((_FIELDS, r"\1[...]"), (_NUMBERS, "[...]"), (_QUOTES, "[...]"), (_BLOBS, "[...]")):
        text = pattern.sub(instead, text)
    return text[:500]


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in a value of JSON's kinds that are long enough to tell something."""
    if isinstance(value, str):
        if len(value) >= _TELLING:
            yield value
    elif isinstance(value, dict):
        for key in value:
            yield from _strings(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
