"""Attaching and leaving: what engines were found with, and what they are left with."""

import anyio
import pytest

from lifecycle import FleetPolicy, PauseMode, Standing, State, Trigger, errors, events
from lifecycle.ports import Acknowledgement, EngineReport
from lifecycle.states import Outcome
from lifecycle.testing import Answer, Refuse, Silence

from .driver_rig import SOURCE, Rig, rig
from .invariants import check, cure, engines_named, leave

pytestmark = pytest.mark.anyio


def standings(stage: Rig) -> list[Standing]:
    """Return how the engines stand, in order."""
    return [view.standing for view in stage.lifecycle.engines]


async def test_attaching_to_ready_engines_opens_submission() -> None:
    """Engines that answer, whole and labelled by nobody, serve the initial version, and carry its label."""
    stage = rig(initial_version=4)
    async with stage.lifecycle as lifecycle:
        assert (lifecycle.state, lifecycle.version) == (State.RUNNING, 4)
        assert standings(stage) == [Standing.SERVING] * 3
        assert [engine.label for engine in stage.engines] == ["run:4"] * 3
        check(stage)
    await leave(stage)


async def test_an_engine_that_is_not_ready_in_time_is_named() -> None:
    """Attaching fails with the name of the engine that never answered, and the lifecycle is closed."""
    stage = rig()
    stage["E2"].on(events.ProbeEngine, *[Silence()] * 50)
    with pytest.raises(errors.AttachFailed) as failure:
        await stage.lifecycle.attach()
    assert failure.value.engines == ("E2",)
    assert stage.lifecycle.state is State.CLOSED
    await leave(stage)


async def test_an_engine_that_starts_slowly_is_waited_for() -> None:
    """An engine that refuses connections at first, and says that it is not ready then, is waited for."""
    stage = rig(1)
    unready = Acknowledgement(outcome=Outcome.DONE, report=EngineReport(kind="scripted", ready=False))
    dead = Acknowledgement(outcome=Outcome.NOT_DONE, unreachable=True, detail="connection refused")
    stage["E1"].on(events.ProbeEngine, Answer(dead), Answer(unready))
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.RUNNING
        assert len(stage.of(events.EngineProbed)) == 3
        check(stage)


async def test_an_engine_that_refuses_to_be_probed_is_not_waited_for() -> None:
    """A refusal is an answer: attaching does not wait for the deadline to say so."""
    stage = rig(2)
    stage["E1"].on(events.ProbeEngine, *[Refuse("no such route")] * 50)
    start = anyio.current_time()
    with pytest.raises(errors.AttachFailed) as failure:
        await stage.lifecycle.attach()
    assert "E1: ProbeEngine is NOT_DONE: no such route" in str(failure.value)
    assert anyio.current_time() - start < stage.lifecycle.deadlines.attach / 2
    await leave(stage)


async def test_a_fleet_without_engines_cannot_be_attached() -> None:
    """Agreement among no engines is no agreement."""
    stage = rig(0)
    with pytest.raises(errors.TransitionRefused, match="no engine"):
        await stage.lifecycle.attach()
    assert stage.lifecycle.state is State.CLOSED


async def test_one_lost_engine_of_three_does_not_keep_a_tolerant_fleet_from_running() -> None:
    """With `min_engines=1` the fleet runs without the one that does not answer, which is fenced as lost."""
    stage = rig(min_engines=1)
    stage["E3"].crash()
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.RUNNING
        assert standings(stage) == [Standing.SERVING, Standing.SERVING, Standing.LOST]
        assert "refused" in lifecycle.engines["E3"].reason
        check(stage)
        await cure(stage)
    await leave(stage)


async def test_an_engine_found_paused_and_whole_is_continued() -> None:
    """A pause that a killed trainer left behind is matched on attaching."""
    stage = rig(2)
    stage["E1"].paused = PauseMode.ABORT
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.RUNNING
        assert stage["E1"].paused is None
        assert stage["E1"].seen.count(events.ContinueGeneration) == 1
        assert events.ContinueGeneration not in stage["E2"].seen
        check(stage)
    await leave(stage)


