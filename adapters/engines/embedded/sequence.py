"""One request as the scheduler sees it: prompt, limits, tokens made, and the weight versions that made them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["Completion", "Finish", "SamplingParams", "Sequence", "Span"]


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Args:
        max_new_tokens: Most tokens to make; `None` for as many as the context allows.
        temperature: Divides the logits; 0 chooses the most probable token.
        top_p: Keep the most probable tokens until they hold this much probability, in (0, 1].
        top_k: Keep this many most probable tokens; 0 or less for all.
        stop_token_ids: Tokens that end the generation, besides the model's own.
        ignore_eos: Whether the model's own end tokens are ordinary ones.
        seed: Seed of this request's own generator; `None` to draw from the engine's.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None


@attrs.frozen
class Finish:
    """Why a generation ended.

    Args:
        reason: "length", "stop" or "abort".
        matched: The token that stopped it, for "stop".
        message: What the server says about it, for "abort".
    """

    reason: str
    matched: int | None = None
    message: str | None = None


@attrs.frozen
class Span:
    """Output tokens `start` to `end` (exclusive) were made by the weights called `version`."""

    version: str
    start: int
    end: int


@attrs.frozen
class Completion:
    """What a request has come to: an answer's content when `finish` is set, a partial one when it is not."""

    tokens: list[int]
    logprobs: list[float]
    finish: Finish | None
    spans: list[Span]


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """A request in the engine. Only the scheduler's thread changes it; others read through `snapshot`.

    Args:
        request_id: The id that aborts go by.
        prompt: Token ids, at least one.
        params: How to sample.
        limit: Most tokens to make, int ≥ 1.
        stops: Tokens that end it.
        stream: Whether the front end wants to hear of every token.
        notify: Called in the scheduler's thread when there is news; it must not block.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    limit: int
    stops: frozenset[int]
    stream: bool = False
    notify: Callable[[Sequence], None]
    generator: torch.Generator | None = None
    output: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    finish: Finish | None = None
    retractions: int = 0
    cached_tokens: int = 0
    abort_requested: bool = False
    created: float = attrs.field(factory=time.monotonic)
    _marks: list[tuple[str, int]] = attrs.field(factory=list)

    def mark(self, version: str) -> None:
        """Record that tokens made from now on come from `version`."""
        start = len(self.output)
        if self._marks and self._marks[-1][1] == start:
            self._marks[-1] = (version, start)
        elif not self._marks or self._marks[-1][0] != version:
            self._marks.append((version, start))

    def append(self, token: int, logprob: float) -> None:
        """Take one more token, and finish if it is the last."""
        # The log-probability goes in last: a reader in another thread trusts its count.
        self.output.append(token)
        self.logprobs.append(logprob)
        if token in self.stops:
            self.finish = Finish("stop", matched=token)
        elif len(self.output) >= self.limit:
            self.finish = Finish("length")
        elif self.abort_requested:
            self.finish = Finish("abort", message="Aborted")

    def snapshot(self, finish: Finish | None = None) -> Completion:
        """Copy what there is, from any thread; `finish` overrides the sequence's own."""
        # The order matters: the scheduler sets `finish` after the last token.
        finish = finish or self.finish
        count = len(self.logprobs)
        marks = [mark for mark in tuple(self._marks) if mark[1] < count]
        ends = [*(start for _, start in marks[1:]), count] if marks else []  # none: aborted before its first token
        spans = [Span(version, start, end) for (version, start), end in zip(marks, ends, strict=True)]
        return Completion(self.output[:count], self.logprobs[:count], finish, spans)
