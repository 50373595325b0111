"""Publications: the order of things, and back to the state they found."""

from collections.abc import Iterator

import pytest

from lifecycle import FleetPolicy, PauseMode, State, Trigger, errors, events
from lifecycle.ports import Bucket, WeightSource
from lifecycle.table import rows
from lifecycle.testing import Crash, Refuse, ScriptedTransfer

from .driver_rig import SOURCE, bring_to, rig
from .invariants import check, cure, leave

pytestmark = pytest.mark.anyio

PUBLICATION = (
    (Trigger.PAUSE_GENERATION, State.SUSPENDED),
    (Trigger.BEGIN_UPDATE, State.PAUSED),
    (Trigger.TRANSFER, State.UPDATING),
    (Trigger.FINISH_UPDATE, State.UPDATING),
)


async def test_requests_reach_every_engine_in_the_legal_order() -> None:
    """What each engine receives in a publication is what the table's rows say, in their order."""
    stage = rig(buckets=2)
    async with stage.lifecycle as lifecycle:
        for engine in stage.engines:
            engine.requests.clear()
        await lifecycle.publish(SOURCE, version=1)
        expected = []
        for trigger, state in PUBLICATION:
            kinds = [kind for kind in rows(trigger, state)[0].requests if kind.fact is not None]
            expected += kinds * (2 if trigger is Trigger.TRANSFER else 1)
        assert [engine.seen for engine in stage.engines] == [expected] * 3
        check(stage)
    await leave(stage)


async def test_each_step_waits_for_every_engine() -> None:
    """No engine receives a request before all have answered the one before."""
    stage = rig(buckets=3)
    order: list[type[events.Request]] = []
    async with stage.lifecycle as lifecycle:
        for engine in stage.engines:
            engine.received = lambda _, request: order.append(type(request))
        await lifecycle.publish(SOURCE, version=1)
        assert len(order) % 3 == 0
        assert all(len(set(order[i : i + 3])) == 1 for i in range(0, len(order), 3))


@pytest.mark.parametrize("state", [State.RUNNING, State.SUSPENDED, State.PAUSED])
async def test_a_publication_returns_to_the_state_it_found(state: State) -> None:
    """Submission and generation are as before, at the new version."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, state)
        report = await lifecycle.publish(SOURCE, version=3)
        assert (lifecycle.state, lifecycle.version, report.state) == (state, 3, state)
        check(stage)
        await cure(stage)
    await leave(stage)


async def test_resume_false_leaves_submission_closed() -> None:
    """`publish(resume=False)` ends SUSPENDED, with every engine generating at the new version."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        report = await lifecycle.publish(SOURCE, version=1, resume=False)
        assert (lifecycle.state, report.state) == (State.SUSPENDED, State.SUSPENDED)
        check(stage)
        await lifecycle.resume()
        check(stage)


async def test_the_report_says_what_was_done() -> None:
    """Versions, engines, buckets, bytes, pause and state are those of this publication."""
    stage = rig(buckets=5)
    async with stage.lifecycle as lifecycle:
        report = await lifecycle.publish(SOURCE, version=2)
        assert (report.version, report.previous) == (2, 0)
        assert report.engines == ("E1", "E2", "E3")
        assert (report.buckets, report.nbytes) == (5, 40)
        assert (report.fenced, report.failures, report.interrupted) == ({}, (), 0)
        assert 0 < report.transfer_seconds < report.pause_seconds
        assert report.pause_seconds == stage.of(events.GenerationReleased)[-1].seconds


async def test_the_version_advances_once_however_many_buckets_there_are() -> None:
    """Seven buckets are one version."""
    stage = rig(buckets=7)
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=5)
        assert [(event.previous, event.version) for event in stage.of(events.VersionAdvanced)] == [(0, 5)]
        verified = stage.of(events.WeightsVerified)
        assert max(event.seq for event in verified) < stage.of(events.VersionAdvanced)[0].seq
        check(stage)


async def test_the_first_bucket_is_made_while_engines_still_generate() -> None:
    """For some transfers making it is most of the work, so nobody is paused for it."""
    paused: list[list[PauseMode | None]] = []

    class Watching(ScriptedTransfer):
        def buckets(self, source: WeightSource, version: int) -> Iterator[Bucket]:
            for bucket in super().buckets(source, version):
                paused.append([engine.paused for engine in stage.engines])
                yield bucket

    stage = rig(transfer=Watching(buckets=2))
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        assert paused == [[None] * 3, [PauseMode.ABORT] * 3]


async def test_the_update_can_be_walked_by_hand() -> None:
    """begin, transfer and finish do what publish does, with the caller between the steps."""
    stage = rig(buckets=3)
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, State.PAUSED)
        await lifecycle.begin_update(version=8)
        check(stage)
        assert await lifecycle.transfer(SOURCE) == 3
        check(stage)
        await lifecycle.finish_update(resume=False)
        assert (lifecycle.state, lifecycle.version) == (State.SUSPENDED, 8)
        check(stage)
    await leave(stage)


async def test_an_update_cannot_be_finished_before_its_last_bucket() -> None:
    """The guard says why; the update stays open and can be completed, or abandoned."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, State.UPDATING)
        with pytest.raises(errors.TransitionRefused, match="last bucket"):
            await lifecycle.finish_update()
        assert lifecycle.state is State.UPDATING
        await lifecycle.abandon_update()
        assert stage.state() is State.PAUSED
        check(stage)
        await lifecycle.continue_generation()
        check(stage)


async def test_transferring_without_an_open_update_is_illegal() -> None:
    """Weights go nowhere before BEGIN_UPDATE."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.IllegalTransition):
            await lifecycle.transfer(SOURCE)
        check(stage)


async def test_the_channel_is_opened_once_for_many_publications() -> None:
    """The same members use the standing channel; a membership that changed makes a new one, and leaves the old."""
    stage = rig(min_engines=1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        await lifecycle.publish(SOURCE, version=2)
        assert len(stage.of(events.OpenTransfer)) == 3
        stage["E3"].on(events.AbortGeneration, Crash())
        report = await lifecycle.publish(SOURCE, version=3)
        assert (report.engines, set(report.fenced)) == (("E1", "E2"), {"E3"})
        assert [event.engine for event in stage.of(events.OpenTransfer)[3:]] == ["E1", "E2"]
        check(stage)
    await leave(stage)


async def test_a_strict_fleet_publishes_and_faults_when_an_engine_fails_to_follow() -> None:
    """`on_engine_failure="fault"` does not disturb a publication, and never goes on without an engine."""
    stage = rig(policy=FleetPolicy(min_engines=1, on_engine_failure="fault"))
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.RUNNING
        check(stage)
        stage["E2"].on(events.Canary, Refuse())
        report = await lifecycle.publish(SOURCE, version=2)
        assert (lifecycle.state, report.state) == (State.FAULTED, State.FAULTED)
        check(stage)
        await cure(stage)
    await leave(stage)
