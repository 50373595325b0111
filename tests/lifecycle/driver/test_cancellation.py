"""Cancellation at every request of every operation: the caller gets it, and nothing is left that is not true."""

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from lifecycle import PauseMode, Standing, State, events
from lifecycle.testing import Refuse, Silence

from .driver_rig import NAMES, SOURCE, Rig, bring_to, rig
from .invariants import check, check_now, cure, leave, tasks

Action = Callable[[Rig], Awaitable[object]]

OPERATIONS: dict[str, tuple[State, Action]] = {
    "publish": (State.RUNNING, lambda rig: rig.lifecycle.publish(SOURCE, version=1)),
    "publish while suspended": (State.SUSPENDED, lambda rig: rig.lifecycle.publish(SOURCE, version=1)),
    "publish while paused": (State.PAUSED, lambda rig: rig.lifecycle.publish(SOURCE, version=1)),
    "publish and keep requests": (
        State.RUNNING,
        lambda rig: rig.lifecycle.publish(SOURCE, version=1, mode=PauseMode.KEEP),
    ),
    "pause": (State.SUSPENDED, lambda rig: rig.lifecycle.pause_generation()),
    "continue": (State.PAUSED, lambda rig: rig.lifecycle.continue_generation()),
    "recover while suspended": (State.SUSPENDED, lambda rig: rig.lifecycle.recover()),
    "recover while paused": (State.PAUSED, lambda rig: rig.lifecycle.recover()),
    "begin": (State.PAUSED, lambda rig: rig.lifecycle.begin_update(version=1)),
    "transfer": (State.UPDATING, lambda rig: rig.lifecycle.transfer(SOURCE)),
    "abandon": (State.UPDATING, lambda rig: rig.lifecycle.abandon_update()),
}


def _nothing(_: Rig) -> None:
    """Everything works."""


def _transfer_refused(stage: Rig) -> None:
    stage["E2"].on(events.TransferWeights, Refuse())


def _never_continues(stage: Rig) -> None:
    stage["E2"].on(events.ContinueGeneration, *[Silence()] * 10)


def _all_dirty(stage: Rig) -> None:
    stage["E2"].on(events.AbandonUpdate, Refuse())
    stage.transfer.fail_on = "send"


TROUBLES: dict[str, Callable[[Rig], None]] = {
    "nothing": _nothing,
    "a refused transfer": _transfer_refused,
    "a silent continue": _never_continues,
    "a failed send": _all_dirty,
}


async def _cancelled_at(count: int, name: str, trouble: str, *, after: bool, min_engines: int | None) -> bool:
    """Cancel operation `name` at its `count`-th request. Returns whether it had so many."""
    stage = rig(2, min_engines=min_engines)
    state, action = OPERATIONS[name]
    await stage.lifecycle.attach()
    await stage.lifecycle.resume()
    await bring_to(stage.lifecycle, state)
    TROUBLES[trouble](stage)
    before = tasks()
    reached = False

    def cancel() -> None:
        nonlocal reached
        reached = True
        scope.cancel()

    stage.when(count, cancel, after=after)
    failed = False
    with anyio.CancelScope() as scope:
        try:
            await action(stage)
            await anyio.lowlevel.checkpoint()  # where it was committed already, the caller is told here
        except Exception:  # noqa: BLE001 - trouble is raised as what it is, unless the cancellation came before
            failed = True
    assert scope.cancelled_caught is reached or failed
    assert not (failed and trouble == "nothing")
    assert tasks() == before
    check_now(stage)
    await cure(stage)
    await leave(stage)
    return reached


@pytest.mark.anyio
@pytest.mark.parametrize("after", [False, True], ids=["before it acts", "after it acted"])
@pytest.mark.parametrize(
    ("trouble", "min_engines"),
    [
        ("nothing", None),
        ("a refused transfer", 1),
        ("a silent continue", None),
        ("a silent continue", 1),
        ("a failed send", None),
    ],
)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_can_be_cancelled_at_each_of_its_requests(
    name: str, trouble: str, min_engines: int | None, after: bool
) -> None:
    """Wherever it is cancelled, the caller gets its cancellation, no invariant breaks, and the fleet comes back."""
    count = 1
    while await _cancelled_at(count, name, trouble, after=after, min_engines=min_engines):
        count += 1
    assert count > 1


