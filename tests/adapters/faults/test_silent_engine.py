"""One engine among four that accepts everything and answers nothing: every operation ends, and says which it was."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import anyio
import pytest
from attrs import define, fields, frozen

from adapters.engines import SGLangEngine, VLLMEngine
from adapters.testing import FaultProxy, Silence
from lifecycle import Deadlines, FleetPolicy, Lifecycle, State, errors
from lifecycle import events as e
from lifecycle.events.facts import EngineFact
from lifecycle.states import Outcome, Standing
from lifecycle.testing import ScriptedEngine, ScriptedTransfer
from tests.lifecycle.driver.driver_rig import SOURCE, Sink

from .servers import Obedient
from .stage import in_between
from .table import REQUESTS

DIALECTS = {"sglang": SGLangEngine, "vllm": VLLMEngine}
SECONDS = 0.4
"""The deadline of whatever the silent engine is asked."""
SLACK = 10.0
"""Seconds that a busy machine may add to what an operation may take."""
_ALL = ("attach", "probe", "abort", "pause", "resume")
POLICIES = {"three of four": FleetPolicy(min_engines=3), "strict": FleetPolicy(on_engine_failure="fault")}


@define
class Fleet:
    """Three engines that answer, one that will not, and the lifecycle of all four."""

    lifecycle: Lifecycle
    proxy: FaultProxy
    server: Obedient
    others: list[ScriptedEngine]
    sink: Sink

    def fall_silent(self, route: str = "*", deadlines: Iterable[str] = _ALL) -> None:
        """Let the fourth engine answer nothing from now on at `route`, and be waited for `SECONDS` by `deadlines`."""
        self.proxy.always(route, Silence())
        for name in deadlines:
            setattr(self.lifecycle.deadlines, name, SECONDS)

    def wake(self) -> None:
        """Let it answer again, and give it time."""
        self.proxy.heal()
        for field in fields(Deadlines):
            setattr(self.lifecycle.deadlines, field.name, field.default)

    def facts(self, after: int) -> list[EngineFact]:
        """Return what is on record of the silent engine since the event with this number."""
        return [f for f in self.sink.events[after:] if isinstance(f, EngineFact) and f.engine == "silent"]

    def asked(self, after: int) -> list[e.Request]:
        """Return what the silent engine was asked since the event with this number."""
        return [r for r in self.sink.events[after:] if isinstance(r, e.Request) and r.engine == "silent"]


@asynccontextmanager
async def fleet(dialect: str, policy: str) -> AsyncIterator[Fleet]:
    """Put a fleet together; nothing is sent yet, and the fourth engine still answers."""
    server, sink = Obedient(dialect), Sink()
    async with in_between(server) as (proxy, _):
        others = [ScriptedEngine(name, label="run:7") for name in ("E1", "E2", "E3")]
        lifecycle = Lifecycle(
            [*others, DIALECTS[dialect](proxy.url, name="silent")],
            transfer=ScriptedTransfer(),
            initial_version=7,
            policy=POLICIES[policy],
            journal=sink,
        )
        try:
            yield Fleet(lifecycle, proxy, server, others, sink)
        finally:
            await lifecycle.close()


Error = type[errors.LifecycleError] | None


@frozen
class Operation:
    """What is done while the engine is silent, what it is asked meanwhile, and how it ends."""

    state: State
    """Where the lifecycle is before."""
    call: Callable[[Lifecycle], Awaitable[object]]
    asked: tuple[type[e.Request], ...]
    """One after the other, so that the deadlines of all of them together are the operation's."""
    ends: Mapping[str, tuple[State, Error]]
    """By policy: the state after it, and what it raises."""


def _ends(
    three: State, strict: State, error: Error = None, *, strict_error: Error = None
) -> Mapping[str, tuple[State, Error]]:
    return {"three of four": (three, error), "strict": (strict, strict_error or error)}


_STOPPING = (e.AbortGeneration, e.PauseGeneration, e.ContinueGeneration)
OPERATIONS: Mapping[str, Operation] = {
    "attach": Operation(
        State.CLOSED,
        lambda lifecycle: lifecycle.attach(),
        (e.ProbeEngine,),
        _ends(State.SUSPENDED, State.CLOSED, strict_error=errors.AttachFailed),
    ),
    "abort": Operation(
        State.RUNNING,
        lambda lifecycle: lifecycle.abort_generation(),
        (e.AbortGeneration,),
        _ends(State.RUNNING, State.RUNNING, errors.OperationFailed),
    ),
    "pause": Operation(
        State.SUSPENDED,
        lambda lifecycle: lifecycle.pause_generation(),
        _STOPPING,
        _ends(State.SUSPENDED, State.FAULTED, errors.PauseFailed),
    ),
    "continue": Operation(
        State.PAUSED,
        lambda lifecycle: lifecycle.continue_generation(),
        (e.ContinueGeneration,),
        _ends(State.SUSPENDED, State.FAULTED),
    ),
    "publish": Operation(
        State.RUNNING,
        lambda lifecycle: lifecycle.publish(SOURCE, version=8),
        _STOPPING,
        _ends(State.RUNNING, State.FAULTED, errors.PauseFailed),
    ),
    "recover": Operation(
        State.SUSPENDED,
        lambda lifecycle: lifecycle.recover(),
        (e.ProbeEngine,),
        _ends(State.SUSPENDED, State.FAULTED, strict_error=errors.TransitionRefused),
    ),
    "close": Operation(
        State.PAUSED,
        lambda lifecycle: lifecycle.close(),
        (e.ContinueGeneration,),
        _ends(State.CLOSED, State.CLOSED),
    ),
}


