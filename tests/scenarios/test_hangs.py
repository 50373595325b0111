"""Something that never answers: every wait ends by its deadline, and no wait is longer than it has to be."""

from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import anyio
import pytest

from lifecycle import Outcome, PauseMode, Standing, State, errors, events
from lifecycle.events import Request
from lifecycle.testing import Refuse, Silence
from tests.lifecycle.driver.driver_rig import DEADLINES, NAMES, SOURCE, Rig, bring_to, rig
from tests.lifecycle.driver.invariants import check, check_now, cure, leave, tasks
from tests.lifecycle.driver.test_failures import AT_ENGINES

from .stage import EMPTYING, KEEPING, facts, generating, produce_all

pytestmark = pytest.mark.anyio

OPERATIONS: dict[str, tuple[State, Callable[[Rig], Awaitable[object]]]] = {
    "publish": (State.RUNNING, lambda stage: stage.lifecycle.publish(SOURCE, version=1)),
    "pause": (State.SUSPENDED, lambda stage: stage.lifecycle.pause_generation()),
    "continue": (State.PAUSED, lambda stage: stage.lifecycle.continue_generation()),
    "begin": (State.PAUSED, lambda stage: stage.lifecycle.begin_update(version=1)),
    "transfer": (State.UPDATING, lambda stage: stage.lifecycle.transfer(SOURCE)),
    "abandon": (State.UPDATING, lambda stage: stage.lifecycle.abandon_update()),
    "recover": (State.SUSPENDED, lambda stage: stage.lifecycle.recover()),
    "abort": (State.RUNNING, lambda stage: stage.lifecycle.abort_generation()),
}
ALTOGETHER = sum(DEADLINES.of(kind) for kind in AT_ENGINES) + DEADLINES.abort + DEADLINES.grace
"""Seconds that every kind of request may take once, with the aborted ones coming back."""
ROLL_FORWARD = {"continue", "abandon"}
"""Operations that fence engines instead of failing."""


def silent(stage: Rig, name: str) -> None:
    """Let an engine answer nothing any more."""
    for kind in AT_ENGINES:
        stage[name].on(kind, *[Silence()] * 40)


@pytest.mark.parametrize("min_engines", [None, 1])
@pytest.mark.parametrize("first", AT_ENGINES)
async def test_a_server_that_falls_silent_holds_nobody_longer_than_the_deadlines(
    first: type[Request], min_engines: int | None
) -> None:
    """From one request on it answers nothing, clean-up included: the publication ends in time, and leaves no task."""
    stage = rig(min_engines=min_engines)
    lifecycle = stage.lifecycle
    await lifecycle.attach()
    await lifecycle.resume()
    stage["E3"].requests.clear()
    stage["E3"].received = lambda _, request: silent(stage, "E3") if isinstance(request, first) else None
    begun, before = anyio.current_time(), tasks()
    blamed: set[str]
    try:
        blamed = set((await lifecycle.publish(SOURCE, version=1)).fenced)
    except errors.OperationFailed as failure:
        blamed = set(failure.engines)
    assert anyio.current_time() - begun <= ALTOGETHER
    assert tasks() == before
    assert blamed == ({"E3"} if any(isinstance(request, first) for request in stage["E3"].requests) else set())
    assert lifecycle.state is not State.RUNNING or not any(engine.paused for engine in stage.engines[:2])
    check_now(stage)
    await cure(stage)
    await leave(stage)


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_fleet_that_answers_nothing_at_all_ends_every_operation(name: str) -> None:
    """Every engine silent, every request: each operation, and closing after it, is over within the deadlines."""
    stage = rig()
    state, operate = OPERATIONS[name]
    await stage.lifecycle.attach()
    await stage.lifecycle.resume()
    await bring_to(stage.lifecycle, state)
    for engine in NAMES:
        silent(stage, engine)
    begun = anyio.current_time()
    with pytest.raises(errors.LifecycleError) if name not in ROLL_FORWARD else nullcontext():
        await operate(stage)
    assert anyio.current_time() - begun <= ALTOGETHER
    begun = anyio.current_time()
    await leave(stage)
    assert anyio.current_time() - begun <= ALTOGETHER


async def test_every_request_to_an_engine_carries_its_deadline() -> None:
    """No port is ever asked without a limit, and none for longer than `Deadlines` says for its kind."""
    stage = rig(1)
    limits: list[tuple[type[Request], float]] = []
    perform = stage["E1"].perform

    async def limited(request: Request, facts: object, *, timeout: float, sent: Callable[[], None]) -> object:
        limits.append((type(request), timeout))
        return await perform(request, facts, timeout=timeout, sent=sent)  # type: ignore[arg-type]

    stage["E1"].perform = limited  # type: ignore[method-assign, assignment]
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        stage.transfer.fail_on = "send"
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=2)
    assert {kind for kind, _ in limits} == {*AT_ENGINES, events.CloseTransfer, events.LabelVersion}
    assert [(kind, limit) for kind, limit in limits if not 0 < limit <= DEADLINES.of(kind)] == []


