"""Event loops: ones that spin on what was cancelled, and cancellations that leak into their caller."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import trio

from lifecycle import PauseMode, StalenessBudget, State, errors, events
from lifecycle.events import Request
from lifecycle.testing import Delay, Silence
from tests.lifecycle.driver.driver_rig import SOURCE, Rig, bring_to, prompt, rig, start
from tests.lifecycle.driver.invariants import check, leave
from tests.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.anyio


class Turns:
    """Counts how often an event loop comes round."""

    count = 0


class _Instrument(trio.abc.Instrument):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def before_io_wait(self, timeout: float) -> None:
        self._turns.count += 1


@contextmanager
def counted() -> Iterator[Turns]:
    """Count the turns of the running event loop."""
    turns = Turns()
    try:
        loop: Any = asyncio.get_running_loop()
    except RuntimeError:
        instrument = _Instrument(turns)
        trio.lowlevel.add_instrument(instrument)
        yield turns
        trio.lowlevel.remove_instrument(instrument)
        return
    select = loop._clock.select

    def counting(timeout: float | None = None) -> Any:
        turns.count += 1
        return select(timeout)

    loop._clock.select = counting
    yield turns
    loop._clock.select = select


async def turns_of_an_idle_loop() -> int:
    """Return how often the loop comes round in an hour in which nothing is to do."""
    await anyio.wait_all_tasks_blocked()
    with counted() as turns:
        await anyio.sleep(3600)
    return turns.count


CANCELLED: dict[State, Callable[[Rig], Awaitable[object]]] = {
    State.RUNNING: lambda stage: stage.lifecycle.publish(SOURCE, version=1),
    State.SUSPENDED: lambda stage: stage.lifecycle.pause_generation(),
    State.PAUSED: lambda stage: stage.lifecycle.begin_update(version=1),
    State.UPDATING: lambda stage: stage.lifecycle.transfer(SOURCE),
}


@pytest.mark.parametrize("state", CANCELLED)
async def test_nothing_spins_after_a_cancellation(state: State) -> None:
    """Whatever was cancelled, and whoever still waits for a ticket or an engine: an idle lifecycle lets the loop sleep.

    Counted in turns of the event loop, against a loop without a lifecycle.
    """
    quiet = await turns_of_an_idle_loop()
    stage = rig(2, manual=True, budget=StalenessBudget(batch_size=1, max_staleness=0))
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        holder = await lifecycle.admit().__aenter__()
        start(tasks, lambda: lifecycle.generate(prompt(), ticket=holder))
        start(tasks, lambda: lifecycle.admit().__aenter__())
        start(tasks, lifecycle.drain)
        await bring_to(lifecycle, state)
        for engine in stage.engines:
            engine.on(events.PauseGeneration, Silence()).on(events.BeginUpdate, Silence())
            engine.on(events.TransferWeights, Silence())
        with anyio.move_on_after(0.1) as scope:
            await CANCELLED[state](stage)
        assert scope.cancelled_caught
        assert lifecycle._context.gate.waiting == 1
        assert await turns_of_an_idle_loop() <= quiet
        tasks.cancel_scope.cancel()
    assert await turns_of_an_idle_loop() <= quiet


@pytest.mark.parametrize("end", [State.FAULTED, State.CLOSED])
async def test_nothing_spins_at_the_end(end: State) -> None:
    """A lifecycle that is faulted, or closed, leaves nothing behind that wakes up."""
    quiet = await turns_of_an_idle_loop()
    stage = rig(2)
    await stage.lifecycle.attach()
    await bring_to(stage.lifecycle, State.PAUSED)
    if end is State.FAULTED:
        stage["E1"].crash()
        await stage.lifecycle.continue_generation()
        assert stage.lifecycle.state is State.FAULTED
        assert await turns_of_an_idle_loop() <= quiet
    await leave(stage)
    assert await turns_of_an_idle_loop() <= quiet


@pytest.mark.parametrize(
    "kind", [events.AbortGeneration, events.BeginUpdate, events.FlushCache, events.ContinueGeneration]
)
def test_a_fan_out_leaves_no_cancellation_behind_in_its_caller(kind: type[Request]) -> None:
    """The caller's own timeout ends an operation at any request; its task and its task group stay as they were."""

    async def main() -> None:
        stage, task = rig(2), asyncio.current_task()
        assert task is not None
        async with stage.lifecycle as lifecycle, asyncio.TaskGroup() as group:
            sibling = group.create_task(asyncio.sleep(30, "slept"))
            stage["E2"].on(events.PauseGeneration, *[Silence()] * 40)
            with pytest.raises(errors.PauseFailed):
                await lifecycle.publish(SOURCE, version=1, mode=PauseMode.ABORT)
            stage.behave()
            stage["E2"].on(kind, Delay(0.4))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await lifecycle.publish(SOURCE, version=1)
            assert (task.cancelling(), lifecycle.state) == (0, State.RUNNING)
            await lifecycle.publish(SOURCE, version=2)
            assert (task.cancelling(), await sibling) == (0, "slept")
            check(stage)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


class EagerLoop(VirtualTimeLoop):
    """Starts every task at once, within the call that makes it."""

    def __init__(self) -> None:
        super().__init__()
        if sys.version_info >= (3, 12):
            self.set_task_factory(asyncio.eager_task_factory)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_a_publication_among_eager_tasks_can_be_cancelled_at_each_request() -> None:
    """Tasks that run before whoever made them goes on neither hang the fan-out nor lose the cancellation."""

    async def cancelled_at(count: int) -> bool:
        stage = rig(2)
        reached: list[bool] = []
        async with stage.lifecycle as lifecycle:
            task = asyncio.ensure_future(lifecycle.publish(SOURCE, version=1))
            stage.when(count, lambda: reached.append(task.cancel()))
            await asyncio.wait([task])
            assert task.cancelled() is bool(reached)
            check(stage)
        await leave(stage)
        return bool(reached)

    async def main() -> None:
        count = 1
        while await cancelled_at(count):
            count += 1
        assert count > 20

    with asyncio.Runner(loop_factory=EagerLoop) as runner:
        runner.run(main())