async def bring_to(lifecycle: Lifecycle, state: State) -> None:
    """Walk a lifecycle that nothing was done with to `state`."""
    if state is not State.CLOSED:
        await lifecycle.attach()
    if state is State.RUNNING:
        await lifecycle.resume()
    if state is State.PAUSED:
        await lifecycle.pause_generation()
    assert lifecycle.state is state


async def error_of(call: Awaitable[object], seconds: float) -> errors.LifecycleError | None:
    """Return what `call` raises. It must end within `seconds`."""
    with anyio.fail_after(seconds):
        try:
            await call
        except errors.LifecycleError as error:
            return error
    return None


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_every_operation_ends_by_its_deadlines_and_names_the_engine(name: str, policy: str, dialect: str) -> None:
    """The others wait no longer than what the fourth was asked may take; who it was is told, and on record."""
    operation = OPERATIONS[name]
    async with fleet(dialect, policy) as rig:
        await bring_to(rig.lifecycle, operation.state)
        before = len(rig.sink.events)
        rig.fall_silent()
        error = await error_of(operation.call(rig.lifecycle), len(operation.asked) * SECONDS + SLACK)
        state, raised = operation.ends[policy]
        assert (rig.lifecycle.state, type(error)) == (state, raised or type(None))
        assert {type(request) for request in rig.asked(before)} == set(operation.asked)
        outcomes = {fact.request: fact.outcome for fact in rig.facts(before)}
        assert outcomes == {request.seq: Outcome.UNKNOWN for request in rig.asked(before)}
        assert max(fact.seconds for fact in rig.facts(before)) < SECONDS + SLACK
        silent = rig.lifecycle.engines["silent"]
        assert "silent" in str(error) if raised else (silent.standing is Standing.LOST and silent.reason)
        assert [engine.violations for engine in rig.others] == [[], [], []]


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_next_publication_goes_on_without_it(dialect: str) -> None:
    """Where three engines are enough, one failed publication is the price of finding out."""
    async with fleet(dialect, "three of four") as rig:
        await bring_to(rig.lifecycle, State.RUNNING)
        rig.fall_silent()
        limit = 3 * SECONDS + SLACK
        assert isinstance(await error_of(rig.lifecycle.publish(SOURCE, version=8), limit), errors.PauseFailed)
        asked = len(rig.proxy.seen)
        assert await error_of(rig.lifecycle.publish(SOURCE, version=8), SLACK) is None
        assert len(rig.proxy.seen) == asked
        assert [engine.label for engine in rig.others] == ["run:8"] * 3
        assert rig.lifecycle.engines["silent"].debt is not None
        rig.wake()
        await rig.lifecycle.suspend()
        await rig.lifecycle.recover()
        await rig.lifecycle.publish(SOURCE, version=9)
        assert (rig.server.label, rig.lifecycle.engines["silent"].standing) == ("run:9", Standing.SERVING)


WAITED_BY = {
    "init group": ("open_transfer",),
    "begin": ("begin",),
    "transfer": ("transfer",),
    "finish": ("finish", "abandon"),  # which are one route
    "flush": ("flush",),
    "continue": ("resume",),
}
PUBLICATION: Mapping[tuple[str, str], tuple[State, int, Standing]] = {
    ("init group", "three of four"): (State.RUNNING, 7, Standing.SERVING),
    ("init group", "strict"): (State.RUNNING, 7, Standing.SERVING),
    ("begin", "three of four"): (State.RUNNING, 7, Standing.SERVING),
    ("begin", "strict"): (State.RUNNING, 7, Standing.SERVING),
    ("transfer", "three of four"): (State.PAUSED, 7, Standing.STALE),
    ("transfer", "strict"): (State.PAUSED, 7, Standing.STALE),
    ("finish", "three of four"): (State.RUNNING, 8, Standing.STALE),
    ("finish", "strict"): (State.FAULTED, 7, Standing.LOST),
    ("flush", "three of four"): (State.RUNNING, 8, Standing.STALE),
    ("flush", "strict"): (State.FAULTED, 8, Standing.STALE),
    ("continue", "three of four"): (State.RUNNING, 8, Standing.LOST),
    ("continue", "strict"): (State.FAULTED, 8, Standing.LOST),
}
"""By the call that is never answered: the state after a publication, its version, and where the engine stands.

Before the commit point the publication fails, and engines go back where they were unless weights may have been written;
after it, it goes on without the engine.
"""


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("moment", "policy"), PUBLICATION)
async def test_a_publication_ends_wherever_the_engine_falls_silent(moment: str, policy: str, dialect: str) -> None:
    """One call is never answered, every other one is: two deadlines settle which version is published."""
    async with fleet(dialect, policy) as rig:
        await bring_to(rig.lifecycle, State.RUNNING)
        before = len(rig.sink.events)
        rig.fall_silent(REQUESTS[moment].routes[dialect], WAITED_BY[moment])
        error = await error_of(rig.lifecycle.publish(SOURCE, version=8), 2 * SECONDS + SLACK)
        state, version, standing = PUBLICATION[moment, policy]
        silent = rig.lifecycle.engines["silent"]
        assert (rig.lifecycle.state, rig.lifecycle.version, silent.standing) == (state, version, standing)
        unknown = [fact for fact in rig.facts(before) if fact.outcome is not Outcome.DONE]
        assert {fact.outcome for fact in unknown} == {Outcome.UNKNOWN}
        assert max(fact.seconds for fact in unknown) < SECONDS + SLACK
        if version == 7:
            assert isinstance(error, errors.PublicationFailed)
            assert error.engines == ("silent",)
        else:
            assert (error, bool(silent.reason)) == (None, True)
        assert [engine.violations for engine in rig.others] == [[], [], []]
