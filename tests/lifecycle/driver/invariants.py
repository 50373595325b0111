"""What holds between any two operations, whatever has happened. Written once, checked everywhere.

The engines' own state is the truth here: what the lifecycle believes is compared with it.
"""

import asyncio
import sys

import trio

from lifecycle import EngineView, Outcome, Standing, State, errors, events
from lifecycle.fleet import label_of
from lifecycle.trace import verify

from .driver_rig import RUN, SOURCE, Engine, Rig

HELD = {State.PAUSED, State.UPDATING, State.FAULTED}
"""States in which an engine may be paused: in FAULTED nobody generates until `recover()`."""


def check(rig: Rig) -> None:
    """Fail with every invariant that does not hold now, or did not on the way here."""
    check_now(rig)
    broken = _history(rig)
    assert not broken, "\n".join(["on the way here:", *broken])


def check_now(rig: Rig) -> None:
    """Fail with every invariant that does not hold now; the way here is checked at the end."""
    broken = [*_engines(rig), *_machine(rig)]
    assert not broken, "\n".join([f"in {rig.lifecycle.state.name}:", *broken])


def _engines(rig: Rig) -> list[str]:
    broken = []
    for engine, view in zip(rig.engines, rig.lifecycle.engines, strict=True):
        broken += [f"{engine.name}: {violation}" for violation in engine.violations]
        broken += [f"{engine.name}: {problem}" for problem in _engine(rig, engine, view)]
    return broken


def _engine(rig: Rig, engine: Engine, view: EngineView) -> list[str]:
    state, version = rig.lifecycle.state, rig.lifecycle.version
    same_process = view.incarnation == str(engine.incarnation) and engine.alive
    serving = view.standing is Standing.SERVING
    owing = view.debt is not None
    broken = []
    if serving and view.dirty:
        broken.append("serves although it is dirty")
    if serving and view.version != version:
        broken.append(f"serves version {view.version} although {version} is published")
    if serving and same_process and (not engine.whole or engine.label != label_of(RUN, version or 0)):
        broken.append(f"serves {'whole' if engine.whole else 'partly written'} {engine.label} at version {version}")
    if same_process and not engine.whole and not view.dirty:
        broken.append("is partly written, and counts as whole")
    if same_process and engine.paused is not None and not owing and view.standing is not Standing.LOST:
        broken.append("is paused, and no debt is on record")
    curable = owing and not view.dirty and view.standing is not Standing.LOST and state not in HELD
    if curable and (serving or not _refused_to_continue(rig, engine.name)):
        broken.append(f"is whole and reachable, and its pause is not matched: {view.debt}")
    if not serving and not view.reason:
        broken.append("is fenced without a reason")
    return broken


def _refused_to_continue(rig: Rig, name: str) -> bool:
    """Whether the engine was asked to continue since its last pause, and did not."""
    facts = [f for f in rig.of(events.EngineContinued) if f.engine == name]
    pauses = [f for f in rig.of(events.EnginePaused) if f.engine == name]
    after = [f for f in facts if not pauses or f.seq > pauses[-1].seq]
    # After an uncertain pause an acknowledgement is not enough: a probe must have found the engine paused again.
    return bool(after) and (after[-1].outcome is not Outcome.DONE or len(after) >= 3)


