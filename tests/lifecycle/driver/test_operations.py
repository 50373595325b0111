"""Pausing, continuing and recovering by hand, with every failure of every request they send."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from lifecycle import FleetPolicy, Standing, State, Trigger, errors, events
from lifecycle.events import Request
from lifecycle.testing import Crash, LoseReply, Refuse, Silence, Step

from .driver_rig import DEADLINES, NAMES, SOURCE, Rig, bring_to, prompt, rig
from .invariants import check, check_now, cure, engines_named, leave
from .test_failures import WAYS

pytestmark = pytest.mark.anyio

Action = Callable[[Rig], Awaitable[object]]

STEPS: dict[str, tuple[State, Action, tuple[type[Request], ...]]] = {
    "pause": (
        State.SUSPENDED,
        lambda stage: stage.lifecycle.pause_generation(),
        (events.AbortGeneration, events.PauseGeneration, events.ContinueGeneration),
    ),
    "continue": (
        State.PAUSED,
        lambda stage: stage.lifecycle.continue_generation(),
        (events.ContinueGeneration,),
    ),
    "begin": (
        State.PAUSED,
        lambda stage: stage.lifecycle.begin_update(version=1),
        (events.ProvePaused, events.OpenTransfer, events.BeginUpdate),
    ),
    "abandon": (
        State.UPDATING,
        lambda stage: stage.lifecycle.abandon_update(),
        (events.AbandonUpdate, events.CloseTransfer),
    ),
    "recover while suspended": (
        State.SUSPENDED,
        lambda stage: stage.lifecycle.recover(),
        (events.ProbeEngine,),
    ),
    "recover while paused": (
        State.PAUSED,
        lambda stage: stage.lifecycle.recover(),
        (events.ProbeEngine, events.ContinueGeneration),
    ),
    "close while paused": (
        State.PAUSED,
        lambda stage: stage.lifecycle.close(),
        (events.ContinueGeneration,),
    ),
    "close while updating": (
        State.UPDATING,
        lambda stage: stage.lifecycle.close(),
        (events.AbandonUpdate, events.ContinueGeneration, events.CloseTransfer),
    ),
}
CASES = [(step, kind) for step, (_, _, kinds) in STEPS.items() for kind in kinds]


@pytest.mark.parametrize("min_engines", [None, 1])
@pytest.mark.parametrize("name", NAMES[::2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("step", "kind"), CASES, ids=lambda value: value if isinstance(value, str) else value.__name__)
async def test_a_step_in_which_a_request_fails_leaves_the_fleet_truthful_and_curable(
    step: str, kind: type[Request], way: str, name: str, min_engines: int | None
) -> None:
    """Whatever one engine does, no invariant breaks, the error names it, and the fleet comes back."""
    stage = rig(min_engines=min_engines)
    state, action, _ = STEPS[step]
    lifecycle, odd = stage.lifecycle, stage[name]
    await lifecycle.attach()
    await lifecycle.resume()
    await bring_to(lifecycle, state)
    odd.on(kind, *[WAYS[way](DEADLINES.of(kind))] * 40)
    try:
        await action(stage)
    except errors.LifecycleError as error:
        assert engines_named(error) >= {name}, error  # noqa: PT017 - whether it is raised depends on the case
    if lifecycle.state is not State.CLOSED:
        check_now(stage)
        if way == "lands late" and kind is not events.BeginUpdate:
            odd.land()
        await cure(stage)
    await leave(stage)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [events.PauseGeneration, events.TransferWeights, events.FinishUpdate])
@pytest.mark.parametrize("second", [events.ContinueGeneration, events.AbandonUpdate, events.ProbeEngine])
async def test_a_way_out_that_fails_too_leaves_the_fleet_truthful_and_curable(
    first: type[Request], second: type[Request], way: str
) -> None:
    """A publication fails at one engine, and what makes it good fails at another."""
    stage = rig(min_engines=1)
    async with stage.lifecycle as lifecycle:
        stage["E1"].on(first, *[LoseReply(applied=True)] * 40)
        stage["E2"].on(second, *[WAYS[way](DEADLINES.of(second))] * 40)
        try:
            await lifecycle.publish(SOURCE, version=1)
        except errors.OperationFailed as error:
            assert "E1" in engines_named(error)  # noqa: PT017 - finishing fails alone
        check(stage)
        await cure(stage)
    await leave(stage)


async def test_a_pause_that_fails_at_one_engine_is_undone_at_all() -> None:
    """E3 refuses; E1 and E2 are continued, and the error names E3 alone."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        stage["E3"].on(events.PauseGeneration, Refuse("500"))
        with pytest.raises(errors.PauseFailed) as failure:
            await lifecycle.pause_generation()
        assert failure.value.engines == ("E3",)
        assert [engine.seen.count(events.ContinueGeneration) for engine in stage.engines] == [1, 1, 0]
        assert lifecycle.state is State.SUSPENDED
        check(stage)
        await lifecycle.resume()
        check(stage)


