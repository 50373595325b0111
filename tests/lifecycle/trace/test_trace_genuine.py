"""What a lifecycle writes down is sound, whatever happened to it."""

from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from lifecycle import PauseMode, State, Trigger, errors, events
from lifecycle.testing import Crash, LandLate, LoseReply, Refuse, Silence, Step

from .forging import show, verdict_of
from .recordings import (
    BATCH,
    NAMES,
    SCENARIOS,
    SOURCE,
    Scenario,
    Stage,
    new_lifecycle,
    record,
    recording,
)

BACKENDS = ("asyncio", "trio")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_genuine_trace_is_sound(name: str, backend: str) -> None:
    """No rule accuses a lifecycle of what it did not do, and the lifecycle is seen to be closed."""
    verdict = verdict_of(recording(name, backend))
    assert verdict.violations == []
    assert verdict.closed
    assert verdict.state is State.CLOSED


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_trace_that_ends_early_is_sound(name: str) -> None:
    """A killed trainer leaves the beginning of a trace, which breaks no rule, wherever it ends."""
    trace = recording(name)
    for length in range(len(trace)):
        assert verdict_of(trace[:length]).violations == []


def test_the_verdict_counts() -> None:
    """Pauses, continues, tokens, interruptions and staleness are those of the run."""
    trace = recording("several publications")
    verdict = verdict_of(trace)
    received = [event for event in trace if isinstance(event, events.SegmentReceived)]
    assert verdict.events == len(trace)
    assert (verdict.pauses, verdict.continues, verdict.unmatched) == (6, 6, ())
    assert verdict.version == 3
    assert verdict.max_staleness_seen == 1
    assert verdict.tokens == sum(event.tokens for event in received)
    assert verdict.interrupted == sum(event.finish_reason == "abort" for event in received)
    assert verdict.interrupted >= 2 * BATCH


def test_what_is_left_paused_is_named() -> None:
    """Partly written engines stay paused, which is sound, and the verdict says who they are."""
    verdict = verdict_of(recording("closed while dirty"))
    assert verdict.sound
    assert verdict.unmatched == NAMES
    assert str(verdict).endswith("2 pauses, 0 continues, unmatched: E1, E2")


def test_a_killed_trainer_leaves_its_pauses_on_record() -> None:
    """Pauses that a killed trainer left count once, as unmatched until whoever comes next has matched them."""
    trace = recording("killed trainer")
    reopened = [i for i, event in enumerate(trace) if isinstance(event, events.LifecycleOpened)][1]
    killed, whole = verdict_of(trace[:reopened]), verdict_of(trace)
    assert (killed.pauses, killed.continues, killed.unmatched, killed.closed) == (2, 0, NAMES, False)
    assert verdict_of(trace[: reopened + 1]).unmatched == NAMES
    assert (whole.pauses, whole.continues, whole.unmatched, whole.closed) == (4, 4, (), True)


def test_an_engine_started_anew_owes_nothing_of_before() -> None:
    """A new server process matches what a killed trainer left of the old one."""

    async def killed_and_restarted(stage: Stage) -> None:
        await stage.lifecycle.suspend()
        await stage.lifecycle.pause_generation()
        stage.lifecycle._context.recorder._sink = None
        for engine in stage.engines:
            engine.restart()
        stage.lifecycle = new_lifecycle(stage.engines, stage.transfer, stage.sink)
        await stage.lifecycle.attach()

    verdict = verdict_of(record(killed_and_restarted))
    assert verdict.violations == []
    assert (verdict.pauses, verdict.continues, verdict.unmatched) == (2, 2, ())


def test_a_refusal_to_continue_is_no_violation() -> None:
    """An engine that was asked to continue, and would not, is the engine's fault and not the lifecycle's."""

    async def stubborn(stage: Stage) -> None:
        stage.engines[0].on(events.ContinueGeneration, *[Refuse()] * 99)
        await stage.publish()

    verdict = verdict_of(record(stubborn, min_engines=1))
    assert verdict.violations == []
    assert verdict.unmatched == ("E1",)


def test_an_update_does_not_begin_in_no_engine() -> None:
    """Where every engine is lost while an update left open is closed, nothing is begun: nobody is not everybody."""

    async def nobody_left(stage: Stage) -> None:
        for engine in stage.engines:
            engine.on(events.AbandonUpdate, *[LoseReply(applied=False)] * 9)
        stage.transfer.fail_on = "send"
        await stage.fail_to_publish()
        await stage.lifecycle.recover()
        await stage.fail_to_publish()

    trace = record(nobody_left)
    committed = [event.trigger for event in trace if isinstance(event, events.TransitionCommitted)]
    assert committed.count(Trigger.BEGIN_UPDATE) == 1
    assert verdict_of(trace).violations == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancellation_is_told_in_a_word(backend: str) -> None:
    """What a cancelled operation leaves in the trace names no task, no scope and no address."""

    async def cancelled(stage: Stage) -> None:
        await _cancelled_publication(stage, 20)

    trace = record(cancelled, backend)
    assert [event.reason for event in trace if isinstance(event, events.TransitionRolledBack)] == ["cancelled"]


# ------------------------------------------------------------------------------------------------------ random scripts

