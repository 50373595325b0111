"""Tokens labelled with a version that did not make them, and labels that are no version."""

from typing import Any

import anyio
import pytest

from lifecycle import GenerationRequest, MeasuredFrom, PauseMode, StalenessBudget, Standing
from lifecycle.generation import Segment, VersionSpan
from lifecycle.ports import Capabilities
from tests.lifecycle.driver.driver_rig import SOURCE, Engine, Rig, prompt, rig, start
from tests.lifecycle.driver.invariants import check

from .stage import KEEPING, asked, produce_all

pytestmark = pytest.mark.anyio

STREAMING = Capabilities(pause_modes=frozenset(PauseMode), streams=True)
REPORTING = Capabilities(pause_modes=frozenset(PauseMode), reports_versions=True)


@pytest.mark.parametrize("stepwise", [False, True], ids=["publish()", "step by step"])
@pytest.mark.parametrize("capabilities", [None, STREAMING, REPORTING], ids=["plain", "streams", "reports versions"])
async def test_tokens_that_were_in_flight_keep_the_version_that_made_them(
    capabilities: Capabilities | None, stepwise: bool
) -> None:
    """57 tokens sent for at 7 and aborted for 8 are of 7, all of them; those of the resumed request are of 8."""
    stage = rig(1, initial_version=7, manual=True, capabilities=capabilities)
    engine = stage["E1"]
    engine.label = "run:7"
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        request = GenerationRequest(input_ids=(1, 2), max_new_tokens=100, stream=True)
        later = start(tasks, lambda: lifecycle.generate(request))
        await anyio.wait_all_tasks_blocked()
        engine.produce(57)
        await update(stage, stepwise)
        await produce_all(stage, [later])
        assert later.value.versions == (7,) * 57 + (8,) * 43
        assert [(len(s.versions), set(s.versions), s.exact) for s in later.value.segments] == [
            (57, {7}, True), (43, {8}, True),
        ]  # fmt: skip
        check(stage)


async def test_what_only_the_stream_has_told_is_not_of_the_version_after_it() -> None:
    """The engine never answers what it aborted, and the weights are there before it is given up: 57 are of 7."""
    stage = rig(1, initial_version=7, manual=True, capabilities=STREAMING)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        request = GenerationRequest(input_ids=(1, 2), max_new_tokens=100, stream=True)
        later = start(tasks, lambda: lifecycle.generate(request))
        await anyio.wait_all_tasks_blocked()
        stage["E1"].produce(57)
        stage["E1"]._abort = lambda: None  # type: ignore[method-assign]
        stage["E1"]._unfinished = list  # type: ignore[method-assign]
        await lifecycle.publish(SOURCE, version=8)
        await produce_all(stage, [later])
        assert later.value.versions == (7,) * 57 + (8,) * 43
        check(stage)


@pytest.mark.parametrize("mode", KEEPING)
@pytest.mark.parametrize("capabilities", [STREAMING, REPORTING], ids=["streams", "reports versions"])
async def test_a_request_that_was_kept_is_not_of_the_version_in_which_it_was_answered(
    capabilities: Capabilities, mode: PauseMode
) -> None:
    """Of 57 and 43 tokens no engine says which is whose: none is called newer than it may be, and that is told."""
    stage = rig(1, initial_version=7, manual=True, capabilities=capabilities)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = start(tasks, lambda: lifecycle.generate(prompt(100)))
        await anyio.wait_all_tasks_blocked()
        stage["E1"].produce(57)
        await lifecycle.publish(SOURCE, version=8, mode=mode)
        await produce_all(stage, [later])
        newer = 8 if capabilities.reports_versions else 7
        assert later.value.versions == (7,) * 57 + (newer,) * 43
        assert [segment.exact for segment in later.value.segments] == [capabilities.reports_versions]
        check(stage)


async def update(stage: Rig, stepwise: bool) -> None:
    """Publish version 8."""
    lifecycle = stage.lifecycle
    if not stepwise:
        await lifecycle.publish(SOURCE, version=8)
        return
    await lifecycle.suspend()
    await lifecycle.pause_generation()
    await lifecycle.begin_update(version=8)
    await lifecycle.transfer(SOURCE)
    await lifecycle.finish_update()


PATHS = ["/checkpoints/step-7", "/checkpoints/run:7"]
NO_VERSIONS = [*PATHS, "7", "default", "", ":7", "run:", "run:seven", "other:7", "run:-7", "run:7.0"]


def labelling(engine: Engine, label: str) -> None:
    """Let the engine report `label` for every token."""
    generate = engine.generate

    async def labelled(request: GenerationRequest, **options: Any) -> Segment:
        segment = await generate(request, **options)
        return Segment(
            output_ids=segment.output_ids,
            logprobs=segment.logprobs,
            finish_reason=segment.finish_reason,
            spans=(VersionSpan(label=label, start=0, end=len(segment.output_ids)),),
        )

    engine.generate = labelled  # type: ignore[method-assign]


@pytest.mark.parametrize("label", NO_VERSIONS)
async def test_a_label_that_is_no_version_of_ours_is_equal_to_none(label: str) -> None:
    """A path, another run's number, a word: the version of such tokens is not known, and training leaves them out."""
    budget = StalenessBudget(batch_size=2, max_staleness=9, measured_from=MeasuredFrom.OLDEST_TOKEN)
    stage = rig(1, budget=budget, initial_version=7)
    labelling(stage["E1"], label)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket:
        generation = await lifecycle.generate(prompt(), ticket=ticket)
        assert generation.versions == (None,) * 4
        assert budget.mask(generation.versions) == (False,) * 4
        assert ticket.oldest_token_version is None
        assert budget.staleness(ticket) == 0
        check(stage)


async def test_the_first_version_is_not_taken_for_an_unknown_one() -> None:
    """0 is a version like any other, and tokens before the first publication have none."""
    for label, version in (("run:0", 0), ("initial", None)):
        stage = rig(1, initial_version=0)
        labelling(stage["E1"], label)
        async with stage.lifecycle as lifecycle:
            generation = await lifecycle.generate(prompt())
            assert generation.versions == (version,) * 4
            assert lifecycle.budget.mask(generation.versions) == (version == 0,) * 4
            check(stage)


@pytest.mark.parametrize("label", ["other:7", "/checkpoints/run:7", "run:6", "run:8"])
async def test_an_engine_that_is_labelled_with_another_version_is_not_routed_to(label: str) -> None:
    """Another run's 7, or our 6: it takes part in the next publication, and serves from then on."""
    stage = rig(2, min_engines=1, initial_version=7)
    stage["E2"].label = label
    received = asked(stage["E2"])
    async with stage.lifecycle as lifecycle:
        assert [view.standing for view in lifecycle.engines] == [Standing.SERVING, Standing.STALE]
        for _ in range(4):
            await lifecycle.generate(prompt())
        assert received == []
        await lifecycle.publish(SOURCE, version=9)
        assert [view.standing for view in lifecycle.engines] == [Standing.SERVING] * 2
        check(stage)


@pytest.mark.parametrize("label", [None, "/checkpoints/step-7", "default"])
async def test_an_engine_whose_label_is_a_path_is_labelled_anew_and_never_compared(label: str | None) -> None:
    """A server names the model that it was started from: what it holds is the user's word, under a label of ours."""
    stage = rig(1, initial_version=7, capabilities=REPORTING)
    stage["E1"].label = label
    async with stage.lifecycle as lifecycle:
        assert (stage["E1"].label, lifecycle.engines["E1"].version) == ("run:7", 7)
        assert (await lifecycle.generate(prompt())).versions == (7,) * 4
        check(stage)
