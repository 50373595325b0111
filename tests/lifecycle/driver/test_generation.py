"""Generations across publications: tokens kept, versions true, nobody waits for ever."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from lifecycle import GenerationRequest, PauseMode, Segment, State, errors, events
from lifecycle.ports import Capabilities
from lifecycle.ticket import Ticket

from .driver_rig import SOURCE, Engine, Later, Rig, prompt, rig, start
from .invariants import check, leave

pytestmark = pytest.mark.anyio

REPORTING = Capabilities(pause_modes=frozenset(PauseMode), reports_versions=True)
KEEPING = [PauseMode.KEEP, PauseMode.IN_PLACE, PauseMode.RETRACT]


async def generating(stage: Rig, tasks: Any, ticket: Ticket, tokens: int = 6) -> Later:
    """Start a generation and let it make two tokens."""
    later = start(tasks, lambda: stage.lifecycle.generate(prompt(tokens), ticket=ticket))
    await anyio.wait_all_tasks_blocked()
    for engine in stage.engines:
        engine.produce(2)
    return later


async def finish(stage: Rig, tokens: int = 100) -> None:
    """Let every generation come to its end."""
    await anyio.wait_all_tasks_blocked()
    for engine in stage.engines:
        engine.produce(tokens)
    await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("reports", [False, True], ids=["silent engines", "engines that report versions"])
async def test_an_abort_keeps_the_tokens_and_labels_each_with_the_version_that_made_it(reports: bool) -> None:
    """Two tokens of version 0, then the rest of version 1, in one generation, exactly."""
    stage = rig(2, manual=True, capabilities=REPORTING if reports else None)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        report = await lifecycle.publish(SOURCE, version=1)
        assert report.interrupted == 1
        await finish(stage)
        generation = later.value
        assert generation.output_ids == (3, 4, 5, 6, 7, 8)
        assert generation.versions == (0, 0, 1, 1, 1, 1)
        assert [segment.finish_reason for segment in generation.segments] == ["abort", "length"]
        assert all(segment.exact for segment in generation.segments)
        assert (generation.finish_reason, generation.interruptions) == ("length", 1)
        check(stage)
    await leave(stage)


async def test_three_publications_make_three_interruptions() -> None:
    """Whatever the number of pauses, no token is lost or counted twice."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket, tokens=7)
        for version in (1, 2, 3):
            await lifecycle.publish(SOURCE, version=version)
            await anyio.wait_all_tasks_blocked()
            stage["E1"].produce(1)
        await finish(stage)
        assert later.value.output_ids == tuple(range(3, 10))
        assert later.value.versions == (0, 0, 1, 2, 3, 3, 3)
        assert later.value.interruptions == 3
        check(stage)


@pytest.mark.parametrize("mode", KEEPING)
async def test_a_kept_request_gets_its_versions_from_the_engines_spans(mode: PauseMode) -> None:
    """One request over two versions: the engine says which token is whose."""
    stage = rig(1, manual=True, capabilities=REPORTING)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        await lifecycle.publish(SOURCE, version=1, mode=mode)
        await finish(stage)
        assert later.value.versions == (0, 0, 1, 1, 1, 1)
        assert [segment.exact for segment in later.value.segments] == [True]
        check(stage)


@pytest.mark.parametrize("mode", KEEPING)
async def test_a_kept_request_without_spans_is_marked_as_not_exact(mode: PauseMode) -> None:
    """Every token gets the oldest version that can have made it, and the segment says so."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        await lifecycle.publish(SOURCE, version=1, mode=mode)
        await finish(stage)
        assert later.value.versions == (0,) * 6
        assert [segment.exact for segment in later.value.segments] == [False]
        check(stage)


async def test_a_request_kept_once_and_aborted_by_the_next_publication_is_not_exact() -> None:
    """That the second pause aborts does not undo that the first one kept."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        await lifecycle.publish(SOURCE, version=1, mode=PauseMode.KEEP)
        await anyio.wait_all_tasks_blocked()
        stage["E1"].produce(1)
        await lifecycle.publish(SOURCE, version=2, mode=PauseMode.ABORT)
        await finish(stage)
        assert later.value.versions == (0, 0, 0, 2, 2, 2)
        assert [segment.exact for segment in later.value.segments] == [False, True]
        check(stage)