async def test_an_engine_found_paused_that_proves_nothing_stays_paused_until_a_publication_cures_it() -> None:
    """It may be half-written: it is not continued, does not serve, and a publication puts it back into service."""
    stage = rig()
    stage["E2"].paused = PauseMode.ABORT
    report = EngineReport(kind="scripted", incarnation="1", paused=True, whole=None)
    stage["E2"].on(events.ProbeEngine, Answer(Acknowledgement(outcome=Outcome.DONE, report=report)))
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.SUSPENDED
        assert standings(stage) == [Standing.SERVING, Standing.STALE, Standing.SERVING]
        assert lifecycle.engines["E2"].dirty
        assert stage["E2"].paused is PauseMode.ABORT
        assert lifecycle.why_not(Trigger.RESUME) is not None
        check(stage)
        await lifecycle.publish(SOURCE, version=1)
        await lifecycle.resume()
        assert standings(stage) == [Standing.SERVING] * 3
        check(stage)
    await leave(stage)


async def test_a_paused_engine_is_trusted_where_the_policy_says_so() -> None:
    """With `trust_paused` an engine that proves nothing is continued."""
    stage = rig(1, policy=FleetPolicy(trust_paused=True))
    stage["E1"].paused = PauseMode.ABORT
    report = EngineReport(kind="scripted", incarnation="1", paused=True, whole=None)
    stage["E1"].on(events.ProbeEngine, Answer(Acknowledgement(outcome=Outcome.DONE, report=report)))
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.RUNNING
        assert stage["E1"].paused is None
        check(stage)


async def test_an_engine_found_in_the_middle_of_an_update_is_cured_by_one_publication() -> None:
    """What a killed trainer left open is closed first; the engine is never continued half-written."""
    stage = rig(2)
    odd = stage["E1"]
    odd.paused, odd.whole, odd.session = PauseMode.ABORT, False, True
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.SUSPENDED
        assert lifecycle.engines["E1"].dirty
        check(stage)
        report = await lifecycle.publish(SOURCE, version=1)
        assert (report.failures, report.engines) == ((), ("E1", "E2"))
        check(stage)
    await leave(stage)


@pytest.mark.parametrize("label", ["other:0", "run:3"], ids=["another run's", "another version"])
async def test_an_engine_with_foreign_weights_does_not_serve(label: str) -> None:
    """An engine that another run, or another version, has labelled is stale until a publication reaches it."""
    stage = rig(2)
    stage["E2"].label = label
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.SUSPENDED
        assert standings(stage) == [Standing.SERVING, Standing.STALE]
        check(stage)
        await lifecycle.publish(SOURCE, version=9)
        await lifecycle.resume()
        assert standings(stage) == [Standing.SERVING] * 2
        check(stage)


@pytest.mark.parametrize("label", [None, "default", "/models/base", "v:final"])
async def test_an_undeclared_label_is_replaced_by_the_initial_version(label: str | None) -> None:
    """Where no run has labelled the engine, the user's word for what it holds counts, and is written down."""
    stage = rig(1)
    stage["E1"].label = label
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.RUNNING
        assert stage["E1"].label == "run:0"
        check(stage)


async def test_an_engine_that_cannot_be_labelled_does_not_serve() -> None:
    """Without the label its replies could not name their version."""
    stage = rig(2, min_engines=1)
    stage["E1"].on(events.LabelVersion, Refuse())
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.RUNNING
        assert standings(stage) == [Standing.STALE, Standing.SERVING]
        check(stage)


