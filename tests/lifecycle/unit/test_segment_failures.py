"""Generations that are interrupted, aborted, refused, or lose their engine."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Generation, GenerationRequest, Segment, Standing
from lifecycle import events as e
from lifecycle.errors import EngineUnavailable, GenerationInterrupted, GenerationRefused, LifecycleError
from lifecycle.generation import Tokens
from lifecycle.testing import ScriptedEngine

from .crowd import a_few_turns, until
from .workbench import Workbench, a_ticket, workbench

pytestmark = pytest.mark.anyio

BUDGET = 3
"""Attempts in vain after which the requests here are given up."""
ABORTED = Segment(output_ids=(), logprobs=(), finish_reason="abort")


class Answering(ScriptedEngine):
    """An engine that meets generation requests with what it was given, and behaves once that is used up."""

    def __init__(self, name: str, *answers: Segment | Exception, for_ever: bool = False) -> None:
        super().__init__(name)
        self.answers = list(answers)
        self.for_ever = for_ever
        self.asked = 0

    async def generate(
        self, request: GenerationRequest, *, timeout: float, arrived: Callable[[Tokens], None] | None = None
    ) -> Segment:
        """Give the next answer.

        Cancellation: nothing to leave behind.
        """
        self.asked += 1
        if not self.answers:
            return await super().generate(request, timeout=timeout)
        answer = self.answers[0] if self.for_ever else self.answers.pop(0)
        await checkpoint()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _request(new: int = 4, **fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"input_ids": (1, 2), "max_new_tokens": new, "retry_budget": BUDGET, **fields})


async def hurried(bench: Workbench, request: GenerationRequest) -> Generation:
    """Generate, with the signal that ends a back-off given all the time, so that no test waits for a clock."""
    outcome: list[Generation | LifecycleError] = []

    async def hurry() -> None:
        while True:
            bench.segments.changed.give()
            await checkpoint()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hurry)
            try:
                outcome.append(await bench.segments.generate(request, a_ticket()))
            except LifecycleError as error:
                outcome.append(error)
            tasks.cancel_scope.cancel()
    [result] = outcome
    if isinstance(result, LifecycleError):
        raise result
    return result


@pytest.mark.parametrize("session", [None, "chat"])
async def test_an_engine_that_does_not_answer_is_failed_over(session: str | None) -> None:
    """The request goes on at the other engine, also one of a session that had been with the first."""
    silent = Answering("left", EngineUnavailable("left", "connection reset"), for_ever=True)
    bench = workbench(silent, ScriptedEngine("right"))
    generation = await hurried(bench, _request(session=session))
    assert ([s.engine for s in generation.segments], silent.asked) == (["right"], 1)
    later = await hurried(bench, _request(session=session))
    assert (later.segments[0].engine, silent.asked) == ("right", 1)


async def test_an_engine_that_failed_once_is_asked_again_where_no_other_is_left() -> None:
    """Suspicion orders the engines; it takes none out of service."""
    flaky = Answering("left", EngineUnavailable("left", "connection reset"))
    bench = workbench(flaky)
    generation = await hurried(bench, _request())
    assert (generation.finish_reason, flaky.asked) == ("length", 2)


async def test_an_engine_that_answers_again_is_asked_like_any_other() -> None:
    """One failure does not keep it out for longer than until its next answer."""
    flaky = Answering("left", EngineUnavailable("left", "connection reset"))
    bench = workbench(flaky, right := ScriptedEngine("right", manual=True))
    bench.cohort.fleet.update("right", standing=Standing.STALE)
    await hurried(bench, _request())
    bench.cohort.fleet.update("right", standing=Standing.SERVING)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.segments.generate, _request(), a_ticket())
        await until(lambda: right.in_flight == 1)
        with anyio.fail_after(5):
            assert (await bench.segments.generate(_request(), a_ticket())).segments[0].engine == "left"
        right.produce(4)


async def test_a_refused_request_is_the_callers_and_not_held_against_the_engine() -> None:
    """Asking again would not help: it is raised at once, and the engine is asked next like any other."""
    refusing = Answering("left", GenerationRefused("the prompt is too long"))
    bench = workbench(refusing, ScriptedEngine("right"))
    with pytest.raises(GenerationRefused, match="the prompt is too long"):
        await bench.segments.generate(_request(), a_ticket())
    asked = {(await bench.segments.generate(_request(), a_ticket())).segments[0].engine for _ in range(2)}
    assert (asked, bench.segments.in_flight) == ({"left", "right"}, 0)


@pytest.mark.parametrize(
    "answer", [ABORTED, EngineUnavailable("left", "connection refused")], ids=["aborts", "never answers"]
)
async def test_a_generation_without_progress_is_given_up(answer: Segment | Exception) -> None:
    """After a bounded number of attempts in a row without a token, the caller is told, with the last cause."""
    engine = Answering("left", answer, for_ever=True)
    bench = workbench(engine)
    with pytest.raises(GenerationInterrupted, match=f"{BUDGET} attempts in a row brought no token") as given_up:
        await hurried(bench, _request())
    assert engine.asked == BUDGET
    assert given_up.value.__cause__ is (answer if isinstance(answer, Exception) else None)


async def test_a_token_of_progress_starts_the_count_anew() -> None:
    """Many interruptions are no failure as long as tokens come."""
    one = Segment(output_ids=(9,), logprobs=(-1.0,), finish_reason="abort")
    fruitless = [ABORTED] * (BUDGET - 1)
    bench = workbench(Answering("left", *fruitless, one, *fruitless, one))
    generation = await hurried(bench, _request(new=3))
    assert (len(generation.output_ids), len(generation.segments), generation.finish_reason) == (3, 3, "length")


async def test_aborts_that_a_pause_explains_are_not_counted() -> None:
    """A job that is published to often interrupts its rollouts often: that alone gives none of them up."""
    bench = workbench(engine := ScriptedEngine("left", manual=True))
    results: list[Generation] = []

    async def ask() -> None:
        results.append(await bench.segments.generate(_request(new=1), a_ticket()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        for epoch in range(1, 2 * BUDGET):
            await until(lambda: bench.segments.in_flight == 1)
            await a_few_turns()
            bench.cohort.generation_held, bench.cohort.epoch = True, epoch
            bench.segments.interrupt()
            await until(lambda: bench.segments.in_flight == 0)
            bench.cohort.generation_held = False
            bench.segments.changed.give()
        await until(lambda: engine.in_flight == 1)
        engine.produce()
    assert [generation.finish_reason for generation in results] == ["length"]


async def test_a_pause_of_before_explains_nothing() -> None:
    """An abort counts in vain unless generation was held since the request was sent."""
    bench = workbench(engine := Answering("left", ABORTED, for_ever=True))
    bench.cohort.epoch = 5
    with pytest.raises(GenerationInterrupted):
        await hurried(bench, _request())
    assert engine.asked == BUDGET


async def test_no_pause_explains_an_engine_that_does_not_answer() -> None:
    """Publications do not keep a generation going whose engine is gone."""

    class Gone(Answering):
        async def generate(self, request: GenerationRequest, **options: Any) -> Segment:
            """Fail, in the course of a publication.

            Cancellation: nothing to leave behind.
            """
            bench.cohort.epoch += 1
            return await super().generate(request, **options)

    bench = workbench(engine := Gone("left", EngineUnavailable("left", "connection refused"), for_ever=True))
    with pytest.raises(GenerationInterrupted):
        await hurried(bench, _request())
    assert engine.asked == BUDGET


async def test_only_the_requests_of_the_engine_are_interrupted() -> None:
    """An engine that is lost does not cost the others their requests."""
    bench = workbench(*(ScriptedEngine(name, manual=True) for name in ("left", "right")))
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(bench.segments.generate, _request(), a_ticket())
            await a_few_turns()
        bench.cohort.generation_held = True
        bench.segments.interrupt("left")
        await until(lambda: bench.segments.in_flight == 1)
        assert [engine.in_flight for engine in bench.engines.values()] == [0, 1]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("held", [True, False])
async def test_an_abort_by_the_user_ends_a_generation_with_what_it_has(held: bool) -> None:
    """In flight it ends when its engine says so, and held it ends at once; the tokens so far are kept."""
    bench = workbench(engine := ScriptedEngine("left", manual=True))
    results: list[Generation] = []

    async def ask() -> None:
        results.append(await bench.segments.generate(_request(), a_ticket()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: engine.in_flight == 1)
        engine.produce(2)
        if held:
            bench.cohort.generation_held = True
            engine._abort()
            await until(lambda: bench.segments.in_flight == 0)
            await a_few_turns()
        bench.segments.abort()
        engine._abort()
        await until(lambda: bool(results))
    assert [(g.finish_reason, len(g.output_ids)) for g in results] == [("abort", 2)]


async def test_a_lost_reply_is_told_as_an_error() -> None:
    """Every request that was sent ends in exactly one segment event, also without a reply."""
    bench = workbench(Answering("left", EngineUnavailable("left", "connection reset")), ScriptedEngine("right"))
    await hurried(bench, _request(new=2))
    assert [(f.engine, f.tokens, f.finish_reason) for f in bench.told(e.SegmentReceived)] == [
        ("left", 0, "error"),
        ("right", 2, "length"),
    ]