@pytest.mark.parametrize("name", OPERATIONS)
async def test_no_operation_waits_for_anything_but_its_engines(name: str) -> None:
    """Where every engine answers at once no time passes: there is no fixed sleep in any operation."""
    stage, begun = rig(), anyio.current_time()
    state, operate = OPERATIONS[name]
    async with stage.lifecycle as lifecycle:
        await bring_to(lifecycle, state)
        await operate(stage)
        await cure(stage)
    await leave(stage)
    assert anyio.current_time() == begun


async def test_an_engines_error_frees_a_trainer_that_is_blocked_in_the_collective() -> None:
    """The server's words reach the caller within the grace, the channel is cut, and nobody dirty is continued."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle:
        stage.transfer.hang_on = "send"
        stage["E1"].on(events.TransferWeights, Refuse("CUDA out of memory"))
        stage["E2"].on(events.TransferWeights, Silence())
        begun = anyio.current_time()
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.publish(SOURCE, version=1)
        assert "CUDA out of memory" in str(failure.value)
        assert anyio.current_time() - begun <= lifecycle.deadlines.grace
        assert stage.transfer.calls[-1] == "stop"
        assert [(view.dirty, view.debt is not None) for view in lifecycle.engines] == [(True, True)] * 2
        check(stage)
        await cure(stage)
    await leave(stage)


@pytest.mark.parametrize("mode", EMPTYING)
async def test_a_pause_that_tells_no_client_of_its_abort_still_ends_paused(mode: PauseMode) -> None:
    """The engine has dropped its requests and completes none: the wait is bounded, and nothing stays in flight."""
    stage = rig(2, manual=True)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, 8)
        for engine in stage.engines:
            engine._abort = lambda: None  # type: ignore[method-assign]
            engine._unfinished = list  # type: ignore[method-assign]
        await lifecycle.suspend()
        begun = anyio.current_time()
        if mode is PauseMode.WAIT:
            with pytest.raises(errors.PauseFailed) as failure:
                await lifecycle.pause_generation(mode)
            assert "8 requests in flight" in str(failure.value)
        else:
            await lifecycle.pause_generation(mode)
            await anyio.wait_all_tasks_blocked()
            assert (lifecycle.state, lifecycle._context.segments.in_flight) == (State.PAUSED, 0)
            await lifecycle.continue_generation()
        assert anyio.current_time() - begun <= lifecycle.deadlines.drain + lifecycle.deadlines.abort * 2
        await produce_all(stage, later)
        assert lifecycle.running == 0
        check(stage)


@pytest.mark.parametrize("mode", KEEPING)
@pytest.mark.parametrize("min_engines", [None, 1])
async def test_a_load_that_blocks_on_kept_requests_leaves_its_engine_paused_and_dirty(
    mode: PauseMode, min_engines: int | None
) -> None:
    """The deadline frees the library; what never finished is not continued, and the others go on if they are enough."""
    stage = rig(2, manual=True, min_engines=min_engines)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        await generating(stage, tasks, 4)
        stage["E2"].on(events.FinishUpdate, Silence())
        if min_engines is None:
            with pytest.raises(errors.PublicationFailed):
                await lifecycle.publish(SOURCE, version=1, mode=mode)
            assert (lifecycle.state, lifecycle.version) == (State.PAUSED, 0)
        else:
            await lifecycle.publish(SOURCE, version=1, mode=mode)
            assert (lifecycle.state, lifecycle.version) == (State.RUNNING, 1)
        view = lifecycle.engines["E2"]
        assert (stage["E2"].paused, view.dirty, view.standing) == (mode, True, Standing.STALE)
        assert facts(stage, events.EngineContinued, "E2") == []
        check(stage)
        tasks.cancel_scope.cancel()


async def test_the_first_publication_waits_for_no_rollout() -> None:
    """At start-up nothing is in flight, nothing was ever paused and no version is published: it goes like any other."""
    for version in (0, 7):
        stage = rig(initial_version=None)
        async with stage.lifecycle as lifecycle:
            begun = anyio.current_time()
            await lifecycle.publish(SOURCE, version=version)
            await lifecycle.resume()
            assert anyio.current_time() == begun
            assert (lifecycle.version, lifecycle.state) == (version, State.RUNNING)
            assert all(fact.outcome is Outcome.DONE for fact in stage.of(events.EnginePaused))
            check(stage)
