"""Genuine traces: what a `Lifecycle` writes down over scripted engines, in the good cases and in the bad ones."""

from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from typing import Any

import anyio
from anyio.abc import TaskGroup
from attrs import define, field

from lifecycle import (
    Deadlines,
    FleetPolicy,
    GenerationRequest,
    Lifecycle,
    PauseMode,
    StalenessBudget,
    Ticket,
    errors,
    events,
)
from lifecycle.events import Event
from lifecycle.testing import Crash, LandLate, LoseReply, Refuse, ScriptedEngine, ScriptedTransfer
from tests.virtual_time import on_virtual_clock

NAMES = ("E1", "E2")
BATCH = 3
_SHORT = dict.fromkeys(("drain", "pause", "resume", "begin", "transfer", "finish", "verify", "canary", "abandon"), 1.0)
DEADLINES = Deadlines(attach=2.0, probe=1.0, abort=0.5, grace=0.2, generate=1000.0, **_SHORT)
"""Seconds of virtual time."""


def on_virtual_time(function: Callable[[], Awaitable[Any]], backend: str) -> Any:
    """Run `function` on `backend`, without waiting for any deadline."""
    return anyio.run(function, backend=backend, backend_options=on_virtual_clock(backend))


@define
class Sink:
    """A journal in memory."""

    last_seq: int = 0
    events: list[Event] = field(factory=list)

    def write(self, event: Event) -> None:
        self.events.append(event)
        self.last_seq = event.seq

    def sync(self) -> None:
        """Keep nothing back."""

    def close(self) -> None:
        """Stay open: another lifecycle may go on with it."""


class _Source:
    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from ()


SOURCE = _Source()


@define(kw_only=True)
class Stage:
    """A lifecycle, its engines, and the rollouts that run on it."""

    lifecycle: Lifecycle
    engines: list[ScriptedEngine]
    transfer: ScriptedTransfer
    sink: Sink
    tasks: TaskGroup
    accepted: list[Ticket] = field(factory=list)
    """Rollouts that training has not taken yet."""

    async def publish(self, **options: Any) -> None:
        """Publish the next version."""
        await self.lifecycle.publish(SOURCE, version=(self.lifecycle.version or 0) + 1, **options)

    async def fail_to_publish(self) -> None:
        """Publish the next version, in vain."""
        try:
            await self.publish()
        except errors.OperationFailed:
            return
        raise AssertionError("the publication succeeded")

    async def rollouts(self, count: int = BATCH, *, accept: bool = True, evaluation: bool = False) -> None:
        """Start rollouts, and wait until they are in the engines or at the gate."""
        lifecycle = self.lifecycle

        async def one() -> None:
            try:
                async with lifecycle.admit(evaluation=evaluation) as ticket:
                    request = GenerationRequest(input_ids=(1, 2), max_new_tokens=4)
                    await lifecycle.generate(request, ticket=ticket)
                    if accept:
                        ticket.accept()
                    if accept and lifecycle is self.lifecycle:  # not of a trainer that was killed meanwhile
                        self.accepted.append(ticket)
            except errors.LifecycleError:
                pass  # closed or faulted meanwhile

        for _ in range(count):
            self.tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()

    async def produce(self, tokens: int = 4) -> None:
        """Let the engines make tokens, and everything follow from it."""
        await anyio.wait_all_tasks_blocked()
        for engine in self.engines:
            engine.produce(tokens)
        await anyio.wait_all_tasks_blocked()

    def consume(self, count: int = BATCH) -> int:
        """Let training take the oldest rollouts that are young enough. Returns how many there were."""
        bound = (self.lifecycle.version or 0) - self.lifecycle.budget.max_staleness
        young = [ticket for ticket in self.accepted if (ticket.version or 0) >= bound][:count]
        self.accepted = [ticket for ticket in self.accepted if ticket not in young]
        self.lifecycle.consume(young)
        return len(young)

    def discard(self) -> None:
        """Drop the oldest rollout."""
        self.lifecycle.discard([self.accepted.pop(0)])


Scenario = Callable[[Stage], Awaitable[None]]


def record(scenario: Scenario, backend: str = "asyncio", **options: Any) -> list[Event]:
    """Play a scenario to its end, close, and return what was written down."""

    async def play() -> list[Event]:
        sink = Sink()
        engines = [ScriptedEngine(name, manual=True) for name in NAMES]
        transfer = ScriptedTransfer(buckets=2)
        async with anyio.create_task_group() as tasks:
            lifecycle = new_lifecycle(engines, transfer, sink, **options)
            stage = Stage(lifecycle=lifecycle, engines=engines, transfer=transfer, sink=sink, tasks=tasks)
            try:
                await lifecycle.attach()
                await lifecycle.resume()
                await scenario(stage)
            finally:
                await stage.lifecycle.close()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        return sink.events

    recorded: list[Event] = on_virtual_time(play, backend)
    return recorded


def new_lifecycle(
    engines: list[ScriptedEngine], transfer: ScriptedTransfer, sink: Sink, *, min_engines: int | None = None
) -> Lifecycle:
    """Return a lifecycle that goes on with the journal."""
    return Lifecycle(
        engines,
        transfer=transfer,
        budget=StalenessBudget(batch_size=BATCH, max_staleness=1, max_concurrent=2 * BATCH),
        name="run",
        policy=FleetPolicy(min_engines=min_engines),
        deadlines=DEADLINES,
        journal=sink,
    )