_TROUBLES: dict[str, Step] = {
    "refuses": Refuse(),
    "acts and loses the reply": LoseReply(),
    "does nothing and loses the reply": LoseReply(applied=False),
    "lands late": LandLate(),
    "is silent": Silence(),
    "crashes": Crash(),
}
_REQUESTS = [
    events.ProbeEngine,
    events.AbortGeneration,
    events.PauseGeneration,
    events.ContinueGeneration,
    events.ProvePaused,
    events.OpenTransfer,
    events.BeginUpdate,
    events.TransferWeights,
    events.FinishUpdate,
    events.VerifyWeights,
    events.FlushCache,
    events.LabelVersion,
    events.Canary,
    events.AbandonUpdate,
    events.CloseTransfer,
]
_trouble = st.tuples(
    st.just("trouble"),
    st.sampled_from(range(len(NAMES))),
    st.sampled_from(_REQUESTS),
    st.sampled_from(sorted(_TROUBLES)),
    st.sampled_from([1, 9]),
)
_publication = st.tuples(
    st.just("publish"), st.sampled_from(PauseMode), st.booleans(), st.none() | st.integers(0, 2 * BATCH)
)
_cancelled = st.tuples(st.just("publish cancelled"), st.integers(1, 30))


def _named(names: str) -> st.SearchStrategy[tuple[str, ...]]:
    return st.sampled_from(names.split(", ")).map(lambda name: (name,))


_operation = _named(
    "suspend, resume, pause, continue, begin, transfer, finish, abandon, abort, recover, kill the trainer"
)
_traffic = _named("batch, rollouts, rejected, evaluations, produce, batch, consume, discard")
_world = _named("restart, restart, land, outside, transfer fails")
_move = st.one_of(_operation, _world, _publication, _publication, _trouble, _cancelled)
_steps = st.lists(st.tuples(_traffic, _move), min_size=2, max_size=8).map(
    lambda pairs: [s for pair in pairs for s in pair]
)


async def _step(stage: Stage, name: str, *details: Any) -> None:  # noqa: C901, PLR0912 - a table of what may happen
    lifecycle = stage.lifecycle
    match name:
        case "trouble":
            engine, request, trouble, times = details
            stage.engines[engine].on(request, *[_TROUBLES[trouble]] * times)
        case "publish":
            mode, resume, consumed = details
            await stage.publish(mode=mode, resume=resume, consumed=consumed)
        case "publish cancelled":
            await _cancelled_publication(stage, details[0])
        case "suspend" | "resume" | "recover":
            await getattr(lifecycle, name)()
        case "pause" | "continue" | "abort":
            await getattr(lifecycle, f"{name}_generation")()
        case "begin":
            await lifecycle.begin_update(version=(lifecycle.version or 0) + 1)
        case "transfer":
            await lifecycle.transfer(SOURCE)
        case "finish" | "abandon":
            await getattr(lifecycle, f"{name}_update")()
        case "restart":
            for engine in stage.engines:
                if not engine.alive:
                    engine.restart()
            if lifecycle.state in {State.FAULTED, State.SUSPENDED, State.PAUSED}:
                await lifecycle.recover()
        case "land":
            for engine in stage.engines:
                engine.land()
        case "outside":
            if stage.engines[0].whole:
                stage.engines[0].resume_from_outside()
        case "transfer fails":
            stage.transfer.fail_on = None if stage.transfer.fail_on else "send"
        case "rollouts" | "rejected" | "evaluations":
            await stage.rollouts(2, accept=name != "rejected", evaluation=name == "evaluations")
        case "produce":
            await stage.produce()
        case "batch":
            await stage.rollouts()
            await stage.produce()
        case "consume":
            stage.consume()
        case "discard":
            if stage.accepted:
                stage.discard()
        case "kill":
            await _killed(stage)


async def _cancelled_publication(stage: Stage, count: int) -> None:
    """Publish, and cancel it when so many requests and facts were written down."""
    left = count

    def on_event(_: events.Event) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            scope.cancel()

    unsubscribe = stage.lifecycle.subscribe(on_event)
    try:
        with anyio.CancelScope() as scope:
            await stage.publish()
    finally:
        unsubscribe()


async def _killed(stage: Stage) -> None:
    """Forget the lifecycle as a kill would, and begin another with what is left of the engines."""
    stage.lifecycle._context.recorder._sink = None
    stage.accepted.clear()
    stage.lifecycle = new_lifecycle(
        stage.engines, stage.transfer, stage.sink, min_engines=stage.lifecycle._cohort.policy.min_engines
    )
    await stage.lifecycle.attach()
    if stage.lifecycle.can(Trigger.RESUME):
        await stage.lifecycle.resume()


def _scenario(script: list[tuple[Any, ...]]) -> Scenario:
    async def play(stage: Stage) -> None:
        for step in script:
            # Refused, failed or closed: the trace says so.
            with suppress(errors.LifecycleError, ValueError):
                await _step(stage, *step)
            await anyio.wait_all_tasks_blocked()

    return play


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(script=_steps, min_engines=st.sampled_from([None, 1]))
def test_whatever_happens_the_trace_is_sound(
    backend: str, script: list[tuple[Any, ...]], min_engines: int | None
) -> None:
    """Any operations over engines that fail in any way leave a trace that breaks no rule."""
    trace = record(_scenario(script), backend, min_engines=min_engines)
    verdict = verdict_of(trace)
    if verdict.violations:
        note(show(trace))
    assert verdict.violations == []
