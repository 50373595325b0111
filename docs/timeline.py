"""A small run on virtual time, and what its events say: what the picture in staleness.md is drawn from."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import anyio
from attrs import define, field, frozen

from lifecycle import Generation, GenerationRequest, Lifecycle, OnStale, RolloutExecutor, StalenessBudget, events
from lifecycle.events import Event
from lifecycle.rollouts import Episode
from lifecycle.testing import Delay, ScriptedEngine, ScriptedTransfer
from tests.virtual_time import on_virtual_clock

BATCH_SIZE, MAX_STALENESS, MAX_CONCURRENT, VERSIONS = 2, 1, 3, 3
LENGTHS = (3, 4, 9, 4, 3, 4, 3, 4, 4, 3, 4, 4)
"""Tokens of each rollout. The engine makes one a second for each; no two rollouts end at once."""
BEGIN, TRAIN, TRANSFER, CONTINUE, END = 0.5, 1.25, 1.0, 0.5, 0.75
"""Seconds: until the first rollout starts, of a training step, of the transfer, until the engine has continued, and
after the last publication."""


@define
class Bar:
    """One rollout."""

    number: int
    version: int
    """At admission."""
    admitted: float
    finished: float | None = None
    left: float | None = None
    """When training took it, or it was dropped."""
    taken_at: int | None = None
    """The published version then."""
    staleness: int | None = None
    dropped: bool = False
    tokens: tuple[int | None, ...] = ()
    """The version that made each."""
    usable: int | None = None
    """Tokens that a mask would leave."""


@frozen
class Sample:
    """The budget right after an event."""

    at: float
    version: int
    running: int
    counted: int
    capacity: int

    @property
    def allowed(self) -> int:
        """How many rollouts may be running, or accepted, in the whole run so far."""
        return (MAX_STALENESS + self.version + 1) * BATCH_SIZE

    @property
    def limit(self) -> str:
        """Which side of the formula is the smaller one."""
        left, free = self.allowed - self.counted - self.running, MAX_CONCURRENT - self.running
        return "both" if left == free else "staleness" if left < free else "concurrency"


@define
class Timeline:
    """What happened, in seconds from the beginning."""

    bars: dict[int, Bar] = field(factory=dict)
    steps: list[tuple[float, float]] = field(factory=list)
    """Training steps, from the batch to the publication."""
    pauses: list[tuple[float, float]] = field(factory=list)
    publications: list[tuple[float, int]] = field(factory=list)
    samples: list[Sample] = field(factory=list)
    end: float = 0.0
    _held: float = 0.0

    def hear(self, now: float, event: Event, budget: StalenessBudget) -> None:
        """Take in an event."""
        match event:
            case events.RolloutAdmitted(ticket=number):
                self.bars[number] = Bar(number, event.version or 0, now)
            case events.RolloutSettled(ticket=number, accepted=True):
                self.bars[number].finished = now
            case events.RolloutConsumed(ticket=number) | events.RolloutDiscarded(ticket=number):
                bar = self.bars[number]
                bar.left, bar.taken_at, bar.staleness = now, event.version, event.staleness
                bar.dropped = isinstance(event, events.RolloutDiscarded)
            case events.GenerationHeld():
                self._held = now
            case events.GenerationReleased():
                self.pauses.append((self._held, now))
            case events.VersionAdvanced():
                self.publications.append((now, event.version or 0))
        self.samples.append(Sample(now, budget.version, budget.running, budget.counted, budget.capacity()))


class _Weights:
    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from ()


def _engine() -> ScriptedEngine:
    engine = ScriptedEngine("engine", manual=True)
    engine.on(events.TransferWeights, *itertools.repeat(Delay(TRANSFER), VERSIONS))
    engine.on(events.ContinueGeneration, *itertools.repeat(Delay(CONTINUE), VERSIONS))
    return engine


async def _workflow(episode: Episode, tokens: int) -> Generation:
    return await episode.generate(GenerationRequest(input_ids=(1,), max_new_tokens=tokens))


async def _train(lifecycle: Lifecycle, timeline: Timeline, now: Callable[[], float]) -> None:
    async with RolloutExecutor(lifecycle) as executor:
        for version in range(1, VERSIONS + 1):
            for rollout in await executor.batch(LENGTHS, _workflow):
                bar = next(bar for bar in timeline.bars.values() if rollout.ticket and rollout.ticket.id == bar.number)
                bar.tokens = rollout.value.versions
                bar.usable = sum(lifecycle.budget.mask(bar.tokens))
            began = now()
            await anyio.sleep(TRAIN)
            timeline.steps.append((began, now()))
            await lifecycle.publish(_Weights(), version=version)
        await anyio.sleep(END)
        timeline.end = now()


async def _run(timeline: Timeline, on_stale: OnStale) -> None:
    engine = _engine()
    budget = StalenessBudget(
        batch_size=BATCH_SIZE, max_staleness=MAX_STALENESS, max_concurrent=MAX_CONCURRENT, on_stale=on_stale
    )
    lifecycle = Lifecycle([engine], transfer=ScriptedTransfer(), budget=budget)
    began = anyio.current_time()

    def now() -> float:
        return round(anyio.current_time() - began, 2)

    def hear(event: Event) -> None:
        if not timeline.end:  # what follows is the end of the run, and not of the picture
            timeline.hear(now(), event, budget)

    async def generate() -> None:
        while True:
            await anyio.sleep(1)
            engine.produce()

    lifecycle.subscribe(hear)
    # Virtual seconds: where something is broken the run fails, and does not go on for ever.
    with anyio.fail_after(1000):
        async with lifecycle, anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await anyio.sleep(BEGIN)
            await _train(lifecycle, timeline, now)
            tasks.cancel_scope.cancel()
    if engine.violations:
        raise SystemExit(f"the run for the picture went wrong: {engine.violations}")


def simulate(on_stale: OnStale = OnStale.DROP) -> Timeline:
    """Run it. The same every time: on virtual time, and on asyncio, which runs what is ready in order."""
    timeline = Timeline()
    anyio.run(_run, timeline, on_stale, backend_options=on_virtual_clock("asyncio"))
    return timeline


def instants(timeline: Timeline) -> list[tuple[Sample, str]]:
    """Return the moments at which the text works the formula, and what is to be said of each."""
    samples, taken = timeline.samples, timeline.steps[0][0]
    dropped = next(bar for bar in timeline.bars.values() if bar.dropped)
    first_batch = [sample for sample in samples if sample.at == taken][-1]
    published = next(sample for sample in samples if sample.version == 1)
    after_drop = next(sample for before, sample in itertools.pairwise(samples) if sample.counted < before.counted)
    next_bar = next(bar for bar in timeline.bars.values() if bar.version == 1)
    return [
        (samples[0], "the engines have no more places"),
        (first_batch, "a place is free, and staleness keeps it empty until version 1"),
        (published, f"version 1 makes room; rollout {next_bar.number} starts as soon as submission is open"),
        (after_drop, f"rollout {dropped.number}, dropped, does not count as accepted any more"),
    ]
