"""What bounds a lifecycle: its event loop, the time of a whole operation, and what others may raise in it."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import anyio
import attrs
import pytest

from lifecycle import Lifecycle, State, errors, events
from lifecycle.events import Event, Request
from lifecycle.fleet import EngineFacts
from lifecycle.ports import Acknowledgement
from lifecycle.testing import ScriptedEngine, Silence

from .driver_rig import DEADLINES, SOURCE, Engine, prompt, rig
from .invariants import check, cure, leave


class Foreign(BaseException):
    """What a library raises that has a cancellation of its own."""


@pytest.mark.anyio
@pytest.mark.parametrize(
    "kind",
    [events.PauseGeneration, events.BeginUpdate, events.TransferWeights, events.FinishUpdate],
)
async def test_an_operation_ends_when_its_time_is_up_whatever_hangs(kind: type[Request]) -> None:
    """Every request has less than its own deadline then, and cleaning up has the grace for each."""
    limit, slack = 5.0, 20 * DEADLINES.grace
    generous = {
        field.name: 1000.0 for field in attrs.fields(type(DEADLINES)) if field.name not in {"operation", "grace"}
    }
    stage = rig(2, deadlines=attrs.evolve(DEADLINES, **generous, operation=limit))
    async with stage.lifecycle as lifecycle:
        for hanging in (kind, events.ContinueGeneration, events.AbandonUpdate, events.ProbeEngine):
            stage["E2"].on(hanging, *[Silence()] * 20)
        started = anyio.current_time()
        with pytest.raises(errors.OperationFailed) as failed:
            await lifecycle.publish(SOURCE, version=1)
        assert "E2" in failed.value.engines
        assert anyio.current_time() - started <= limit + slack
        check(stage)
        await cure(stage)
    await leave(stage)


@pytest.mark.anyio
async def test_a_subscriber_may_raise_anything() -> None:
    """Also what is no `Exception`: it is reported, and the hand-over goes on."""
    stage = rig(2)

    def raising(_: Event) -> None:
        raise Foreign("mine")

    stage.lifecycle.subscribe(raising)
    async with stage.lifecycle as lifecycle:
        report = await lifecycle.publish(SOURCE, version=1)
        assert (report.state, report.failures) == (State.RUNNING, ())
    await leave(stage)


class Bursting(Engine):
    """A port that raises what is no `Exception`."""

    async def perform(
        self, request: Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = lambda: None
    ) -> Acknowledgement:
        if isinstance(request, events.TransferWeights):
            raise Foreign("cancelled, in somebody's sense")
        return await super().perform(request, facts, timeout=timeout, sent=sent)


@pytest.mark.anyio
async def test_a_port_may_raise_anything() -> None:
    """What it did is unknown then: the publication fails, names the engine, and the engine stays dirty and paused."""
    stage = rig(2)
    stage.engines[1].__class__ = Bursting
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.PublicationFailed) as failed:
            await lifecycle.publish(SOURCE, version=1)
        assert "adapter error: Foreign" in str(failed.value)
        assert failed.value.engines == ("E2",)
        assert [view.dirty for view in lifecycle.engines] == [True, True]
        stage.engines[1].__class__ = Engine
        check(stage)
        await cure(stage)
    await leave(stage)


_CALLS: dict[str, Callable[[Lifecycle], Any]] = {
    "publish": lambda lifecycle: lifecycle.publish(SOURCE, version=1),
    "suspend": lambda lifecycle: lifecycle.suspend(),
    "recover": lambda lifecycle: lifecycle.recover(),
    "drain": lambda lifecycle: lifecycle.drain(),
    "generate": lambda lifecycle: lifecycle.generate(prompt()),
    "admit": lambda lifecycle: lifecycle.admit().__aenter__(),
    "close": lambda lifecycle: lifecycle.close(),
}


@pytest.mark.parametrize("name", _CALLS)
def test_a_call_from_another_event_loop_is_refused_at_once(name: str) -> None:
    """A lifecycle lives in one event loop: elsewhere a call would wait for ever, or corrupt what it finds."""
    raised: list[BaseException] = []

    async def elsewhere(lifecycle: Lifecycle) -> None:
        await _CALLS[name](lifecycle)

    def in_a_thread(lifecycle: Lifecycle) -> None:
        try:
            asyncio.run(elsewhere(lifecycle))
        except BaseException as error:  # noqa: BLE001 - looked at below
            raised.append(error)

    async def home() -> None:
        async with Lifecycle([ScriptedEngine("E1")], deadlines=DEADLINES) as lifecycle:
            thread = threading.Thread(target=in_a_thread, args=(lifecycle,))
            thread.start()
            await anyio.to_thread.run_sync(thread.join)
            assert lifecycle.state is State.RUNNING

    anyio.run(home)
    assert [type(error) for error in raised] == [errors.WrongEventLoop]
