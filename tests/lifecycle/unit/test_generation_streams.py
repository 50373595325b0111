"""Tokens that come as they are made: what is kept of a stream when the answer to it is lost, late, or another."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Generation, GenerationRequest, PauseMode, Segment
from lifecycle import events as e
from lifecycle.generation import Tokens, VersionSpan
from lifecycle.ports import Capabilities
from lifecycle.testing import (
    BreakOff,
    Contradict,
    Crash,
    LoseReply,
    LoseTokens,
    RepeatChunk,
    ScriptedEngine,
    Silence,
    Step,
)

from .crowd import until
from .test_segment_failures import hurried
from .workbench import Workbench, a_ticket, workbench

pytestmark = pytest.mark.anyio

STREAMING = Capabilities(pause_modes=frozenset(PauseMode), streams=True)
TELLING = Capabilities(pause_modes=frozenset(PauseMode), streams=True, reports_versions=True)


def asked(new: int = 6, **fields: Any) -> GenerationRequest:
    """Return a request for a stream of `new` tokens, which scripted engines count from 3."""
    return GenerationRequest(**{"input_ids": (1, 2), "max_new_tokens": new, "stream": True, **fields})


def streaming(*names: str, **fields: Any) -> Workbench:
    """Put together engines that stream, and make a token only when the test says so."""
    return workbench(*(ScriptedEngine(name, **{"manual": True, "capabilities": STREAMING, **fields}) for name in names))


class Saying(ScriptedEngine):
    """An engine that streams and answers what it was told to; it never answers where that is nothing."""

    def __init__(self, chunks: list[Tokens], answer: Segment | None) -> None:
        super().__init__("left", capabilities=STREAMING)
        self.chunks = chunks
        self.answer = answer
        self.asked: list[GenerationRequest] = []
        self.arrived: Callable[[Tokens], None] | None = None

    async def generate(
        self, request: GenerationRequest, *, timeout: float, arrived: Callable[[Tokens], None] | None = None
    ) -> Segment:
        """Say it once; behave from then on.

        Cancellation: nothing to leave behind.
        """
        self.asked.append(request)
        if len(self.asked) > 1:
            return await super().generate(request, timeout=timeout, arrived=arrived)
        self.arrived = arrived
        assert arrived is not None
        for chunk in self.chunks:
            arrived(chunk)
            await checkpoint()
        if self.answer is None:
            await anyio.Event().wait()
        assert self.answer is not None
        return self.answer


def chunk(*ids: int, logprobs: int | None = None) -> Tokens:
    """Return a chunk of these tokens, each with a log-probability of its own."""
    count = len(ids) if logprobs is None else logprobs
    return Tokens(ids=ids, logprobs=tuple(-float(token) for token in (*ids, *range(100, 200))[:count]))


def answer(*ids: int, reason: str = "length", **fields: Any) -> Segment:
    """Return an answer of these tokens, each with a log-probability of its own."""
    return Segment(
        output_ids=ids, logprobs=tuple(-float(token) for token in ids), finish_reason=reason, engine="left", **fields
    )


@pytest.mark.parametrize(
    ("stream", "capabilities", "streamed"), [(True, STREAMING, True), (False, STREAMING, False), (True, None, False)]
)
async def test_tokens_are_streamed_only_where_both_sides_want_it(
    stream: bool, capabilities: Capabilities | None, streamed: bool
) -> None:
    """A stream costs time: it is asked for by the request, and only of engines that can; others need not know of it."""
    given: list[dict[str, Any]] = []

    class Noting(ScriptedEngine):
        async def generate(self, request: GenerationRequest, **options: Any) -> Segment:
            """Note what is given beside the request.

            Cancellation: as in any scripted engine.
            """
            given.append(options)
            return await super().generate(request, **options)

    bench = workbench(Noting("left", capabilities=capabilities))
    generation = await bench.segments.generate(asked(stream=stream), a_ticket())
    assert (generation.output_ids, [set(options) - {"timeout"} for options in given]) == (
        (3, 4, 5, 6, 7, 8),
        [{"arrived"} if streamed else set()],
    )


@pytest.mark.parametrize(
    ("step", "kept"),
    [(BreakOff(2), 2), (LoseReply(applied=False), 0), (Crash(), 0)],
    ids=["cut after two tokens", "lost before the first", "dead on arrival"],
)
async def test_what_arrived_before_the_connection_broke_is_kept(step: Step, kept: int) -> None:
    """The other engine goes on from there: it is asked once, and for the rest."""
    bench = streaming("left", "right", manual=False)
    bench.engines["left"].on(GenerationRequest, step)
    generation = await hurried(bench, asked(session="chat"))
    assert generation.output_ids == (3, 4, 5, 6, 7, 8)
    made = [("left", kept, "abort")] if kept else []
    assert [(s.engine, len(s.output_ids), s.finish_reason) for s in generation.segments] == [
        *made,
        ("right", 6 - kept, "length"),
    ]
    assert [(f.engine, f.tokens, f.finish_reason) for f in bench.told(e.SegmentReceived)] == [
        ("left", kept, "error"),
        ("right", 6 - kept, "length"),
    ]


async def test_a_reply_that_is_lost_after_the_last_token_costs_nothing() -> None:
    """Everything had arrived, so that nothing is asked for again."""
    bench = streaming("left", "right", manual=False)
    bench.engines["left"].on(GenerationRequest, LoseReply())
    generation = await hurried(bench, asked())
    assert (generation.output_ids, generation.finish_reason) == ((3, 4, 5, 6, 7, 8), "length")
    assert [f.engine for f in bench.told(e.GenerationSent)] == ["left"]


async def test_a_stream_that_broke_off_behind_a_stop_token_has_stopped() -> None:
    """An engine never goes on behind a stop token, and neither does who takes over from it."""
    bench = streaming("left", "right", manual=False)
    bench.engines["left"].on(GenerationRequest, BreakOff(2))
    generation = await hurried(bench, asked(stop_token_ids=(4,)))
    assert (generation.output_ids, generation.finish_reason) == ((3, 4), "stop")


async def test_what_arrived_before_a_pause_gave_the_request_up_is_kept() -> None:
    """An engine that never completes what it was told to abort costs no token that it had sent."""
    bench = streaming("left")
    engine = bench.engines["left"]
    results: list[Generation] = []

    async def ask() -> None:
        results.append(await bench.segments.generate(asked(), a_ticket()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: engine.in_flight == 1)
        engine.produce(2)
        bench.cohort.generation_held = True
        bench.segments.interrupt()
        await until(lambda: bench.segments.in_flight == 0)
        bench.cohort.generation_held, bench.cohort.version = False, 1
        bench.segments.changed.give()
        await until(lambda: engine.in_flight == 1)
        engine.produce(6)
    [generation] = results
    assert (generation.output_ids, generation.versions) == ((3, 4, 5, 6, 7, 8), (0, 0, 1, 1, 1, 1))
    assert [(s.finish_reason, s.exact) for s in generation.segments] == [("abort", True), ("length", True)]


@pytest.mark.parametrize("capabilities", [STREAMING, TELLING], ids=["silent", "reports versions"])
async def test_a_stream_over_a_publication_whose_answer_is_lost_is_not_exact(capabilities: Capabilities) -> None:
    """Which token the publication fell on was to come with the answer: the oldest version that can have made each."""
    bench = streaming("left", "right", capabilities=capabilities)
    results: list[Generation] = []

    async def ask() -> None:
        results.append(await bench.segments.generate(asked(), a_ticket()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: bench.engines["left"].in_flight == 1)
        bench.engines["left"].produce(2)
        bench.cohort.version = 1
        bench.engines["left"].produce(1)
        bench.engines["left"].crash()
        await until(lambda: bench.engines["right"].in_flight == 1)
        bench.engines["right"].label = "run:1"
        bench.engines["right"].produce(6)
    [generation] = results
    assert generation.versions == (0, 0, 0, 1, 1, 1)
    assert [segment.exact for segment in generation.segments] == [False, True]


@pytest.mark.parametrize("kept", [0, 1])
async def test_tokens_that_an_answer_leaves_out_are_kept_and_told(kept: int) -> None:
    """An aborted request that had been retracted is answered without its tokens: the stream has them."""
    bench = streaming("left", capabilities=TELLING, label="run:0")
    engine = bench.engines["left"].on(GenerationRequest, LoseTokens(kept))
    results: list[Generation] = []

    async def ask() -> None:
        results.append(await bench.segments.generate(asked(), a_ticket()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: engine.in_flight == 1)
        engine.produce(3)
        engine._abort()
        await until(
            lambda: engine.in_flight == 1 and not engine._generating & {g for g in engine._generating if g.reason}
        )
        engine.produce(3)
    [generation] = results
    assert (generation.output_ids, generation.logprobs) == ((3, 4, 5, 6, 7, 8), (-1.0,) * 6)
    assert [(len(s.output_ids), s.lost, s.exact) for s in generation.segments] == [(3, 3 - kept, True), (3, 0, True)]


async def test_log_probabilities_stay_with_their_tokens() -> None:
    """Those of tokens that an answer left out are the stream's, those of tokens behind the stream the answer's."""
    short = Saying([chunk(3), chunk(4, 5)], answer(3, reason="abort"))
    generation = await hurried(workbench(short), asked(3))
    assert (generation.output_ids, generation.logprobs) == ((3, 4, 5), (-3.0, -4.0, -5.0))
    long = Saying([chunk(3)], answer(3, 4, 5))
    generation = await hurried(workbench(long), asked(3))
    assert (generation.output_ids, generation.logprobs) == ((3, 4, 5), (-3.0, -4.0, -5.0))


@pytest.mark.parametrize("step", [Contradict(), RepeatChunk()])
async def test_an_answer_that_contradicts_the_stream_leaves_no_token(step: Step) -> None:
    """Nobody knows which of them was made: the request is made again, at another engine first."""
    bench = streaming("left", "right", manual=False)
    bench.engines["left"].on(GenerationRequest, step)
    generation = await hurried(bench, asked())
    assert (generation.output_ids, [s.engine for s in generation.segments]) == ((3, 4, 5, 6, 7, 8), ["right"])
    assert [(f.tokens, f.finish_reason) for f in bench.told(e.SegmentReceived)] == [(0, "error"), (6, "length")]


async def test_an_answer_without_its_log_probabilities_is_none() -> None:
    """What had arrived of its tokens in order is kept, and the request goes on from there."""
    engine = Saying([chunk(3, 4)], Segment(output_ids=(3, 4, 5), logprobs=(-1.0,), finish_reason="abort"))
    generation = await hurried(workbench(engine), asked(4))
    assert (generation.output_ids, generation.logprobs) == ((3, 4, 5, 6), (-3.0, -4.0, -1.0, -1.0))
    assert [request.max_new_tokens for request in engine.asked] == [4, 2]


async def test_a_chunk_without_its_log_probabilities_ends_the_request() -> None:
    """Tokens and log-probabilities would fall out of step: those before it are kept, the engine need not answer."""
    engine = Saying([chunk(3), chunk(4, 5, logprobs=1), chunk(6)], None)
    bench = workbench(engine)
    generation = await hurried(bench, asked(3))
    assert (generation.output_ids, len(generation.logprobs)) == ((3, 4, 5), 3)
    assert [(f.tokens, f.finish_reason) for f in bench.told(e.SegmentReceived)] == [(1, "error"), (2, "length")]


async def test_what_arrives_late_changes_nothing() -> None:
    """A port that still calls when its request is over, because a thread of its own does, has no say any more."""
    engine = Saying([chunk(3), chunk(4)], answer(3, 4, reason="abort"))
    told: list[int] = []
    generation = await workbench(engine).segments.generate(asked(3), a_ticket(), lambda tokens: told.extend(tokens.ids))
    assert engine.arrived is not None
    engine.arrived(chunk(99))
    assert (generation.output_ids, told) == ((3, 4, 5), [3, 4, 5])


async def test_a_stream_never_makes_a_generation_longer_than_was_asked_for() -> None:
    """Neither what is told nor what is kept goes beyond the budget, also where the answer is lost."""
    engine = Saying([chunk(3, 4), chunk(5, 6, 7)], answer(3, 4, 5, 6, 7))
    told: list[int] = []
    generation = await workbench(engine).segments.generate(asked(3), a_ticket(), lambda tokens: told.extend(tokens.ids))
    assert (generation.output_ids, generation.finish_reason, told) == ((3, 4, 5), "length", [3, 4, 5])
    assert len(generation.logprobs) == len(generation.versions) == 3


@pytest.mark.parametrize(
    ("spans", "versions", "exact"),
    [
        ([("run:7", 0, 2), ("run:8", 2, 4)], (7, 7, 8, 8), True),
        ([("run:7", 0, 2)], (7, 7, 7, 7), False),
        ([("default", 0, 1), ("/models/7", 1, 2), ("other:7", 2, 3), ("run:x", 3, 4)], (None,) * 4, True),
        ([("run:8", -3, 2), ("run:8", 2, 99)], (8,) * 4, True),
        ([], (7,) * 4, False),
        (None, (7,) * 4, False),
    ],
)
async def test_tokens_have_the_versions_that_the_engine_reports_and_else_the_pinned_one(
    spans: list[tuple[str, int, int]] | None, versions: tuple[int | None, ...], exact: bool
) -> None:
    """Whatever the spans: one version a token, and exact only where each is reported or no publication fell within."""
    reported = None if spans is None else tuple(VersionSpan(label=a, start=b, end=c) for a, b, c in spans)
    engine = Saying([chunk(3)], answer(3, 4, 5, 6, spans=reported))
    bench = workbench(engine)
    bench.cohort.version = 7

    def publish(_: Tokens) -> None:
        bench.cohort.version = 8

    generation = await bench.segments.generate(asked(4), a_ticket(), publish)
    assert (generation.versions, generation.segments[0].exact) == (versions, exact)
    assert not any(version is None and version == 8 for version in generation.versions)


@pytest.mark.parametrize(("kind", "step"), [(GenerationRequest, Silence()), (e.PauseGeneration, BreakOff(1))])
async def test_a_script_that_a_request_cannot_meet_is_refused(
    kind: type[e.Request | GenerationRequest], step: Step
) -> None:
    """Where it is written, and not by an engine that quietly behaves."""
    with pytest.raises(ValueError, match=f"is nothing that a {kind.__name__} can meet"):
        ScriptedEngine("left").on(kind, step)
