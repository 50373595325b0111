"""Publications that are refused, or fail before the commit point."""

from collections.abc import Iterator

import pytest

from lifecycle import PauseMode, Standing, State, errors, events
from lifecycle.ports import Bucket, Capabilities, WeightSource
from lifecycle.testing import Crash, Refuse, ScriptedTransfer

from .driver_rig import SOURCE, bring_to, rig
from .invariants import check, leave

pytestmark = pytest.mark.anyio


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


async def test_a_fleet_that_died_in_a_publication_returns_to_where_it_was() -> None:
    """Recovering is no wish to stay paused: the publication that cures the fleet goes back to what the first found."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle:
        for engine in stage.engines:
            engine.on(events.TransferWeights, Crash())
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=1)
        assert stage.state() is State.FAULTED
        stage.behave()
        await lifecycle.recover()
        assert stage.state() is State.PAUSED
        report = await lifecycle.publish(SOURCE, version=1)
        assert (report.state, report.fenced) == (State.RUNNING, {})
        check(stage)
    await leave(stage)
