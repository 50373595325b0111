"""Requests that are aborted and resumed: which tokens are kept, what is asked for next, and who pays."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from attrs import evolve

from lifecycle import (
    Generation,
    GenerationRequest,
    PauseMode,
)
from lifecycle.generation import Segment, Tokens
from lifecycle.ports import Capabilities
from lifecycle.testing import BreakOff, LoseTokens
from tests.lifecycle.driver.driver_rig import SOURCE, Engine, Later, Rig, rig, start
from tests.lifecycle.driver.invariants import check
from tests.lifecycle.rollouts.rollouts_rig import settled

from .stage import asked, produce_all

pytestmark = pytest.mark.anyio

STREAMING = Capabilities(pause_modes=frozenset(PauseMode), streams=True)
PROMPT = tuple(range(1, 11))


def wanted(tokens: int, **options: Any) -> GenerationRequest:
    """Return a request for `tokens` tokens after a prompt of ten."""
    return GenerationRequest(input_ids=PROMPT, max_new_tokens=tokens, **options)


def begin(stage: Rig, tasks: anyio.abc.TaskGroup, request: GenerationRequest, **options: Any) -> Later:
    """Start a generation."""
    return start(tasks, lambda: stage.lifecycle.generate(request, **options))


def whole(generation: Generation) -> bool:
    """Whether every token has its log-probability and its version, in the whole and in each segment."""
    parts: list[Generation | Segment] = [generation, *generation.segments]
    return all(len(part.output_ids) == len(part.logprobs) == len(part.versions) for part in parts)


# ------------------------------------------------------------------------------------------------- tokens that are lost


@pytest.mark.parametrize("retracted", [False, True], ids=["by the scheduler", "by a pause"])
@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_of_a_retracted_request_whose_abort_answers_without_them(stream: bool, retracted: bool) -> None:
    """The 40 that were streamed are kept, and told to be missing in the answer; none is made up where none was seen."""
    stage = rig(1, manual=True, capabilities=STREAMING)
    received = asked(stage["E1"])
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        stage["E1"].on(GenerationRequest, LoseTokens(0))
        later = begin(stage, tasks, wanted(80, stream=stream))
        await settled()
        stage["E1"].produce(40)
        if retracted:
            await lifecycle.suspend()
            await lifecycle.pause_generation(PauseMode.RETRACT)
            await lifecycle.continue_generation()
            await lifecycle.resume()
        await lifecycle.publish(SOURCE, version=1)
        await produce_all(stage, [later])
        generation, kept = later.value, 40 if stream else 0
        assert received[1].input_ids == PROMPT + generation.output_ids[:kept]
        assert received[1].max_new_tokens == 80 - kept
        assert [segment.lost for segment in generation.segments] == ([40, 0] if stream else [0])
        assert generation.output_ids == tuple(range(11, 91))
        assert generation.versions == (0,) * kept + (1,) * (80 - kept)
        assert whole(generation)
        check(stage)


async def test_a_token_that_comes_after_the_abort_was_acknowledged_is_not_appended() -> None:
    """Sampled in a step that was under way: it belongs to nobody, is passed on to nobody, and keeps no slot."""
    stage = rig(1, manual=True, capabilities=STREAMING)
    generate = stage["E1"].generate
    streams: list[Callable[[Tokens], None]] = []

    async def leaking(request: GenerationRequest, *, arrived: Callable[[Tokens], None], **options: Any) -> Segment:
        streams.append(arrived)
        return await generate(request, arrived=arrived, **options)

    stage["E1"].generate = leaking  # type: ignore[method-assign, assignment]
    told: list[int] = []
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = begin(stage, tasks, wanted(6, stream=True), on_tokens=lambda tokens: told.extend(tokens.ids))
        await settled()
        stage["E1"].produce(2)
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        await settled()
        late = Tokens(ids=(99,), logprobs=(-1.0,))
        streams[0](late)
        assert lifecycle._context.segments.in_flight == 0
        await lifecycle.continue_generation()
        await settled()
        streams[0](late)
        await produce_all(stage, [later])
        streams[1](late)
        assert later.value.output_ids == tuple(told) == (11, 12, 13, 14, 15, 16)
        assert [len(segment.output_ids) for segment in later.value.segments] == [2, 4]
        assert whole(later.value)
        check(stage)


@pytest.mark.parametrize("partial", [True, False])
async def test_what_an_abort_interrupts_goes_on_or_begins_again_as_the_policy_says(partial: bool) -> None:
    """Two tokens of 2, two of 4 and eight of 6 with partial rollouts; without them twelve of 6, and no other."""
    stage = rig(1, manual=True, initial_version=2)
    received = asked(stage["E1"])
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = begin(stage, tasks, wanted(12, partial_rollout=partial))
        for version in (4, 6):
            await settled()
            stage["E1"].produce(2)
            await lifecycle.publish(SOURCE, version=version)
        await produce_all(stage, [later])
        generation = later.value
        made = [(s.versions, s.finish_reason) for s in generation.segments]
        asked_for = [(len(request.input_ids), request.max_new_tokens) for request in received]
        if partial:
            assert made == [((2,) * 2, "abort"), ((4,) * 2, "abort"), ((6,) * 8, "length")]
            assert asked_for == [(10, 12), (12, 10), (14, 8)]
        else:
            assert made == [((6,) * 12, "length")]
            assert asked_for == [(10, 12)] * 3
        assert (len(generation.output_ids), generation.discarded) == (12, 0 if partial else 4)
        assert whole(generation)
        check(stage)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_without_partial_tokens_costs_them_and_nothing_else(stream: bool) -> None:
    """Of a server that drops what it had made: asked again for all that was not seen, and never for more."""
    stage = rig(1, manual=True, capabilities=Capabilities(pause_modes=frozenset(PauseMode), streams=False))
    received = asked(stage["E1"])
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        stage["E1"].on(GenerationRequest, *[LoseTokens(0)] * 20)
        later = begin(stage, tasks, wanted(4, stream=stream))
        for version in range(1, 21):
            await settled()
            stage["E1"].produce(2)
            await lifecycle.publish(SOURCE, version=version)
        await produce_all(stage, [later])
        assert [(request.input_ids, request.max_new_tokens) for request in received] == [(PROMPT, 4)] * 21
        assert (later.value.versions, later.value.interruptions) == ((20,) * 4, 0)
        check(stage)


# -------------------------------------------------------------------------------------------------------- the next call


@pytest.mark.parametrize(("tokens", "context"), [(12, None), (12, 22), (100, 22)])
async def test_a_resumed_request_asks_for_what_is_left(tokens: int, context: int | None) -> None:
    """Prompt of ten and five tokens made: seven are left, by budget or by context, and the prompt stays as it was."""
    stage = rig(1, manual=True)
    received = asked(stage["E1"])
    request = wanted(tokens, max_tokens=context)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = begin(stage, tasks, request)
        await settled()
        stage["E1"].produce(5)
        await lifecycle.publish(SOURCE, version=1)
        await produce_all(stage, [later])
        assert [(len(each.input_ids), each.max_new_tokens) for each in received] == [(10, 12), (15, 7)]
        assert (later.value.output_ids, later.value.finish_reason) == (tuple(range(11, 23)), "length")
        assert [segment.output_ids[0] for segment in later.value.segments] == [11, 16]
        assert request.input_ids == PROMPT
        check(stage)


def aborted(engine: Engine) -> None:
    """Let the engine call an abort what has come to its last token."""
    generate = engine.generate

    async def late(request: GenerationRequest, **options: Any) -> Segment:
        return evolve(await generate(request, **options), finish_reason="abort")

    engine.generate = late  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["aborted", "broken off"])
@pytest.mark.parametrize(("tokens", "context"), [(5, None), (100, 15)])
async def test_nothing_is_asked_for_where_nothing_is_left(tokens: int, context: int | None, how: str) -> None:
    """Interrupted behind its last token a generation is complete: it ends for its length, without another call."""
    stage = rig(1, capabilities=STREAMING)
    if how == "aborted":
        aborted(stage["E1"])
    else:
        stage["E1"].on(GenerationRequest, BreakOff(5))
    received = asked(stage["E1"])
    async with stage.lifecycle as lifecycle:
        generation = await lifecycle.generate(wanted(tokens, max_tokens=context, stream=True))
        assert (len(received), len(generation.output_ids), generation.finish_reason) == (1, 5, "length")
        full = await lifecycle.generate(wanted(tokens, max_tokens=10))
        assert (len(received), full.output_ids, full.finish_reason) == (1, (), "length")
        check(stage)


async def test_a_resumed_generation_is_accounted_for_and_not_compared() -> None:
    """Going on after a prefix need not bring what would have come: what was made stays, and what comes is appended."""
    stage = rig(1, manual=True)
    generate = stage["E1"].generate

    async def otherwise(request: GenerationRequest, **options: Any) -> Segment:
        segment, offset = await generate(request, **options), 1000 * len(received)
        return evolve(segment, output_ids=tuple(token + offset for token in segment.output_ids))

    stage["E1"].generate = otherwise  # type: ignore[method-assign]
    received = asked(stage["E1"])
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = begin(stage, tasks, wanted(9, temperature=0.0))
        for version in (1, 2):
            await settled()
            stage["E1"].produce(3)
            await lifecycle.publish(SOURCE, version=version)
        await produce_all(stage, [later])
        generation = later.value
        assert generation.versions == (0,) * 3 + (1,) * 3 + (2,) * 3
        assert [request.input_ids for request in received] == [
            PROMPT + generation.output_ids[:made] for made in (0, 3, 6)
        ]
        assert generation.output_ids == tuple(token for s in generation.segments for token in s.output_ids)
        assert whole(generation)
        check(stage)
