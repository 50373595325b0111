"""`partial_rollout=False`: what an interruption leaves is discarded, and the generation begins again."""

from typing import Any

import anyio
import pytest

from lifecycle import Generation, GenerationRequest, PauseMode
from lifecycle.errors import GenerationInterrupted
from lifecycle.ports import Capabilities
from lifecycle.testing import BreakOff, ScriptedEngine

from .crowd import a_few_turns, until
from .test_generation_streams import answer, streaming
from .test_segment_failures import Answering, hurried
from .workbench import Workbench, a_ticket, workbench

pytestmark = pytest.mark.anyio


def whole(new: int = 6, **fields: Any) -> GenerationRequest:
    """Return a request for `new` tokens in one piece."""
    return GenerationRequest(
        **{"input_ids": (1, 2), "max_new_tokens": new, "partial_rollout": False, "request_id": "r", **fields}
    )


class Recording(ScriptedEngine):
    """An engine that keeps the requests it got."""

    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__(name, **fields)
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, **options: Any) -> Any:
        """Keep the request, and behave.

        Cancellation: as in any scripted engine.
        """
        self.asked.append(request)
        return await super().generate(request, **options)


def _pause(bench: Workbench) -> None:
    bench.cohort.generation_held = True
    bench.cohort.epoch += 1


async def _aborted(bench: Workbench, tasks: anyio.abc.TaskGroup, request: GenerationRequest) -> list[Generation]:
    """Start a generation, let it make 2 tokens, pause. Returns where its result will be."""
    results: list[Generation] = []
    engine = bench.engines["left"]

    async def ask() -> None:
        results.append(await bench.segments.generate(request, a_ticket()))

    tasks.start_soon(ask)
    await until(lambda: engine.in_flight == 1)
    engine.produce(2)
    _pause(bench)
    engine._abort()
    await until(lambda: bench.segments.in_flight == 0)
    await a_few_turns()
    return results


async def test_after_an_abort_it_begins_again_from_the_prompt() -> None:
    """With the whole budget, under a new id; all tokens are of one version, and what was discarded is counted."""
    engine = Recording("left", manual=True)
    bench = workbench(engine)
    async with anyio.create_task_group() as tasks:
        results = await _aborted(bench, tasks, whole())
        bench.cohort.generation_held, bench.cohort.version = False, 1
        bench.segments.changed.give()
        await until(lambda: engine.in_flight == 1)
        engine.produce(6)
    [generation] = results
    assert (generation.output_ids, generation.versions) == ((3, 4, 5, 6, 7, 8), (1,) * 6)
    assert (generation.discarded, len(generation.segments), generation.finish_reason) == (2, 1, "length")
    assert [(r.input_ids, r.max_new_tokens, r.request_id) for r in engine.asked] == [
        ((1, 2), 6, "r"),
        ((1, 2), 6, "r-1"),
    ]


async def test_a_stream_that_broke_off_is_discarded_too() -> None:
    """What had arrived is no beginning that another engine may go on from."""
    bench = streaming("left", "right", manual=False)
    bench.engines["left"].on(GenerationRequest, BreakOff(2))
    generation = await hurried(bench, whole(stream=True))
    assert ([s.engine for s in generation.segments], len(generation.output_ids)) == (["right"], 6)
    assert generation.discarded == 2


async def test_an_abort_by_the_user_returns_what_was_made() -> None:
    """Also of a generation that is held, and would have begun again."""
    bench = workbench(ScriptedEngine("left", manual=True))
    async with anyio.create_task_group() as tasks:
        results = await _aborted(bench, tasks, whole())
        bench.segments.abort()
    [generation] = results
    assert (generation.output_ids, generation.finish_reason, generation.discarded) == ((3, 4), "abort", 0)


async def test_an_abort_on_the_last_token_discards_nothing() -> None:
    """It is whole: there is nothing to begin again for."""
    bench = workbench(Answering("left", answer(3, 4, 5, reason="abort")))
    generation = await hurried(bench, whole(3))
    assert (generation.output_ids, generation.finish_reason, generation.discarded) == ((3, 4, 5), "length", 0)


async def test_discarded_tokens_are_no_progress() -> None:
    """An engine that aborts again and again, without a pause, is not asked for ever."""
    engine = Answering("left", answer(3, 4, reason="abort"), for_ever=True)
    bench = workbench(engine)
    with pytest.raises(GenerationInterrupted, match="3 attempts in a row brought no token that could be kept"):
        await hurried(bench, whole(retry_budget=3))
    assert engine.asked == 3


async def test_a_pause_that_explains_an_abort_is_no_failure() -> None:
    """A job that publishes often discards often: that alone gives no generation up."""
    engine = Recording("left", manual=True)
    bench = workbench(engine)
    async with anyio.create_task_group() as tasks:
        results = await _aborted(bench, tasks, whole(retry_budget=2))
        for _ in range(4):
            bench.cohort.generation_held = False
            bench.segments.changed.give()
            await until(lambda: engine.in_flight == 1)
            engine.produce(2)
            _pause(bench)
            engine._abort()
            await until(lambda: bench.segments.in_flight == 0)
            await a_few_turns()
        bench.cohort.generation_held = False
        bench.segments.changed.give()
        await until(lambda: engine.in_flight == 1)
        engine.produce(6)
    assert [(len(g.output_ids), g.discarded) for g in results] == [(6, 10)]


async def test_what_one_request_goes_through_is_kept_as_one() -> None:
    """An engine that keeps a request over a pause discards nothing: the versions within one request are its own."""
    capabilities = Capabilities(pause_modes=frozenset(PauseMode), reports_versions=True)
    bench = workbench(engine := ScriptedEngine("left", manual=True, capabilities=capabilities, label="run:0"))
    results: list[Generation] = []

    async def ask() -> None:
        results.append(await bench.segments.generate(whole(4), a_ticket()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: engine.in_flight == 1)
        engine.produce(2)
        engine.label = "run:1"
        engine.produce(2)
    assert [(g.versions, g.discarded) for g in results] == [((0, 0, 1, 1), 0)]
