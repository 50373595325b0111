"""Many callers at once: one operation at a time, and close() before all others."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lifecycle import Lifecycle, PauseMode, State, Trigger, errors, events
from lifecycle.events import Request
from lifecycle.testing import Delay, ScriptedTransfer

from .driver_rig import SOURCE, Engine, Rig, bring_to, rig, start
from .invariants import check, leave

pytestmark = pytest.mark.anyio


def slow(stage: Rig) -> None:
    """Let every transfer take half of its deadline."""
    for engine in stage.engines:
        engine.on(events.TransferWeights, *[Delay(0.5)] * 20)


async def test_two_publications_at_once_follow_each_other() -> None:
    """The second waits for the first; the requests of the two do not mix."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        first = start(group, lambda: lifecycle.publish(SOURCE, version=1))
        await anyio.lowlevel.checkpoint()
        second = start(group, lambda: lifecycle.publish(SOURCE, version=2))
        await anyio.sleep(10)
        assert (first.value.version, second.value.previous, second.value.version) == (1, 1, 2)
        targets = [event.target for event in stage.of(events.TransferWeights)]
        assert targets == sorted(targets)
        check(stage)


async def test_of_two_publications_of_one_version_one_is_refused() -> None:
    """The guard is asked when the turn has come, not when the call was made."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        outcomes = [start(group, lambda: lifecycle.publish(SOURCE, version=1)) for _ in range(2)]
        await anyio.sleep(10)
        assert sorted(type(outcome.error).__name__ for outcome in outcomes) == ["NoneType", "TransitionRefused"]
        assert len(stage.of(events.VersionAdvanced)) == 1
        check(stage)


async def test_two_begins_at_once_open_one_session() -> None:
    """Of two callers that begin an update from PAUSED exactly one does; the other is told where it stands."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        await bring_to(lifecycle, State.PAUSED)
        outcomes = [start(group, lambda: lifecycle.begin_update(version=1)) for _ in range(2)]
        await anyio.sleep(10)
        assert sorted(type(outcome.error).__name__ for outcome in outcomes) == ["IllegalTransition", "NoneType"]
        assert len(stage.of(events.BeginUpdate)) == 2
        check(stage)


@pytest.mark.parametrize("name", ["suspend", "resume", "pause_generation", "continue_generation"])
async def test_a_caller_that_does_not_want_to_wait_is_told_what_is_in_flight(name: str) -> None:
    """With `wait=False` it gets `Busy`, and the operation that holds the lifecycle goes on."""
    stage = rig(2)
    slow(stage)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        publication = start(group, lambda: lifecycle.publish(SOURCE, version=1))
        await anyio.sleep(0.1)
        with pytest.raises(errors.Busy) as busy:
            await getattr(lifecycle, name)(wait=False)
        assert busy.value.in_flight is lifecycle.in_flight is Trigger.TRANSFER
        await anyio.sleep(10)
        assert publication.value.version == 1
        check(stage)


async def test_a_suspend_during_a_publication_waits_for_its_end() -> None:
    """It is not lost, and nobody is cancelled by it: the fleet ends SUSPENDED at the new version."""
    stage = rig(2)
    slow(stage)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        publication = start(group, lambda: lifecycle.publish(SOURCE, version=1))
        await anyio.sleep(0.1)
        suspension = start(group, lifecycle.suspend)
        await anyio.sleep(10)
        assert (publication.error, suspension.error) == (None, None)
        assert (lifecycle.state, lifecycle.version) == (State.SUSPENDED, 1)
        check(stage)


class Meddling(ScriptedTransfer):
    """Calls the lifecycle from inside the operation that uses the transfer."""

    call: Callable[[], Awaitable[object]]
    error: BaseException | None = None

    async def prepare(self, members: Any, *, timeout: float) -> Any:
        try:
            await self.call()
        except errors.LifecycleError as error:
            self.error = error
        return await super().prepare(members, timeout=timeout)


@pytest.mark.parametrize(
    "call",
    [Lifecycle.suspend, Lifecycle.resume, Lifecycle.recover, Lifecycle.abort_generation, Lifecycle.close],
    ids=lambda call: call.__name__,
)
async def test_an_operation_called_from_inside_another_is_refused(call: Callable[[Any], Awaitable[object]]) -> None:
    """It raises `Reentrant` instead of waiting for itself, and what was being done goes on, cleaned up as ever."""
    transfer = Meddling()
    stage = rig(2, transfer=transfer)
    transfer.call = lambda: call(stage.lifecycle)
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        assert isinstance(transfer.error, errors.Reentrant)
        assert "BEGIN_UPDATE" in str(transfer.error)
        check(stage)
        stage["E1"].on(events.BeginUpdate, Delay(5))
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=2)
        check(stage)
    await leave(stage)


async def test_asking_what_is_possible_changes_nothing_and_never_raises() -> None:
    """`can` and `why_not` answer for every trigger in every state, with a reason."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        for state in (State.RUNNING, State.SUSPENDED, State.PAUSED, State.UPDATING):
            await bring_to(lifecycle, state)
            before = len(stage.sink.events)
            for trigger in Trigger:
                assert lifecycle.can(trigger) is (lifecycle.why_not(trigger) is None)
            assert len(stage.sink.events) == before
            assert lifecycle.in_flight is None
    assert "possible here" in (lifecycle.why_not(Trigger.RESUME) or "")


async def test_a_subscriber_may_settle_tickets_and_sees_every_event_in_order() -> None:
    """What a callback causes follows what it was called for."""
    stage = rig(1)
    seen: list[events.Event] = []
    async with stage.lifecycle as lifecycle:
        ticket = await lifecycle.admit().__aenter__()

        def settle(event: events.Event) -> None:
            seen.append(event)
            if isinstance(event, events.SubmissionSuspended):
                ticket.reject()

        unsubscribe = lifecycle.subscribe(settle)
        await lifecycle.publish(SOURCE, version=1)
        unsubscribe()
        count = len(seen)
        await lifecycle.suspend()
        assert len(seen) == count
        assert [event.seq for event in seen] == list(range(seen[0].seq, seen[0].seq + count))
        assert lifecycle.running == 0
        check(stage)


async def test_a_late_reply_of_a_request_that_was_given_up_changes_nothing() -> None:
    """The deadline has passed, the request was recorded as unknown: what comes later is nobody's."""
    stage = rig(1)
    late: list[Engine] = []

    def act_late(engine: Engine, request: Request) -> None:
        if isinstance(request, events.AbandonUpdate) and not late:
            late.append(engine)
            engine.label = "run:1"

    async with stage.lifecycle as lifecycle:
        stage["E1"].on(events.FinishUpdate, Delay(5))
        stage["E1"].acted = act_late
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=1, mode=PauseMode.ABORT)
        assert late
        assert lifecycle.version == 0
        assert stage.of(events.VersionAdvanced) == []
        check(stage)
