"""Publications: the order of things, and back to the state they found."""

from collections.abc import Iterator
from typing import Any

import pytest
from driver_rig import SOURCE, Engine, Rig, bring_to, rig
from invariants import check, cure, leave

from lifecycle import FleetPolicy, PauseMode, Standing, State, Trigger, errors, events
from lifecycle.ports import Bucket, Capabilities, WeightSource
from lifecycle.table import rows
from lifecycle.testing import Crash, Refuse, ScriptedTransfer

pytestmark = pytest.mark.anyio

PUBLICATION = (
    (Trigger.PAUSE_GENERATION, State.SUSPENDED),
    (Trigger.BEGIN_UPDATE, State.PAUSED),
    (Trigger.TRANSFER, State.UPDATING),
    (Trigger.FINISH_UPDATE, State.UPDATING),
)


class Faulty(ScriptedTransfer):
    """Its source fails at one bucket."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(buckets=4)
        self.fails_at = fails_at

    def buckets(self, source: WeightSource, version: int) -> Iterator[Bucket]:
        for bucket in super().buckets(source, version):
            if bucket.index == self.fails_at:
                raise OSError("a shard is missing")
            yield bucket


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


@pytest.mark.parametrize("state", [State.RUNNING, State.SUSPENDED, State.PAUSED])
async def test_a_failed_publication_returns_to_the_state_it_found(state: State) -> None:
    """Where nothing was written, all is as it was, at the old version."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, state)
        stage["E3"].on(events.BeginUpdate, Refuse("busy"))
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.publish(SOURCE, version=3)
        assert failure.value.engines == ("E3",)
        assert (lifecycle.state, lifecycle.version) == (state, 0)
        assert [view.standing for view in lifecycle.engines] == [Standing.SERVING] * 3
        check(stage)


async def test_the_publication_that_cures_a_fleet_goes_to_where_the_failed_one_began() -> None:
    """A trainer that only ever publishes finds its fleet running again, under the version that had failed."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        stage.transfer.fail_on = "send"
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.PAUSED
        assert all(view.dirty for view in lifecycle.engines)
        check(stage)
        stage.transfer.fail_on = None
        await lifecycle.publish(SOURCE, version=1)
        assert (lifecycle.state, lifecycle.version) == (State.RUNNING, 1)
        check(stage)


async def test_resume_false_leaves_submission_closed() -> None:
    """`publish(resume=False)` ends SUSPENDED, with every engine generating at the new version."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        report = await lifecycle.publish(SOURCE, version=1, resume=False)
        assert (lifecycle.state, report.state) == (State.SUSPENDED, State.SUSPENDED)
        check(stage)
        await lifecycle.resume()
        check(stage)


@pytest.mark.parametrize("version", [6, 7])
async def test_a_version_that_does_not_advance_is_refused_before_anything_is_sent(version: int) -> None:
    """Publishing the published version to a fleet that holds it, or a lower one, touches no engine."""
    stage = rig(initial_version=7)
    async with stage.lifecycle as lifecycle:
        for engine in stage.engines:
            engine.requests.clear()
        with pytest.raises(errors.TransitionRefused, match="does not advance") as refusal:
            await lifecycle.publish(SOURCE, version=version)
        assert refusal.value.condition == "version_advances"
        assert [engine.requests for engine in stage.engines] == [[], [], []]
        assert stage.transfer.calls == []
        assert lifecycle.state is State.RUNNING
        check(stage)


async def test_a_publication_in_the_wrong_state_is_refused() -> None:
    """While an update is open there is no second one."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, State.UPDATING)
        with pytest.raises(errors.IllegalTransition):
            await lifecycle.publish(SOURCE, version=9)
        assert lifecycle.state is State.UPDATING
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


async def test_a_source_that_fails_at_once_pauses_nobody() -> None:
    """The error of the first bucket is raised as it is, and no engine has heard of it."""
    stage = rig(transfer=Faulty(fails_at=0))
    async with stage.lifecycle as lifecycle:
        with pytest.raises(OSError, match="a shard is missing"):
            await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.RUNNING
        assert all(events.PauseGeneration not in engine.seen for engine in stage.engines)
        check(stage)


async def test_a_source_that_fails_in_the_middle_leaves_the_version_and_no_half_written_engine_in_service() -> None:
    """The error carries the source's; what was partly written stays paused until the next publication."""
    transfer = Faulty(fails_at=2)
    stage = rig(transfer=transfer)
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.publish(SOURCE, version=1)
        assert [type(error) for error in failure.value.exceptions] == [OSError]
        assert (lifecycle.state, lifecycle.version) == (State.PAUSED, 0)
        assert "stop" in transfer.calls
        check(stage)
        transfer.fails_at = -1
        await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.RUNNING
        check(stage)
    await leave(stage)


async def test_a_source_with_nothing_in_it_is_refused() -> None:
    """Nothing to publish is an error of the caller's, and nobody is paused for it."""
    stage = rig(1, buckets=0)
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.UnusableWeights):
            await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.RUNNING
        check(stage)


async def test_a_publication_without_a_transfer_is_refused_before_anything_is_paused() -> None:
    """Neither the lifecycle nor the call has a transfer: no engine hears of it."""
    stage = rig(1, transfer=None)
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.PublicationFailed, match="transfer"):
            await lifecycle.publish(SOURCE, version=1)
        assert events.PauseGeneration not in stage["E1"].seen
        await lifecycle.publish(SOURCE, version=1, transfer=ScriptedTransfer())
        assert lifecycle.version == 1
        check(stage)


async def test_a_mode_that_an_engine_lacks_is_refused_before_anything_is_sent() -> None:
    """Which modes exist is the server's affair: asking for another is an error of the caller's."""
    stage = rig(1, capabilities=Capabilities(pause_modes=frozenset({PauseMode.ABORT})))
    async with stage.lifecycle as lifecycle:
        with pytest.raises(ValueError, match="E1 cannot pause in mode keep"):
            await lifecycle.publish(SOURCE, version=1, mode=PauseMode.KEEP)
        with pytest.raises(ValueError, match="E1 cannot pause in mode wait"):
            await lifecycle.pause_generation(PauseMode.WAIT)
        assert lifecycle.state is State.RUNNING


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
        assert lifecycle.state is State.PAUSED
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


@pytest.mark.parametrize("call", ["prepare", "connect", "send"])
@pytest.mark.parametrize("how", ["fail_on", "hang_on"])
async def test_a_trainers_half_that_fails_or_hangs_fails_the_publication(call: str, how: str) -> None:
    """Engines that wait for the trainer are freed, nobody stays in the channel, and it is not used again."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        setattr(stage.transfer, how, call)
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.publish(SOURCE, version=1)
        assert any(isinstance(error, errors.TransferFailed) for error in failure.value.exceptions)
        assert lifecycle.version == 0
        check(stage)
        stage.transfer.fail_on = stage.transfer.hang_on = None
        await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.RUNNING
        opened = [event.channel.name for event in stage.of(events.OpenTransfer)]
        assert len(set(opened)) == len(opened) // 3
        check(stage)
    await leave(stage)


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
