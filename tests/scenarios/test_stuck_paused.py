"""Engines that are left paused with nobody responsible for continuing them."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from lifecycle import PauseMode, State, errors, events
from lifecycle.events import Request
from lifecycle.testing import LandLate, LoseReply, Refuse, Silence, Step
from tests.lifecycle.driver.driver_rig import SOURCE, Engine, Rig, rig
from tests.lifecycle.driver.invariants import check, cure, leave

from .stage import KEEPING, after, break_down, generating, pause_itself, produce_all

pytestmark = pytest.mark.anyio

WITHIN = [events.OpenTransfer, events.BeginUpdate, events.TransferWeights, events.FinishUpdate, events.LabelVersion]


@pytest.mark.parametrize("kind", ["broadcast", "disk"])
@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("within", WITHIN)
async def test_an_update_that_pauses_by_itself_is_matched_by_one_continue(
    within: type[Request], mode: PauseMode, kind: str
) -> None:
    """A server that pauses inside an update is continued once a publication, over and over, and owes nothing."""
    stage = rig(2)
    stage.transfer.kind = kind
    async with stage.lifecycle as lifecycle:
        for engine in stage.engines:
            after(engine, within, pause_itself)
        for version in (1, 2, 3):
            report = await lifecycle.publish(SOURCE, version=version, mode=mode)
            assert report.failures == ()
            assert [engine.paused for engine in stage.engines] == [None, None]
            assert [engine.kinds.count("ContinueGeneration") for engine in stage.engines] == [version, version]
        ledger = lifecycle._cohort.ledger
        assert (ledger.pauses, ledger.matched, ledger.outstanding) == (6, 6, ())
        check(stage)


@pytest.mark.parametrize("within", [events.BeginUpdate, events.TransferWeights])
async def test_an_update_that_pauses_by_itself_and_fails_leaves_nobody_paused(within: type[Request]) -> None:
    """Whole engines are continued, although the one that failed had paused once more than it was told to."""
    stage = rig(2, min_engines=1)
    async with stage.lifecycle as lifecycle:
        after(stage["E1"], within, pause_itself)
        stage["E2"].on(events.BeginUpdate, Refuse("out of memory"))
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.publish(SOURCE, version=1)
        assert "E2: BeginUpdate is NOT_DONE: out of memory" in str(failure.value)
        assert [engine.paused for engine in stage.engines] == [None, None]
        assert lifecycle.state is State.RUNNING
        check(stage)


def refuse(engine: Engine) -> None:
    """Answer 4xx."""
    engine.on(events.PauseGeneration, Refuse())


def lose(engine: Engine) -> None:
    """Answer 500, whether it paused or not."""
    engine.on(events.PauseGeneration, *[LoseReply(applied=True)] * 40)


async def by_itself(stage: Rig) -> None:
    """Pause, and nothing else."""
    await stage.lifecycle.pause_generation()


async def in_a_publication(stage: Rig) -> None:
    """Pause on the way to new weights."""
    await stage.lifecycle.publish(SOURCE, version=1)


@pytest.mark.parametrize(("fail", "continues"), [(refuse, [1, 1, 0]), (lose, [1, 1, 1]), (break_down, [1, 1, 1])])
@pytest.mark.parametrize("pause", [by_itself, in_a_publication])
async def test_one_failed_pause_in_a_fan_out_leaves_no_engine_paused(
    fail: Callable[[Engine], None], continues: list[int], pause: Callable[[Rig], Awaitable[object]]
) -> None:
    """Those that paused are continued, the failed one too where it may have paused, and the error names it alone."""
    stage = rig(3)
    async with stage.lifecycle as lifecycle:
        if pause is by_itself:
            await lifecycle.suspend()
        fail(stage["E3"])
        with pytest.raises(errors.PauseFailed) as failure:
            await pause(stage)
        assert failure.value.engines == ("E3",)
        assert [engine.paused for engine in stage.engines] == [None] * 3
        assert [engine.seen.count(events.ContinueGeneration) for engine in stage.engines] == continues
        assert lifecycle.state is (State.SUSPENDED if pause is by_itself else State.RUNNING)
        check(stage)


@pytest.mark.parametrize(
    "pause", [LoseReply(applied=True), LoseReply(applied=False), LandLate()], ids=["landed", "never landed", "lands"]
)
@pytest.mark.parametrize("refusals", [0, 2, 40], ids=["heard at once", "heard at last", "never heard"])
async def test_a_pause_that_may_have_landed_is_nowhere_taken_for_running(pause: Step, refusals: int) -> None:
    """An uncertain pause ends in RUNNING only by an acknowledged continue; unheard ones end in FAULTED."""
    stage = rig(1)
    odd = stage["E1"]
    async with stage.lifecycle as lifecycle:
        owing: list[State] = []

        def look(_: events.Event) -> None:
            if lifecycle.engines["E1"].debt is not None:
                owing.append(lifecycle.state)

        odd.on(events.PauseGeneration, *[pause] * 40)
        odd.on(events.ContinueGeneration, *[LoseReply(applied=False)] * refusals)
        after(odd, events.ContinueGeneration, Engine.land)
        lifecycle.subscribe(look)
        with pytest.raises(errors.PauseFailed):
            await lifecycle.publish(SOURCE, version=1)
        assert State.RUNNING not in owing
        heard = refusals < 40
        assert lifecycle.state is (State.RUNNING if heard else State.FAULTED)
        assert (lifecycle.engines["E1"].debt is None) is heard
        assert (odd.paused is None) is (heard or pause == LoseReply(applied=False))
        check(stage)
        await cure(stage)
    await leave(stage)


@pytest.mark.parametrize("mode", KEEPING)
async def test_requests_kept_in_an_engine_that_stays_paused_go_on_at_another(mode: PauseMode) -> None:
    """A trainer that waits for its rollouts is not stuck because one engine did not take the new weights."""
    stage = rig(2, manual=True, min_engines=1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, 4)
        stage["E2"].on(events.FinishUpdate, Silence())
        await lifecycle.publish(SOURCE, version=1, mode=mode)
        await produce_all(stage, later)
        assert [len(one.value.output_ids) for one in later] == [4] * 4
        check(stage)
