"""What scenarios share: engines that misbehave in ways of their own, and looks at what became of them."""

import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from lifecycle import Lifecycle, PauseMode, events
from lifecycle.events import Event, Request
from lifecycle.generation import GenerationRequest, Segment
from lifecycle.ports import Acknowledgement
from lifecycle.states import Outcome
from lifecycle.testing import Answer
from tests.lifecycle.driver.driver_rig import Engine, Later, Rig, prompt, start

KEEPING = [mode for mode in PauseMode if mode.keeps_requests]
EMPTYING = [mode for mode in PauseMode if not mode.keeps_requests]
HOLLOW = Answer(Acknowledgement(outcome=Outcome.DONE))
"""Says that it was done, and does nothing."""


def after(engine: Engine, kind: type[Request], action: Callable[[Engine], object]) -> None:
    """Do `action` whenever `engine` has acted on a request of `kind`."""

    def act(acted: Engine, request: Request) -> None:
        if isinstance(request, kind):
            action(acted)

    engine.acted = act


def pause_itself(engine: Engine) -> None:
    """Let the engine stop generating, as servers do that pause within another request."""
    engine._pause(events.PauseGeneration(mode=PauseMode.KEEP))


def break_down(engine: Engine) -> None:
    """Pause, and let the adapter raise on the reply."""

    def raise_on_pause(_: Engine) -> None:
        raise ZeroDivisionError

    after(engine, events.PauseGeneration, raise_on_pause)


def admit_late(engine: Engine, seconds: Mapping[int, float]) -> None:
    """Let the engine take its requests at once, and the n-th (from 0) into its scheduler `seconds[n]` later."""
    generate = engine.generate
    numbers = iter(range(1_000_000))

    async def late(request: GenerationRequest, **options: Any) -> Segment:
        await anyio.sleep(seconds.get(next(numbers), 0.0))
        return await generate(request, **options)

    engine.generate = late  # type: ignore[method-assign]


async def generating(stage: Rig, tasks: TaskGroup, count: int, tokens: int = 4) -> list[Later]:
    """Start `count` generations, and return when all of them wait for their engines."""
    later = [start(tasks, lambda: stage.lifecycle.generate(prompt(tokens))) for _ in range(count)]
    await anyio.wait_all_tasks_blocked()
    return later


async def produce_all(stage: Rig, later: Sequence[Later]) -> None:
    """Let the engines make tokens until every generation has come back."""
    for _ in range(100):
        await anyio.wait_all_tasks_blocked()
        if all(one.done for one in later):
            return
        for engine in stage.engines:
            engine.produce()
        await anyio.sleep(0.1)
    raise AssertionError(f"{sum(not one.done for one in later)} generations never came back")


def facts(stage: Rig, kind: type[Event], engine: str) -> list[Any]:
    """Return the events of `kind` about `engine`."""
    return [event for event in stage.of(kind) if event.engine == engine]


def asked(engine: Engine) -> list[GenerationRequest]:
    """Return a list that grows with every generation request that the engine receives."""
    generate = engine.generate
    received: list[GenerationRequest] = []

    async def noting(request: GenerationRequest, **options: Any) -> Segment:
        received.append(request)
        return await generate(request, **options)

    engine.generate = noting  # type: ignore[method-assign]
    return received


class Books:
    """Counts rollouts by what is told of each, and compares that with the budget's own counters at every event."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.drift: list[str] = []
        """Where they disagreed, or the capacity was negative."""
        self._budget = lifecycle.budget
        self._out: dict[int, int] = {}
        self._accepted, self._rejected = lifecycle.budget.accepted, lifecycle.budget.rejected
        lifecycle.subscribe(self._look)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rollouts that run, that were accepted, and that were rejected."""
        return sum(self._out.values()), self._accepted, self._rejected

    def _look(self, event: Event) -> None:
        if isinstance(event, events.RolloutAdmitted) and not event.evaluation:
            self._out[event.ticket] = event.group_size
        if isinstance(event, events.RolloutSettled) and not event.evaluation:
            members = event.members or 0
            self._accepted += members
            self._rejected += self._out.pop(event.ticket) - members
        budget = self._budget
        counted = budget.running, budget.accepted, budget.rejected
        if counted != self.counts or budget.submitted != sum(counted) or budget.capacity() < 0:
            self.drift.append(f"{type(event).__name__}: {counted}, not {self.counts}; capacity {budget.capacity()}")


ROLLOUT = (events.RolloutAdmitted, events.RolloutSettled, events.GenerationSent, events.SegmentReceived)
"""What happens to rollouts."""


class Interruption:
    """Cancels its scope at the `at`-th chance: a cancellation at each await, or at each event, in turn."""

    def __init__(self, at: int, *, awaits: bool) -> None:
        self.scope = anyio.CancelScope()
        self.reached = False
        self._awaits = awaits
        self._left = at

    def on(self, event: Event) -> None:
        """Count what happens to rollouts, where events are chances."""
        if isinstance(event, ROLLOUT) and not self._awaits:
            self._count()

    @types.coroutine
    def during(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run `coroutine`, and count how often it waits, where that is a chance."""
        step: Callable[[Any], Any] = coroutine.send
        value: Any = None
        while True:
            try:
                awaited = step(value)
            except StopIteration as stop:
                return stop.value
            if self._awaits:
                self._count()
            try:
                value, step = (yield awaited), coroutine.send
            except BaseException as error:  # noqa: BLE001 - passed on
                value, step = error, coroutine.throw

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached = True
            self.scope.cancel()


def without_deadlock(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Let a test fail that waits for ever: after hours of virtual time."""

    @functools.wraps(test)
    async def run(**arguments: Any) -> None:
        with anyio.fail_after(10_000):
            await test(**arguments)

    return run
