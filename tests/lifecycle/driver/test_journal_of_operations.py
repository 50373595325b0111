"""A gapless history in which every request has one fact; what is dangerous is on disk before it goes out."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lifecycle import Lifecycle, Outcome, State, errors, events
from lifecycle.events import Request
from lifecycle.journal import read
from lifecycle.testing import Crash, LoseReply, ScriptedEngine, ScriptedTransfer
from lifecycle.trace import verify_file

from .driver_rig import SOURCE, Engine, bring_to, rig
from .invariants import check, cure, leave

pytestmark = pytest.mark.anyio


async def test_the_history_has_no_gap() -> None:
    """`seq` counts every event from 1, also through failures."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        stage.transfer.fail_on = "send"
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=2)
    assert [event.seq for event in stage.sink.events] == list(range(1, len(stage.sink.events) + 1))
    await leave(stage)


async def test_every_request_to_an_engine_has_exactly_one_fact_however_often_it_was_sent() -> None:
    """A request that was lost and sent again is one request with one outcome."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        stage["E1"].on(events.PauseGeneration, LoseReply(applied=False), LoseReply(applied=True))
        await lifecycle.pause_generation()
        requests = [event for event in stage.of(events.PauseGeneration) if event.engine == "E1"]
        facts = [event for event in stage.of(events.EnginePaused) if event.engine == "E1"]
        assert [fact.request for fact in facts] == [request.seq for request in requests]
        assert len(facts) == 1
        check(stage)


async def test_a_request_is_written_before_it_is_performed_and_its_fact_after() -> None:
    """A killed trainer leaves a record of what it may have done."""
    stage = rig(1)
    order: list[tuple[str, int]] = []

    def note(when: str, request: Request) -> None:
        order.append((when, request.seq))
        written = {event.seq for event in stage.sink.events}
        assert request.seq in written
        assert not any(fact.request == request.seq for fact in stage.of(events.EngineFact))

    async with stage.lifecycle as lifecycle:
        stage["E1"].received = lambda _, request: note("received", request)
        stage["E1"].acted = lambda _, request: note("acted", request)
        await lifecycle.publish(SOURCE, version=1)
        assert len(order) == 2 * len({seq for _, seq in order})


@pytest.mark.parametrize("kind", [events.PauseGeneration, events.BeginUpdate, events.TransferWeights])
async def test_what_leaves_traces_in_an_engine_is_durable_before_it_goes_out(kind: type[Request]) -> None:
    """Pauses and updates are on disk before the engine hears of them."""
    stage = rig(2)
    performed: list[Request] = []

    def durable(_: Engine, request: Request) -> None:
        if isinstance(request, kind):
            assert stage.sink.synced >= request.seq
            performed.append(request)

    async with stage.lifecycle as lifecycle:
        for engine in stage.engines:
            engine.received = durable
        await lifecycle.publish(SOURCE, version=1)
        assert performed


@pytest.mark.parametrize("state", [State.SUSPENDED, State.PAUSED, State.UPDATING])
async def test_a_journal_that_cannot_be_written_lets_nothing_dangerous_out(state: State) -> None:
    """The operation fails with the journal's error, no engine has heard of it, and the fleet is as it was."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, state)
        before = [list(engine.requests) for engine in stage.engines]
        stage.sink.broken = True
        operations: dict[State, Callable[[], Awaitable[object]]] = {
            State.SUSPENDED: lifecycle.pause_generation,
            State.PAUSED: lambda: lifecycle.begin_update(version=1),
            State.UPDATING: lambda: lifecycle.transfer(SOURCE),
        }
        with pytest.raises(OSError, match="no space left"):
            await operations[state]()
        dangerous = (events.PauseGeneration, events.BeginUpdate, events.TransferWeights)
        for engine, already in zip(stage.engines, before, strict=True):
            assert not any(isinstance(request, dangerous) for request in engine.requests[len(already) :])
        assert not any(view.dirty for view in lifecycle.engines)
        check(stage)
        stage.sink.broken = False
        await cure(stage)
    await leave(stage)


async def test_a_transition_that_was_committed_is_not_rolled_back_in_the_journal() -> None:
    """Of each attempt that is begun exactly one end is told."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(events.TransferWeights, Crash())
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=1)
        await cure(stage)
    begun = len(stage.of(events.TransitionBegun))
    ended = len(stage.of(events.TransitionCommitted)) + len(stage.of(events.TransitionRolledBack))
    assert begun == ended
    await leave(stage)


async def test_a_pause_that_is_unknown_is_a_debt_in_the_journal_until_it_is_settled() -> None:
    """Who reads the journal of a killed trainer finds what may be paused."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        stage["E1"].on(events.PauseGeneration, *[LoseReply(applied=True)] * 40)
        with pytest.raises(errors.PauseFailed):
            await lifecycle.pause_generation()
        fact, settled = stage.of(events.EnginePaused)[0], stage.of(events.DebtSettled)[0]
        assert fact.outcome is Outcome.UNKNOWN
        assert fact.seq < settled.seq
        check(stage)


async def test_a_journal_file_tells_the_whole_story_and_is_continued(tmp_path: Path) -> None:
    """Two lifecycles one after the other write one history, and the verifier finds it sound."""
    path = tmp_path / "run" / "journal.jsonl"
    for version in (1, 2):
        engines = [ScriptedEngine("E1"), ScriptedEngine("E2", label=f"run:{version - 1}")]
        async with Lifecycle(
            engines, transfer=ScriptedTransfer(), journal=path, initial_version=version - 1
        ) as lifecycle:
            await lifecycle.publish(SOURCE, version=version)
    numbers = [event.seq for _, event in read(path)]
    assert numbers == list(range(1, len(numbers) + 1))
    verdict = verify_file(path)
    assert verdict.sound, verdict.violations
    assert (verdict.version, verdict.closed, verdict.unmatched) == (2, True, ())
