"""What scenarios share: engines that misbehave in ways of their own, and looks at what became of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from lifecycle import PauseMode, events
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
