"""One generation request inside a scripted engine."""

from collections.abc import Callable

import anyio
from attrs import define, evolve, field

from lifecycle.errors import EngineUnavailable, GenerationRefused
from lifecycle.generation import GenerationRequest, Segment, Tokens, VersionSpan

from .steps import BreakOff, Contradict, Crash, LoseReply, LoseTokens, Refuse, RepeatChunk, Step

STEPS = (BreakOff, Contradict, Crash, LoseReply, LoseTokens, Refuse, RepeatChunk)
"""What a generation request can meet."""


@define(eq=False)
class Generating:
    """Tokens that count upwards from the length of the prompt, each with the label of the weights that made it."""

    request: GenerationRequest
    arrived: Callable[[Tokens], None] | None = None
    """Where its tokens are streamed to, if anywhere."""
    step: Step | None = None
    tokens: list[int] = field(factory=list)
    labels: list[str] = field(factory=list)
    reason: str | None = None
    changed: anyio.Event = field(factory=anyio.Event)

    def refuse(self, engine: str) -> None:
        """Raise where the script says so before a token is made."""
        if isinstance(self.step, Refuse):
            raise GenerationRefused(self.step.detail)
        if self.step == LoseReply(applied=False):
            raise EngineUnavailable(engine, "the reply was lost")

    def make(self, count: int, label: str) -> None:
        """Make `count` tokens, or as many as are wanted, and stream them."""
        wanted = self.request.max_new_tokens
        limit = min(wanted, self.step.after) if isinstance(self.step, BreakOff) else wanted
        first = len(self.request.input_ids) + len(self.tokens) + 1
        made = tuple(range(first, first + min(count, limit - len(self.tokens))))
        self._stream(made)
        self.tokens.extend(made)
        self.labels.extend(label for _ in made)
        if len(self.tokens) >= limit:
            self.finish("broken off" if isinstance(self.step, BreakOff) else "length")

    def finish(self, reason: str) -> None:
        """End it, unless it has ended."""
        self.reason = self.reason or reason
        self.changed.set()

    def answer(self, engine: str, *, reports_versions: bool) -> Segment:
        """Return what the engine answers. Raises `EngineUnavailable` where no answer comes."""
        if self.reason in {"crash", "broken off"}:
            raise EngineUnavailable(engine, "connection reset")
        if isinstance(self.step, LoseReply):
            raise EngineUnavailable(engine, "the reply was lost")
        segment = Segment(
            output_ids=tuple(self.tokens),
            logprobs=tuple(-1.0 for _ in self.tokens),
            finish_reason=self.reason or "length",
            spans=self._spans() if reports_versions else None,
        )
        match self.step:
            case LoseTokens(kept):
                return evolve(segment, output_ids=segment.output_ids[:kept], logprobs=segment.logprobs[:kept])
            case Contradict():
                return evolve(segment, output_ids=(0, *segment.output_ids[1:]), logprobs=segment.logprobs or (-1.0,))
            case _:
                return segment

    def _stream(self, made: tuple[int, ...]) -> None:
        if self.arrived is None or not made:
            return
        repeated = isinstance(self.step, RepeatChunk) and not self.tokens
        for _ in range(1 + repeated):
            self.arrived(Tokens(ids=made, logprobs=tuple(-1.0 for _ in made)))

    def _spans(self) -> tuple[VersionSpan, ...]:
        labels = self.labels
        starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
        ends = [*starts[1:], len(labels)]
        return tuple(
            VersionSpan(label=labels[start], start=start, end=end) for start, end in zip(starts, ends, strict=True)
        )
