"""Generations: who may, who waits, and how they end."""

import anyio
import attrs
import pytest

from lifecycle import PauseMode, StalenessBudget, State, errors, events
from lifecycle.ports import Capabilities
from lifecycle.testing import Refuse

from .driver_rig import SOURCE, bring_to, prompt, rig, start
from .invariants import check, leave
from .test_generation import finish, generating

pytestmark = pytest.mark.anyio

REPORTING = Capabilities(pause_modes=frozenset(PauseMode), reports_versions=True)
KEEPING = [PauseMode.KEEP, PauseMode.IN_PLACE, PauseMode.RETRACT]


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


async def test_nothing_is_sent_under_a_ticket_that_was_settled_meanwhile() -> None:
    """A generation that is held learns when it goes on that its rollout is over: another member settled the group."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, lifecycle.admit() as ticket, anyio.create_task_group() as tasks:
        await bring_to(lifecycle, State.PAUSED)
        later = start(tasks, lambda: lifecycle.generate(prompt(), ticket=ticket))
        await anyio.wait_all_tasks_blocked()
        ticket.reject()
        await lifecycle.continue_generation()
        await anyio.wait_all_tasks_blocked()
        assert isinstance(later.error, errors.TicketSettled)
        assert stage.of(events.GenerationSent) == []
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
