"""Whatever happens to a generation on its way: the tokens it returns are those that were made, each once."""

from collections.abc import Callable, Iterator

import pytest
from anyio.lowlevel import checkpoint
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Generation, GenerationRequest, PauseMode, Segment
from lifecycle.errors import EngineUnavailable
from lifecycle.generation import Tokens, VersionSpan
from lifecycle.ports import Capabilities
from lifecycle.testing import ScriptedEngine
from tests.strategies import QUICK

from .test_segment_failures import hurried
from .workbench import workbench

CAPABILITIES = {
    reports: Capabilities(pause_modes=frozenset(PauseMode), streams=True, reports_versions=reports)
    for reports in (False, True)
}
Token = tuple[int, float, int | None, int]
"""Id, log-probability, the version of the label that made it, and the version published when it was asked for."""


@frozen(kw_only=True)
class Hop:
    """What happens to one request."""

    tokens: int
    chunk: int
    """Tokens made, and streamed, at a time."""
    end: str
    """`abort`, `stop`, `died`, `interrupted`, `empty` (an abort without the tokens) or `other` (contradicts them)."""
    publish_after: int | None
    """A publication after so many tokens."""
    foreign: bool
    """The engine is labelled by somebody else."""
    greedy: bool = False
    """It makes more tokens than it was asked for, where it has that many."""


hops = st.builds(
    Hop,
    tokens=st.integers(0, 6),
    chunk=st.integers(1, 3),
    end=st.sampled_from(["abort", "abort", "died", "interrupted", "empty", "other", "stop"]),
    publish_after=st.none() | st.integers(0, 6),
    foreign=st.booleans(),
    greedy=st.booleans(),
)


@frozen(kw_only=True)
class Plan:
    """A request, and what happens to it hop by hop; after those its engine just finishes it."""

    prompt: int
    new: int
    context: int | None
    stream: bool
    reports: bool
    partial: bool
    hops: list[Hop] = field(factory=list)


plans = st.builds(
    Plan,
    prompt=st.integers(1, 3),
    new=st.integers(1, 12),
    context=st.none() | st.integers(1, 12),
    stream=st.booleans(),
    reports=st.booleans(),
    partial=st.booleans(),
    hops=st.lists(hops, max_size=6),
)


