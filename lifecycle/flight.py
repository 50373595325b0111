"""One generation request on its way: what arrived so far, and what is kept of it in the end. Synchronous."""

from collections.abc import Callable

import anyio
from attrs import define, evolve, field

from .errors import EngineUnavailable
from .fleet import version_of
from .generation import GenerationRequest, Segment, Tokens, VersionSpan


@define(eq=False)
class Flight:
    """One request in flight."""

    engine: str
    request: GenerationRequest
    pinned: int | None
    """The published version when it was sent."""
    on_tokens: Callable[[Tokens], None] | None = None
    """The user's: gets every token once."""
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    over: bool = False
    """Nothing that arrives from now on counts."""
    failure: Exception | None = None
    """What `on_tokens` raised while tokens arrived: it ends the generation."""
    fault: EngineUnavailable | None = None
    """Why the engine did not answer, or not in a way that makes sense."""
    _ids: list[int] = field(factory=list, init=False)
    _logprobs: list[float] = field(factory=list, init=False)
    _told: int = field(default=0, init=False)

    def arrive(self, tokens: Tokens) -> None:
        """Take in a chunk of the stream. Given to the engine's port: it never raises, and late calls change nothing."""
        if self.over:
            return
        if len(tokens.ids) != len(tokens.logprobs):
            self.fault = EngineUnavailable(self.engine, _unequal(tokens.ids, tokens.logprobs))
            self._stop()
            return
        self._ids.extend(tokens.ids)
        self._logprobs.extend(tokens.logprobs)
        try:
            self._tell(tokens.ids, tokens.logprobs)
        except Exception as error:  # noqa: BLE001 - the user's; a port might take it for its own trouble
            self.failure = error
            self._stop()

    def settle(self, answer: Segment | None, run: str, published: int | None) -> Segment:
        """Return what is kept, with a version for each token. `answer`: `None` where none came.

        An answer that makes no sense is a `fault`, and one that contradicts the stream leaves no token at all.
        """
        self.over = True
        if answer is not None and self.fault is None:
            self.fault = self._fault_of(answer)
        segment = self._kept() if answer is None or self.fault is not None else self._completed(answer)
        return self._labelled(segment, run, published)

    def tell_rest(self, segment: Segment) -> None:
        """Give the user the tokens of the segment that did not arrive before it."""
        self._tell(segment.output_ids[self._told :], segment.logprobs[self._told :])

    @property
    def retracted(self) -> bool:
        """Whether the user was given tokens that the engine then took back."""
        return self._told > len(self._ids)

    def _stop(self) -> None:
        self.over = True
        self.scope.cancel()

    def _tell(self, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        room = self.request.max_new_tokens - self._told
        if self.on_tokens is None or not ids or room <= 0:
            return
        tokens = Tokens(ids=ids[:room], logprobs=logprobs[:room])
        self._told += len(tokens.ids)
        self.on_tokens(tokens)

    def _kept(self) -> Segment:
        # Where the last token is one to stop at, the engine had come to the end: only the word for it got lost.
        stopped = bool(self._ids) and self._ids[-1] in self.request.stop_token_ids
        return Segment(
            output_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            finish_reason="stop" if stopped else "abort",
        )

    def _fault_of(self, answer: Segment) -> EngineUnavailable | None:
        if len(answer.output_ids) != len(answer.logprobs):
            return EngineUnavailable(self.engine, _unequal(answer.output_ids, answer.logprobs))
        both = min(len(answer.output_ids), len(self._ids))
        # More than was asked for, which the answer knows nothing of, is a stream that repeats itself.
        beyond = len(self._ids) > max(len(answer.output_ids), self.request.max_new_tokens)
        if answer.output_ids[:both] == tuple(self._ids[:both]) and not beyond:
            return None
        self._ids.clear()
        self._logprobs.clear()
        return EngineUnavailable(self.engine, "its answer contradicts the tokens that it had sent before")

    def _completed(self, answer: Segment) -> Segment:
        """Return the answer, and after it what it left out: servers answer an aborted request without its tokens."""
        lost = len(self._ids) - len(answer.output_ids)
        if lost <= 0:
            return answer
        return evolve(answer, output_ids=tuple(self._ids), logprobs=tuple(self._logprobs), lost=lost)

    def _labelled(self, segment: Segment, run: str, published: int | None) -> Segment:
        """Give every token its version: what the engine reports, or what was published when the request was sent."""
        versions: list[int | None] = [self.pinned] * len(segment.output_ids)
        reported = set[int]()
        for span in segment.spans or ():
            places = _places(span, len(versions))
            reported.update(places)
            for place in places:
                versions[place] = version_of(run, span.label)
        exact = len(reported) == len(versions) or self.pinned == published
        return evolve(segment, engine=self.engine, versions=tuple(versions), exact=exact)


def _places(span: VersionSpan, count: int) -> range:
    return range(max(0, span.start), min(span.end, count))


def _unequal(ids: tuple[int, ...], logprobs: tuple[float, ...]) -> str:
    return f"{len(ids)} tokens came with {len(logprobs)} log-probabilities"