async def test_a_silent_engine_ends_a_pause_within_its_deadlines() -> None:
    """Pause, compensation and all: the deadlines bound the whole, and nobody is left waiting."""
    stage = rig(min_engines=1)
    async with stage.lifecycle as lifecycle:
        await lifecycle.suspend()
        for kind in (events.AbortGeneration, events.PauseGeneration, events.ContinueGeneration):
            stage["E3"].on(kind, *[Silence()] * 40)
        start = anyio.current_time()
        with pytest.raises(errors.PauseFailed):
            await lifecycle.pause_generation()
        deadlines = lifecycle.deadlines
        assert anyio.current_time() - start <= deadlines.abort + deadlines.pause + deadlines.resume + 0.1
        assert lifecycle.engines["E3"].standing is Standing.LOST
        check(stage)


async def test_pausing_twice_is_illegal_and_pausing_while_running_too() -> None:
    """A pause follows SUSPENDED, and nothing is sent where it does not."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.IllegalTransition):
            await lifecycle.pause_generation()
        await bring_to(lifecycle, State.PAUSED)
        count = len(stage["E1"].requests)
        with pytest.raises(errors.IllegalTransition) as refusal:
            await lifecycle.pause_generation()
        assert Trigger.CONTINUE_GENERATION in refusal.value.allowed
        assert len(stage["E1"].requests) == count
        check(stage)


async def test_too_few_engines_fault_and_recovery_leads_out() -> None:
    """FAULTED closes submission; waiters are told; `recover()` asks everybody again, and trusts no label it finds."""
    stage = rig(3, min_engines=2)
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, State.PAUSED)
        stage["E1"].crash()
        stage["E2"].crash()
        await lifecycle.continue_generation()
        assert lifecycle.state is State.FAULTED
        check(stage)
        with pytest.raises(errors.LifecycleFaulted):
            async with lifecycle.admit():
                pytest.fail("admitted by a faulted lifecycle")
        with pytest.raises(errors.LifecycleFaulted):
            await lifecycle.generate(prompt())
        with pytest.raises(errors.TransitionRefused, match="1 of 2 required engines"):
            await lifecycle.recover()
        assert lifecycle.state is State.FAULTED
        check(stage)
        stage["E2"].restart(label="run:0")
        await lifecycle.recover()
        assert stage.state() is State.PAUSED
        check(stage)
        await lifecycle.publish(SOURCE, version=1)
        await lifecycle.continue_generation()
        await lifecycle.resume()
        assert [view.standing for view in lifecycle.engines] == [Standing.LOST, Standing.SERVING, Standing.SERVING]
        check(stage)
        await cure(stage)
    await leave(stage)


async def test_a_fleet_that_only_a_publication_can_cure_recovers_to_paused() -> None:
    """All dirty: recovery pauses nobody twice, continues nobody, and the next publication leads to RUNNING."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        stage.transfer.fail_on = "send"
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=1)
        for engine in stage.engines:
            engine.requests.clear()
        await lifecycle.recover()
        assert lifecycle.state is State.PAUSED
        assert all(events.PauseGeneration not in engine.seen for engine in stage.engines)
        assert all(events.ContinueGeneration not in engine.seen for engine in stage.engines)
        check(stage)
        with pytest.raises(errors.TransitionRefused, match="required engines are serving"):
            await lifecycle.continue_generation()
        stage.transfer.fail_on = None
        await lifecycle.publish(SOURCE, version=1)
        await lifecycle.continue_generation()
        await lifecycle.resume()
        check(stage)


async def test_recovery_to_paused_pauses_engines_that_run() -> None:
    """Found running with another's weights: stopped until a publication has reached them."""
    stage = rig(2)
    stage["E1"].label = stage["E2"].label = "other:4"
    async with stage.lifecycle as lifecycle:
        assert lifecycle.state is State.SUSPENDED
        await lifecycle.recover()
        assert stage.state() is State.PAUSED
        assert all(engine.paused is not None for engine in stage.engines)
        check(stage)
        await cure(stage)
    await leave(stage)


@pytest.mark.parametrize("step", [Refuse(), LoseReply(applied=False), Crash()], ids=lambda step: type(step).__name__)
async def test_an_engine_that_recovery_cannot_pause_is_fenced(step: Step) -> None:
    """Recovery goes on without it where enough are left, and faults where not."""
    for min_engines, state in ((1, State.PAUSED), (None, State.FAULTED)):
        stage = rig(2, min_engines=min_engines)
        stage["E1"].label = stage["E2"].label = "other:4"
        async with stage.lifecycle as lifecycle:
            stage["E2"].on(events.PauseGeneration, *[step] * 40)
            if state is State.FAULTED:
                with pytest.raises(errors.TransitionRefused, match="E2"):
                    await lifecycle.recover()
            else:
                await lifecycle.recover()
            assert lifecycle.state is state
            assert lifecycle.engines["E2"].standing is Standing.LOST
            check(stage)
            await cure(stage)
        await leave(stage)


async def test_a_strict_fleet_faults_as_soon_as_one_engine_is_gone() -> None:
    """`on_engine_failure="fault"` counts every engine as required, whatever `min_engines` says."""
    stage = rig(policy=FleetPolicy(min_engines=1, on_engine_failure="fault"))
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, State.PAUSED)
        stage["E2"].on(events.ContinueGeneration, *[Refuse()] * 40)
        await lifecycle.continue_generation()
        assert lifecycle.state is State.FAULTED
        check(stage)
        await cure(stage)
    await leave(stage)