async def test_a_wait_pause_lets_requests_finish_first() -> None:
    """The publication waits until what is in flight has ended, all of it at the old version."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        tasks.start_soon(lambda: lifecycle.publish(SOURCE, version=1, mode=PauseMode.WAIT))
        await anyio.wait_all_tasks_blocked()
        assert events.PauseGeneration not in stage["E1"].seen
        await finish(stage)
        assert later.value.versions == (0,) * 6
        assert (lifecycle.version, lifecycle.state) == (1, State.RUNNING)
        check(stage)


async def test_a_wait_pause_that_does_not_drain_is_given_up() -> None:
    """The straggler goes on, the fleet runs as before, and the error says how many were left."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        with pytest.raises(errors.PauseFailed) as failure:
            await lifecycle.publish(SOURCE, version=1, mode=PauseMode.WAIT)
        assert "1 requests in flight" in str(failure.value)
        assert (lifecycle.state, lifecycle.version) == (State.RUNNING, 0)
        check(stage)
        await finish(stage)
        assert later.value.versions == (0,) * 6


async def test_an_engine_that_never_completes_what_it_was_told_to_abort_holds_nobody_up() -> None:
    """The wait is bounded: the request counts as aborted without tokens, and the generation starts again."""
    stage = rig(1, manual=True)
    odd = stage["E1"]
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        odd._abort = lambda: None  # type: ignore[method-assign]
        odd._unfinished = list  # type: ignore[method-assign]
        await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.RUNNING
        await finish(stage)
        assert later.value.versions == (1,) * 6
        assert lifecycle._context.segments.in_flight == 0
        check(stage)


async def test_an_engine_that_stays_busy_is_not_updated() -> None:
    """A pause that leaves a request in the engine proves nothing: no session is opened."""
    stage = rig(1, manual=True)
    odd = stage["E1"]
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        abort = odd._abort
        odd._abort = lambda: None  # type: ignore[method-assign]
        with pytest.raises(errors.PauseFailed) as failure:
            await lifecycle.publish(SOURCE, version=1)
        assert "E1 may still hold requests" in str(failure.value)
        assert events.BeginUpdate not in odd.seen
        assert lifecycle.state is State.RUNNING
        check(stage)
        odd._abort = abort  # type: ignore[method-assign]
        await finish(stage)
        assert later.value.versions == (0,) * 6


async def test_foreign_weights_are_never_labelled_as_ours() -> None:
    """Tokens that an engine reports as made by other weights have no version of this run."""
    stage = rig(1, manual=True, capabilities=REPORTING)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        stage["E1"].label = "default"
        await finish(stage)
        assert later.value.versions == (0, 0, None, None, None, None)


async def test_a_pause_finds_the_aborted_requests_back() -> None:
    """Aborting comes first and is waited for, since a server pauses slowly while it has requests."""
    stage = rig(2, manual=True)
    found: list[int] = []

    def slowly(engine: Engine) -> Callable[..., Awaitable[Segment]]:
        generate = engine.generate

        async def generate_slowly(request: GenerationRequest, *, timeout: float) -> Segment:
            segment = await generate(request, timeout=timeout)
            await anyio.sleep(0.2)
            return segment

        return generate_slowly

    for engine in stage.engines:
        engine.generate = slowly(engine)  # type: ignore[assignment, method-assign]
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)

        def note(_: object, request: events.Request) -> None:
            if isinstance(request, events.PauseGeneration):
                found.append(lifecycle._context.segments.in_flight)

        for engine in stage.engines:
            engine.received = note
        await lifecycle.publish(SOURCE, version=1)
        assert found == [0, 0]
        await finish(stage)
        await anyio.sleep(1)
        assert later.value.interruptions == 1