async def test_without_an_initial_version_nothing_serves_before_the_first_publication() -> None:
    """Engines whose weights nobody vouches for are stale; the first publication puts them into service."""
    stage = rig(2, initial_version=None)
    async with stage.lifecycle as lifecycle:
        assert (lifecycle.state, lifecycle.version) == (State.SUSPENDED, None)
        assert standings(stage) == [Standing.STALE] * 2
        with pytest.raises(errors.TransitionRefused, match="nothing is published yet"):
            await lifecycle.resume()
        check(stage)
        report = await lifecycle.publish(SOURCE, version=5)
        assert (report.previous, report.version) == (None, 5)
        await lifecycle.resume()
        assert standings(stage) == [Standing.SERVING] * 2
        assert lifecycle.budget.version == 5
        check(stage)
    await leave(stage)


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
@pytest.mark.parametrize("way", ["normally", "by an exception", "by cancellation"])
async def test_leaving_by_any_way_leaves_no_whole_engine_paused(way: str, paused: bool) -> None:
    """However `async with` is left, engines are continued, ports and journal are closed."""
    stage = rig()
    with anyio.CancelScope() as scope:
        try:
            async with stage.lifecycle as lifecycle:
                if paused:
                    await lifecycle.suspend()
                    await lifecycle.pause_generation()
                if way == "by an exception":
                    raise ZeroDivisionError
                if way == "by cancellation":
                    scope.cancel()
                    await anyio.sleep_forever()
        except ZeroDivisionError:
            assert way == "by an exception"
    assert scope.cancelled_caught is (way == "by cancellation")
    await leave(stage)


async def test_leaving_in_the_middle_of_an_update_continues_only_whole_engines() -> None:
    """What was partly written stays paused and is reported; what was not touched is continued."""
    stage = rig(2)
    await stage.lifecycle.attach()
    await stage.lifecycle.pause_generation()
    await stage.lifecycle.begin_update(version=1)
    stage["E2"].on(events.TransferWeights, Answer(Acknowledgement(outcome=Outcome.NOT_DONE, untouched=True)))
    stage["E2"].received = lambda engine, request: None
    with pytest.raises(errors.PublicationFailed) as failure:
        await stage.lifecycle.transfer(SOURCE)
    assert engines_named(failure.value) == {"E2"}
    unsettled = await stage.lifecycle.close()
    assert [view.name for view in unsettled] == ["E1"]
    assert stage["E1"].paused is PauseMode.ABORT
    assert stage["E2"].paused is None
    await leave(stage)


async def test_closing_tries_also_engines_that_were_lost() -> None:
    """An engine that did not answer a continue in time, and is back, is not left paused."""
    stage = rig(2, min_engines=1)
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(events.ContinueGeneration, *[Silence()] * 20)
        await lifecycle.publish(SOURCE, version=1)
        assert standings(stage) == [Standing.SERVING, Standing.LOST]
        assert stage["E2"].paused is not None
        check(stage)
        stage["E2"].behave()
    assert stage["E2"].paused is None
    assert await stage.lifecycle.close() == ()
    await leave(stage)


async def test_a_closed_lifecycle_stays_closed() -> None:
    """Nothing can be begun after closing, and closing again is harmless."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        pass
    await lifecycle.close()
    for begin in (lifecycle.attach, lifecycle.resume, lifecycle.recover, lifecycle.abort_generation):
        with pytest.raises(errors.LifecycleClosed):
            await begin()
    with pytest.raises(errors.LifecycleClosed):
        async with lifecycle.admit():
            pytest.fail("admitted by a closed lifecycle")
    await leave(stage)


async def test_attaching_twice_is_refused_and_changes_nothing() -> None:
    """The second attach is an illegal transition; the lifecycle goes on."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.IllegalTransition):
            await lifecycle.attach()
        assert lifecycle.state is State.RUNNING
        check(stage)


async def test_a_transfer_that_cannot_be_closed_does_not_keep_the_lifecycle_open() -> None:
    """CLOSE rolls forward, whatever a transfer raises on the way."""
    stage = rig(2)

    async def broken() -> None:
        raise RuntimeError("the process group is gone")

    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        stage.transfer.close = broken  # type: ignore[method-assign]
        stage.transfer.stop = broken  # type: ignore[method-assign]
    await leave(stage)
