"""Around the commit point: who is fenced alone, and what fails the whole publication."""

import pytest

from lifecycle import PauseMode, StalenessBudget, Standing, State, Trigger, errors, events
from lifecycle.testing import Crash, LoseReply, Refuse, Step

from .driver_rig import SOURCE, rig
from .invariants import check, cure, leave

pytestmark = pytest.mark.anyio

FINISHING = pytest.mark.parametrize("kind", [events.FinishUpdate, events.VerifyWeights])
WAYS = pytest.mark.parametrize(
    "step", [Refuse(), LoseReply(applied=False), LoseReply(applied=True), Crash()], ids=lambda step: type(step).__name__
)


@FINISHING
@WAYS
async def test_an_engine_that_does_not_finish_is_fenced_alone_while_enough_are_left(
    kind: type[events.Request], step: Step
) -> None:
    """The others get the version; it stays paused, because its weights may be partly written, until the next one."""
    stage = rig(min_engines=2)
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(kind, *[step] * 20)
        report = await lifecycle.publish(SOURCE, version=1)
        assert (lifecycle.state, lifecycle.version) == (State.RUNNING, 1)
        assert report.engines == ("E1", "E3")
        assert set(report.fenced) == {"E2"}
        assert [error.engine for error in report.failures if isinstance(error, errors.EngineFailure)] == ["E2"]
        assert events.ContinueGeneration not in stage["E2"].seen
        check(stage)
        stage.behave()
        if not isinstance(step, Crash):
            report = await lifecycle.publish(SOURCE, version=2)
            assert (report.engines, report.failures) == (("E1", "E2", "E3"), ())
            check(stage)
        await cure(stage)
    await leave(stage)


@FINISHING
@WAYS
async def test_an_engine_that_does_not_finish_fails_the_publication_where_it_is_needed(
    kind: type[events.Request], step: Step
) -> None:
    """The version does not advance, for anybody; the same version can be published again."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(kind, *[step] * 20)
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.publish(SOURCE, version=1)
        assert failure.value.engines == ("E2",)
        assert lifecycle.version == 0
        assert stage.of(events.VersionAdvanced) == []
        check(stage)
        await cure(stage)
    await leave(stage)


@pytest.mark.parametrize("min_engines", [None, 1])
async def test_an_engine_whose_canary_fails_is_not_routed_to(min_engines: int | None) -> None:
    """It holds the version and runs, but nothing has proven that it generates: only a publication puts it back."""
    stage = rig(min_engines=min_engines)
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(events.Canary, Refuse("no token"))
        report = await lifecycle.publish(SOURCE, version=1)
        assert "no token" in report.fenced["E2"]
        assert lifecycle.version == 1
        assert lifecycle.state is (State.RUNNING if min_engines == 1 else State.SUSPENDED)
        assert lifecycle.engines["E2"].standing is Standing.STALE
        assert stage["E2"].paused is None
        check(stage)
        if lifecycle.state is State.RUNNING:
            await lifecycle.suspend()
        await lifecycle.recover()
        assert lifecycle.engines["E2"].standing is Standing.STALE
        check(stage)
        report = await lifecycle.publish(SOURCE, version=1)
        assert report.engines == ("E1", "E2", "E3")
        check(stage)
        await cure(stage)


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_cache_that_was_not_flushed_counts_where_no_request_may_hold_it(mode: PauseMode) -> None:
    """After ABORT and WAIT nothing holds the cache, so that a refusal is a failure; kept requests may hold theirs."""
    stage = rig(min_engines=1)
    async with stage.lifecycle as lifecycle:
        stage["E2"].on(events.FlushCache, Refuse("requests are pending"))
        report = await lifecycle.publish(SOURCE, version=1, mode=mode)
        if mode.keeps_requests:
            assert (report.fenced, report.failures) == ({}, ())
        else:
            assert "serves caches of old weights" in report.fenced["E2"]
            await lifecycle.suspend()
            await lifecycle.recover()
            assert lifecycle.engines["E2"].standing is Standing.STALE
        check(stage)
        await cure(stage)


async def test_without_enough_serving_engines_submission_stays_closed_after_the_commit_point() -> None:
    """The version stands, nothing is raised, and the reason why RESUME is refused names the engine."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        stage["E3"].on(events.FlushCache, Refuse())
        report = await lifecycle.publish(SOURCE, version=1)
        assert (report.state, lifecycle.version) == (State.SUSPENDED, 1)
        assert "E3" in (lifecycle.why_not(Trigger.RESUME) or "")
        check(stage)


async def test_an_engine_that_never_continues_faults_a_fleet_that_needs_it_without_an_error() -> None:
    """After the commit point nothing is raised: the report and the state say it."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        stage["E1"].on(events.ContinueGeneration, *[LoseReply(applied=False)] * 40)
        report = await lifecycle.publish(SOURCE, version=1)
        assert (report.state, lifecycle.version) == (State.FAULTED, 1)
        assert {error.engine for error in report.failures if isinstance(error, errors.EngineFailure)} == {"E1"}
        assert lifecycle.engines["E1"].debt is not None
        check(stage)
        await cure(stage)
    await leave(stage)


@pytest.mark.parametrize("kind", [events.FlushCache, events.ContinueGeneration, events.Canary])
@pytest.mark.parametrize("step", [Refuse(), LoseReply(applied=False), Crash()], ids=lambda step: type(step).__name__)
async def test_a_publication_found_paused_never_raises_after_its_commit_point(
    kind: type[events.Request], step: Step
) -> None:
    """Going back to PAUSED may fail, or be impossible; the publication has succeeded."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        stage["E2"].on(kind, *[step] * 40)
        report = await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.version == 1
        assert report.failures
        check(stage)
        await cure(stage)
    await leave(stage)


async def test_a_pause_that_fails_on_the_way_back_to_paused_is_reported() -> None:
    """The fleet is left SUSPENDED, at the new version, and the report names the engine."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        stage["E2"].on(events.PauseGeneration, Refuse())
        report = await lifecycle.publish(SOURCE, version=1)
        assert (report.state, lifecycle.version) == (State.SUSPENDED, 1)
        assert [type(error) for error in report.failures] == [errors.PauseFailed]
        check(stage)


async def test_a_pause_in_another_mode_is_restored_as_it_was() -> None:
    """A user who kept requests in the engines finds them kept after the publication."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        await lifecycle.pause_generation(PauseMode.KEEP)
        await lifecycle.publish(SOURCE, version=1)
        assert lifecycle.state is State.PAUSED
        assert [engine.paused for engine in stage.engines] == [PauseMode.KEEP] * 3
        check(stage)


@pytest.mark.parametrize("consumed", [None, 3])
async def test_the_budget_advances_with_the_version_and_not_without(consumed: int | None) -> None:
    """Capacity grows by what training took, once, and only when the publication succeeds."""
    budget = StalenessBudget(batch_size=4, max_staleness=1)
    stage = rig(budget=budget)
    async with stage.lifecycle as lifecycle:
        assert budget.capacity() == 8
        stage["E1"].on(events.BeginUpdate, Refuse())
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=1, consumed=consumed)
        assert budget.capacity() == 8
        await lifecycle.publish(SOURCE, version=1, consumed=consumed)
        assert budget.capacity() == 8 + (4 if consumed is None else consumed)