@pytest.mark.anyio
@pytest.mark.parametrize("after", [False, True], ids=["before it acts", "after it acted"])
async def test_a_cancelled_attach_leaves_the_lifecycle_closed_and_no_engine_paused(after: bool) -> None:
    """Attaching to engines found paused, cancelled at each request, ends CLOSED, and what was touched is continued."""
    count, reached = 1, True
    while reached:
        reached = False
        stage = rig()
        for engine in stage.engines:
            engine.paused = PauseMode.ABORT
        before = tasks()

        def cancel() -> None:
            nonlocal reached
            reached = True
            scope.cancel()

        stage.when(count, cancel, after=after)
        with anyio.CancelScope() as scope:
            async with stage.lifecycle:
                pass
        assert scope.cancelled_caught is reached
        assert stage.lifecycle.state is State.CLOSED
        assert tasks() == before
        owed = {view.name for view in stage.lifecycle.engines if view.debt is not None}
        assert not owed
        await leave_untouched(stage)
        count += 1
    assert count > len(NAMES)


async def leave_untouched(stage: Rig) -> None:
    """Check what closing leaves; engines that were never asked to continue stay as they were found."""
    for engine in stage.engines:
        if not any(isinstance(request, events.ContinueGeneration) for request in engine.requests):
            engine.paused = None
    await leave(stage)


@pytest.mark.anyio
async def test_a_cancellation_between_attach_and_resume_closes() -> None:
    """A lifecycle whose `async with` is never entered is closed."""
    stage = rig()
    resume, scope = stage.lifecycle.resume, anyio.CancelScope()

    async def cancelled_resume(*, wait: bool = True) -> None:
        scope.cancel()
        await resume(wait=wait)
        await anyio.lowlevel.checkpoint()

    stage.lifecycle.resume = cancelled_resume  # type: ignore[method-assign]
    with scope:
        async with stage.lifecycle:
            pytest.fail("entered although cancelled")
    assert stage.lifecycle.state is State.CLOSED
    await leave(stage)


@pytest.mark.anyio
async def test_a_cancellation_after_the_commit_point_is_held_back_until_the_fleet_runs() -> None:
    """A publication cancelled after its commit point ends RUNNING at the new version; then its caller is cancelled."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        scope = anyio.CancelScope()
        stage["E1"].received = lambda _, request: scope.cancel() if isinstance(request, events.FlushCache) else None
        with scope:
            await lifecycle.publish(SOURCE, version=1)
        assert scope.cancelled_caught
        assert (lifecycle.state, lifecycle.version) == (State.RUNNING, 1)
        assert [view.standing for view in lifecycle.engines] == [Standing.SERVING] * 3
        assert stage.of(events.TransitionRolledBack) == []
        check(stage)
    await leave(stage)


@pytest.mark.anyio
async def test_a_cancelled_suspend_leaves_the_gate_as_it_was() -> None:
    """Cancelled before its turn, SUSPEND and RESUME change nothing."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await lifecycle.suspend()
        assert scope.cancelled_caught
        assert lifecycle.state is State.RUNNING
        check(stage)


@pytest.mark.anyio
@pytest.mark.parametrize("state", [State.SUSPENDED, State.PAUSED])
async def test_a_recovery_cancelled_while_it_asks_says_nothing_about_the_engines(state: State) -> None:
    """Nobody waited for their answers: they are not lost for that, and the lifecycle is where it was."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, state)
        with anyio.CancelScope() as scope:
            stage.when(1, scope.cancel)
            await lifecycle.recover()
        assert scope.cancelled_caught
        assert lifecycle.state is state
        assert [view.standing for view in lifecycle.engines] == [Standing.SERVING] * 3
        check(stage)