# ------------------------------------------------------------------------------------------------------- the scenarios


async def several_publications(stage: Stage) -> None:
    """Rollouts run over publications that interrupt them; training takes some, and drops one."""
    await stage.rollouts(2 * BATCH)
    await stage.produce(2)
    await stage.publish()
    await stage.produce()
    await stage.rollouts(BATCH)
    taken = stage.consume()
    await stage.publish(consumed=taken)
    await stage.produce()
    stage.consume(1)
    stage.discard()
    await stage.rollouts(BATCH)
    await stage.produce()
    await stage.rollouts(1, accept=False)
    await stage.produce()
    stage.consume()
    await stage.publish(mode=PauseMode.KEEP)
    await stage.rollouts(2)
    await stage.produce()


async def evaluation_tickets(stage: Stage) -> None:
    """Evaluations run while submission is closed, outside the budget."""
    await stage.rollouts(1)
    async with stage.lifecycle.suspended():
        await stage.rollouts(2, evaluation=True)
        await stage.produce()
    await stage.publish(resume=False)
    await stage.rollouts(1, evaluation=True)
    await stage.produce()
    await stage.lifecycle.resume()


async def failed_pause(stage: Stage) -> None:
    """An engine refuses its pause, and the other is continued; then the reply to a pause is lost."""
    stage.engines[0].on(events.PauseGeneration, Refuse())
    await stage.fail_to_publish()
    stage.engines[1].on(events.PauseGeneration, *[LoseReply(applied=False)] * 9)
    await stage.fail_to_publish()
    await stage.publish()


async def late_pause(stage: Stage) -> None:
    """A pause whose reply was lost lands after the continue was acknowledged."""
    engine = stage.engines[0]
    engine.on(events.PauseGeneration, *[LandLate()] * 9)
    await stage.fail_to_publish()
    engine.land()
    await stage.lifecycle.suspend()
    await stage.lifecycle.recover()
    await stage.lifecycle.resume()


async def failed_transfer(stage: Stage) -> None:
    """An engine takes half of the weights and no more; the next publication cures it."""
    await stage.rollouts()
    stage.engines[0].on(events.TransferWeights, Refuse())
    await stage.fail_to_publish()
    stage.transfer.fail_on = "send"
    await stage.fail_to_publish()
    stage.transfer.fail_on = None
    await stage.publish()
    await stage.produce()


async def crashed_engine(stage: Stage) -> None:
    """An engine dies in a publication, the other goes on; a publication takes it in again when it is back."""
    await stage.rollouts()
    stage.engines[0].on(events.TransferWeights, Crash())
    await stage.fail_to_publish()
    await stage.publish()
    await stage.produce()
    stage.engines[0].restart()
    await stage.lifecycle.suspend()
    await stage.lifecycle.recover()
    await stage.publish()
    await stage.lifecycle.resume()
    await stage.rollouts(2)
    await stage.produce()


async def fault(stage: Stage) -> None:
    """Too few engines are left; when they are back, recovery and a publication lead to RUNNING."""
    stage.engines[1].on(events.PauseGeneration, Crash())
    await stage.fail_to_publish()
    stage.engines[1].restart()
    await stage.lifecycle.recover()
    await stage.publish()


async def step_by_step(stage: Stage) -> None:
    """Every operation by itself; an update is given up before anything was sent."""
    lifecycle = stage.lifecycle
    await stage.rollouts(2)
    await lifecycle.suspend()
    await lifecycle.abort_generation()
    await stage.produce()
    await lifecycle.drain()
    stage.discard()
    await lifecycle.pause_generation(PauseMode.WAIT)
    await lifecycle.begin_update(version=1)
    await lifecycle.abandon_update()
    await lifecycle.begin_update(version=1)
    await lifecycle.transfer(SOURCE)
    await lifecycle.finish_update(resume=False)
    await lifecycle.pause_generation()
    await lifecycle.continue_generation()
    await lifecycle.resume()


async def killed_trainer(stage: Stage) -> None:
    """A trainer is killed between pause and continue; the next one finds the engines paused, and takes it on."""
    await stage.lifecycle.suspend()
    await stage.lifecycle.pause_generation()
    stage.lifecycle._context.recorder._sink = None  # whatever it does from here on was never done
    stage.lifecycle = new_lifecycle(stage.engines, stage.transfer, stage.sink)
    await stage.lifecycle.attach()
    await stage.lifecycle.recover()
    await stage.publish()


async def closed_while_dirty(stage: Stage) -> None:
    """What is partly written is left paused; what is whole is continued."""
    stage.transfer.fail_on = "send"
    stage.engines[1].on(events.AbandonUpdate, Refuse())
    await stage.fail_to_publish()


SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "several publications": (several_publications, {}),
    "evaluation tickets": (evaluation_tickets, {}),
    "failed pause": (failed_pause, {}),
    "late pause": (late_pause, {}),
    "failed transfer": (failed_transfer, {}),
    "crashed engine": (crashed_engine, {"min_engines": 1}),
    "fault": (fault, {}),
    "step by step": (step_by_step, {}),
    "killed trainer": (killed_trainer, {}),
    "closed while dirty": (closed_while_dirty, {"min_engines": 1}),
}


@cache
def recording(name: str, backend: str = "asyncio") -> tuple[Event, ...]:
    """Return the trace of a scenario. Events are immutable: every test may have the same."""
    scenario, options = SCENARIOS[name]
    return tuple(record(scenario, backend, **options))