class Planned(ScriptedEngine):
    """An engine that carries out a plan, and knows which tokens of it a generation must have."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("left", capabilities=CAPABILITIES[plan.reports])
        self.plan = plan
        self.left = iter(plan.hops)
        self.ids: Iterator[int] = iter(range(1000, 9999))
        self.kept: list[Token] = []
        self.discarded = 0
        self.asked: list[tuple[int, int]] = []
        self.late: list[Callable[[Tokens], None]] = []
        self.published = 0
        self.publish: Callable[[], None] = lambda: None
        self.interrupt: Callable[[], None] = lambda: None

    async def generate(
        self, request: GenerationRequest, *, timeout: float, arrived: Callable[[Tokens], None] | None = None
    ) -> Segment:
        """Carry out the next hop.

        Cancellation: the hop was an interrupted one.
        """
        for late in self.late:
            late(Tokens(ids=(1,), logprobs=(0.0,)))
        self.asked.append((len(request.input_ids), request.max_new_tokens))
        if not self.plan.partial:
            self.discarded += len(self.kept)
            self.kept.clear()
        hop = next(self.left, Hop(tokens=99, chunk=99, end="stop", publish_after=None, foreign=False))
        made = await self._hop(hop, request.max_new_tokens, arrived)
        self._expect(hop, made[: request.max_new_tokens], streamed=arrived is not None)
        if arrived is not None:
            self.late.append(arrived)
        return await self._reply(hop, made)

    async def _hop(self, hop: Hop, wanted: int, arrived: Callable[[Tokens], None] | None) -> list[Token]:
        pinned, made = self.published, list[Token]()
        count = hop.tokens if hop.greedy and hop.end not in {"empty", "other"} else min(hop.tokens, wanted)
        while True:
            if hop.publish_after is not None and len(made) >= hop.publish_after and self.published == pinned:
                self.publish()
            if len(made) == count:
                return made
            own = None if hop.foreign else self.published
            chunk = [(next(self.ids), own) for _ in range(min(hop.chunk, count - len(made)))]
            made += [(token, -float(token), own, pinned) for token, own in chunk]
            if arrived is not None:
                ids = tuple(token for token, _ in chunk)
                arrived(Tokens(ids=ids, logprobs=tuple(-float(token) for token in ids)))
            await checkpoint()

    def _expect(self, hop: Hop, made: list[Token], *, streamed: bool) -> None:
        """Say what is to be kept: all that came back, or arrived, and is not in doubt."""
        answered = hop.end in {"abort", "stop"}
        contradicted = hop.end == "other" and bool(made) and streamed
        if (answered or streamed) and not contradicted:
            self.kept += [
                (i, p, own if self.plan.reports and answered else pinned, pinned) for i, p, own, pinned in made
            ]

    async def _reply(self, hop: Hop, made: list[Token]) -> Segment:
        if hop.end == "died" or (hop.end == "other" and not (made and self.late)):
            raise EngineUnavailable(self.name, "connection reset")
        if hop.end == "interrupted":
            self.interrupt()
            await checkpoint()
        told = [] if hop.end == "empty" else made
        labels = ["default" if own is None else f"run:{own}" for *_, own, _ in told]
        spans = tuple(VersionSpan(label=label, start=n, end=n + 1) for n, label in enumerate(labels))
        return Segment(
            output_ids=tuple(t[0] + (hop.end == "other") for t in told),
            logprobs=tuple(t[1] for t in told),
            finish_reason="stop" if hop.end == "stop" else "abort",
            spans=spans if self.plan.reports else None,
        )


async def _carry_out(plan: Plan, engine: Planned) -> Generation:
    bench = workbench(engine)

    def publish() -> None:
        engine.published += 1
        bench.cohort.version = engine.published

    engine.publish, engine.interrupt = publish, bench.segments.interrupt
    request = GenerationRequest(
        input_ids=range(1, plan.prompt + 1),
        max_new_tokens=plan.new,
        max_tokens=plan.context,
        stream=plan.stream,
        partial_rollout=plan.partial,
        retry_budget=20,
    )
    generation = await hurried(bench, request)
    assert bench.segments.in_flight == 0
    return generation


@QUICK
@given(plans)
@pytest.mark.anyio
async def test_every_token_is_returned_once_with_its_version_and_log_probability(plan: Plan) -> None:
    """Over any number of hops: what the engines made and what came of it, no more than was asked for, in step."""
    engine = Planned(plan)
    generation = await _carry_out(plan, engine)
    budget = min(plan.new, max(0, (plan.context or 99) - plan.prompt))
    assert generation.output_ids == tuple(token for token, *_ in engine.kept)
    assert generation.logprobs == tuple(logprob for _, logprob, _, _ in engine.kept)
    assert generation.versions == tuple(version for _, _, version, _ in engine.kept)
    assert len(generation.output_ids) <= budget
    assert generation.discarded == engine.discarded
    made = [segment.output_ids for segment in generation.segments]
    assert tuple(token for ids in made for token in ids) == generation.output_ids
    assert all(prompt + new == plan.prompt + budget and new > 0 for prompt, new in engine.asked)
    if not plan.partial:
        assert len(generation.segments) <= 1


@pytest.mark.anyio
async def test_a_context_limit_holds_over_hops() -> None:
    """Prompt 3, budget 10, context 8, hops of 2, 0 and 3 tokens: (prompt, budget) is (3, 5), (5, 3), (5, 3)."""
    hop = [Hop(tokens=n, chunk=9, end="abort", publish_after=None, foreign=False) for n in (2, 0, 3)]
    plan = Plan(prompt=3, new=10, context=8, stream=False, reports=False, partial=True, hops=hop)
    engine = Planned(plan)
    generation = await _carry_out(plan, engine)
    assert engine.asked == [(3, 5), (5, 3), (5, 3)]
    assert (len(generation.output_ids), generation.finish_reason) == (5, "length")


@pytest.mark.anyio
async def test_a_prompt_that_fills_its_context_is_sent_nowhere() -> None:
    """With nothing left to generate it ends with `length`, and no engine is asked."""
    plan = Plan(prompt=3, new=10, context=3, stream=False, reports=False, partial=True)
    engine = Planned(plan)
    generation = await _carry_out(plan, engine)
    assert (engine.asked, generation.output_ids, generation.finish_reason) == ([], (), "length")