def _machine(rig: Rig) -> list[str]:
    lifecycle, cohort = rig.lifecycle, rig.lifecycle._cohort
    state, broken = lifecycle.state, []
    if lifecycle.in_flight is not None:
        broken.append(f"{lifecycle.in_flight.name} is still in flight")
    if cohort.submission_open is not (state is State.RUNNING) and state is not State.CLOSED:
        broken.append(f"submission_open is {cohort.submission_open}")
    if state not in {State.FAULTED, State.CLOSED} and cohort.generation_held is (
        state in {State.RUNNING, State.SUSPENDED}
    ):
        broken.append(f"generation_held is {cohort.generation_held}")
    if (cohort.publication is not None) and state not in {State.UPDATING, State.FAULTED}:
        broken.append("a publication is open")
    if len(cohort.fleet.reachable) < cohort.required and state not in {State.FAULTED, State.CLOSED}:
        broken.append("too few engines are reachable, and it is not FAULTED")
    if state is State.RUNNING and len(cohort.fleet.serving) < cohort.required:
        broken.append("too few engines serve")
    if state is State.PAUSED:
        by_name = {engine.name: engine for engine in rig.engines}
        broken += [
            f"{facts.name} counts as paused and is not"
            for facts in cohort.fleet.reachable
            if by_name[facts.name].alive
            and by_name[facts.name].paused is None
            and facts.paused
            and facts.incarnation == str(by_name[facts.name].incarnation)
        ]
    return broken


def _history(rig: Rig) -> list[str]:
    recorded = rig.sink.events
    broken = [str(violation) for violation in verify(enumerate(recorded, 1)).violations]
    answered: dict[int, int] = {}
    for fact in rig.of(events.EngineFact):
        answered[fact.request] = answered.get(fact.request, 0) + 1
    broken += [
        f"{type(request).__name__} to {request.engine} has not exactly one fact"
        for request in rig.of(events.Request)
        if request.engine is not None and answered.pop(request.seq, 0) != 1
    ]
    broken += [f"a fact answers no request: {seq}" for seq in answered]
    return broken


def tasks() -> int:
    """Return how many tasks the event loop has."""
    if "trio" in sys.modules and trio.lowlevel.in_trio_run():
        return trio.lowlevel.current_statistics().tasks_living
    return len(asyncio.all_tasks())


async def cure(rig: Rig) -> None:
    """Let the engines behave, and walk to RUNNING with all of them serving one version, by public operations alone."""
    lifecycle = rig.lifecycle
    rig.behave()
    if lifecycle.state is State.UPDATING:
        await lifecycle.abandon_update()
        check_now(rig)
    if lifecycle.state is State.RUNNING:
        await lifecycle.suspend()
    # Whoever was lost has to be asked again.
    await lifecycle.recover()
    check_now(rig)
    if any(view.standing is not Standing.SERVING for view in lifecycle.engines):
        report = await lifecycle.publish(SOURCE, version=(lifecycle.version or 0) + 1)
        assert report.failures == ()
        check_now(rig)
    if lifecycle.state is State.PAUSED:
        await lifecycle.continue_generation()
    if lifecycle.state is State.SUSPENDED:  # a publication goes back to what the failed one before it had found
        await lifecycle.resume()
    check_now(rig)
    assert lifecycle.state is State.RUNNING
    assert [view.standing for view in lifecycle.engines] == [Standing.SERVING] * len(rig.engines)
    assert {engine.label for engine in rig.engines} == {label_of(RUN, lifecycle.version or 0)}
    assert [engine.paused for engine in rig.engines] == [None] * len(rig.engines)


async def leave(rig: Rig) -> None:
    """Close, and find nothing left behind: no whole engine paused, no port open, no session, no task."""
    unsettled = await rig.lifecycle.close()
    assert rig.lifecycle.state is State.CLOSED
    paused = {engine.name for engine in rig.engines if engine.paused is not None and engine.alive}
    assert paused <= {view.name for view in unsettled}
    for view in unsettled:
        assert view.dirty or view.standing is Standing.LOST or _refused_to_continue(rig, view.name)
    assert all(engine.closed for engine in rig.engines)
    assert rig.sink.closed
    broken = [*_engines(rig), *_history(rig)]
    assert not broken, "\n".join(["after close:", *broken])


def engines_named(error: BaseException) -> set[str]:
    """Return the engines that an error blames, by its causes or its text."""
    named = set(error.engines) if isinstance(error, errors.OperationFailed) else set()
    return named | {name for name in ("E1", "E2", "E3") if name in str(error)}
