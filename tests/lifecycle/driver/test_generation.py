"""Generations across publications: tokens kept, versions true, nobody waits for ever."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs
import pytest
from driver_rig import SOURCE, Rig, bring_to, prompt, rig
from invariants import check, leave

from lifecycle import Generation, PauseMode, StalenessBudget, State, errors, events
from lifecycle.ports import Capabilities
from lifecycle.staleness import Ticket
from lifecycle.testing import Refuse

pytestmark = pytest.mark.anyio

REPORTING = Capabilities(pause_modes=frozenset(PauseMode), reports_versions=True)
KEEPING = [PauseMode.KEEP, PauseMode.IN_PLACE, PauseMode.RETRACT]


class Later:
    """What a task brings."""

    value: Generation
    error: BaseException | None = None
    done = False


def start(tasks: Any, call: Callable[[], Awaitable[Generation]]) -> Later:
    """Start `call` in a task group."""
    later = Later()

    async def run() -> None:
        try:
            later.value = await call()
        except errors.LifecycleError as error:
            later.error = error
        later.done = True

    tasks.start_soon(run)
    return later


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


@pytest.mark.parametrize("state", [State.PAUSED, State.UPDATING])
async def test_a_generation_waits_while_generation_is_held_and_goes_on_after(state: State) -> None:
    """Nothing is sent to a paused engine; the request leaves when generation is released."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        await bring_to(lifecycle, state)
        later = start(tasks, lambda: lifecycle.generate(prompt(), ticket=ticket))
        await anyio.wait_all_tasks_blocked()
        assert (later.done, stage["E1"].in_flight) == (False, 0)
        assert stage.of(events.GenerationSent) == []
        if state is State.UPDATING:
            await lifecycle.abandon_update()
        await lifecycle.continue_generation()
        await anyio.wait_all_tasks_blocked()
        assert later.value.versions == (0,) * 4
        check(stage)


async def test_a_ticket_holder_generates_while_submission_is_suspended() -> None:
    """A rollout of many turns must be able to finish, or draining would wait for ever."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket:
        await lifecycle.suspend()
        generation = await lifecycle.generate(prompt(), ticket=ticket)
        assert len(generation.output_ids) == 4
        check(stage)


async def test_without_a_ticket_a_generation_counts_as_an_evaluation() -> None:
    """It needs no capacity, and runs in SUSPENDED too."""
    stage = rig(1, budget=StalenessBudget(batch_size=1, max_staleness=0))
    async with stage.lifecycle as lifecycle, lifecycle.admit():
        assert lifecycle.budget.capacity() == 0
        await lifecycle.suspend()
        generation = await lifecycle.generate(prompt())
        assert len(generation.output_ids) == 4
        assert lifecycle.running == 1
        assert [event.evaluation for event in stage.of(events.RolloutAdmitted)] == [False, True]
        check(stage)


async def test_a_settled_ticket_does_not_generate() -> None:
    """A rollout generates before its ticket goes back."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        async with lifecycle.admit() as ticket:
            ticket.accept()
            with pytest.raises(errors.TicketSettled):
                await lifecycle.generate(prompt(), ticket=ticket)
        assert stage["E1"].in_flight == 0


async def test_a_generation_goes_on_at_another_engine_when_its_own_dies() -> None:
    """What the dead engine had made is lost with it; the generation is not."""
    stage = rig(2, manual=True, min_engines=1)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        first = next(engine for engine in stage.engines if engine.in_flight)
        first.crash()
        await anyio.sleep(1)
        await finish(stage)
        assert later.value.output_ids == (3, 4, 5, 6, 7, 8)
        assert {segment.engine for segment in later.value.segments} == {"E1", "E2"} - {first.name}
        check(stage)


async def test_a_generation_is_given_up_when_nobody_answers() -> None:
    """Attempt after attempt without a token ends in an error that names the last engine."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket:
        stage["E1"].crash()
        with pytest.raises(errors.GenerationInterrupted) as failure:
            await lifecycle.generate(prompt(), ticket=ticket)
        assert isinstance(failure.value.__cause__, errors.EngineUnavailable)


async def test_aborting_generation_returns_what_there_is() -> None:
    """The caller gets its tokens with the reason `abort`, and no second request is sent."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, ticket)
        await lifecycle.abort_generation()
        await anyio.wait_all_tasks_blocked()
        assert (later.value.output_ids, later.value.finish_reason) == ((3, 4), "abort")
        assert len(stage.of(events.GenerationSent)) == 1
        again = await generating(stage, tasks, ticket)
        await finish(stage)
        assert again.value.finish_reason == "length"
        check(stage)


async def test_aborting_generation_ends_those_that_are_held_too() -> None:
    """A generation that waits for the end of a pause is not started after an abort."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        await bring_to(lifecycle, State.PAUSED)
        later = start(tasks, lambda: lifecycle.generate(prompt(), ticket=ticket))
        await anyio.wait_all_tasks_blocked()
        await lifecycle.abort_generation()
        await anyio.wait_all_tasks_blocked()
        assert (later.value.output_ids, later.value.finish_reason) == ((), "abort")
        await lifecycle.continue_generation()
        await anyio.wait_all_tasks_blocked()
        assert stage.of(events.GenerationSent) == []
        check(stage)


async def test_an_abort_that_an_engine_refuses_is_told() -> None:
    """The caller learns which engines may go on."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(events.AbortGeneration, Refuse())
        with pytest.raises(errors.OperationFailed) as failure:
            await lifecycle.abort_generation()
        assert failure.value.engines == ("E2",)


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
        assert lifecycle._segments.in_flight == 0
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


async def test_one_session_stays_at_one_engine_while_it_serves() -> None:
    """Prefix caches are per engine; a session moves only when its engine no longer serves."""
    stage = rig(3, min_engines=1)
    request = attrs.evolve(prompt(), session="chat-1")
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket:
        used = [(await lifecycle.generate(request, ticket=ticket)).segments[0].engine for _ in range(3)]
        assert len(set(used)) == 1
        stage[used[0]].on(events.Canary, Refuse())
        await lifecycle.publish(SOURCE, version=1)
        moved = (await lifecycle.generate(request, ticket=ticket)).segments[0].engine
        assert moved != used[0]
        check(stage)


@pytest.mark.parametrize("end", [errors.LifecycleFaulted, errors.LifecycleClosed])
async def test_waiting_generations_learn_of_a_fault_and_of_the_end(end: type[errors.LifecycleError]) -> None:
    """Nobody waits for an engine that will not come."""
    stage = rig(2)
    lifecycle = stage.lifecycle
    await lifecycle.attach()
    await lifecycle.resume()
    async with lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        await bring_to(lifecycle, State.PAUSED)
        later = start(tasks, lambda: lifecycle.generate(prompt(), ticket=ticket))
        await anyio.wait_all_tasks_blocked()
        if end is errors.LifecycleFaulted:
            stage["E1"].crash()
            await lifecycle.continue_generation()
            assert lifecycle.state is State.FAULTED
        else:
            await lifecycle.close()
        await anyio.wait_all_tasks_blocked()
        assert isinstance(later.error, end)
    await leave(stage)
