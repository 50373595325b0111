"""An executor over scripted engines, and workflows that end when and how a test says."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from attrs import define, field

from lifecycle import Episode, Lifecycle, Rollout, RolloutExecutor, RolloutStatus, StalenessBudget, Ticket, events
from tests.lifecycle.driver.driver_rig import SOURCE, Later, Rig, rig, start
from tests.lifecycle.driver.invariants import check

__all__ = [
    "Dataset",
    "Later",
    "Run",
    "Script",
    "Stage",
    "bring",
    "echo",
    "outcome_of",
    "settled",
    "staged",
    "start",
    "within",
]


async def settled() -> None:
    """Let everything happen that can happen without time passing."""
    await anyio.wait_all_tasks_blocked()


@define(eq=False)
class Run:
    """One run of a workflow, which waits to be told how to end."""

    episode: Episode
    data: Any
    over: anyio.Event = field(factory=anyio.Event)
    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    ended: bool = False

    @property
    def ticket(self) -> Ticket:
        """Its right to run."""
        return self.episode.ticket

    def succeed(self, value: Any = "value") -> None:
        """End with a value."""
        self.value = value
        self.over.set()

    def fail(self, error: BaseException | None = None) -> None:
        """End with an exception."""
        self.error = error or ZeroDivisionError("no luck")
        self.over.set()


@define
class Script:
    """A workflow whose runs wait until they are told how to end; newest last."""

    runs: list[Run] = field(factory=list)

    async def __call__(self, episode: Episode, data: Any) -> Any:
        run = Run(episode, data)
        self.runs.append(run)
        try:
            await run.over.wait()
        except BaseException:
            run.cancelled = True
            raise
        finally:
            run.ended = True
        if run.error is not None:
            raise run.error
        return run.value

    @property
    def active(self) -> list[Run]:
        """The runs that have not ended, in the order in which they began."""
        return [run for run in self.runs if not run.ended]

    @property
    def waiting(self) -> list[Any]:
        """Data of the runs that have not been told anything, in the order in which they began."""
        return [run.data for run in self.runs if not run.ended and not run.over.is_set()]

    def of(self, data: Any) -> Run:
        """Return the last run over `data`."""
        return [run for run in self.runs if run.data == data][-1]

    def succeed(self, *data: Any) -> None:
        """End the last runs over `data`, each with its data as value."""
        for each in data:
            self.of(each).succeed(each)


@define
class Stage:
    """An executor under test, and what is around it."""

    rig: Rig
    lifecycle: Lifecycle
    executor: RolloutExecutor
    script: Script = field(factory=Script)

    @property
    def budget(self) -> StalenessBudget:
        """The staleness budget."""
        return self.lifecycle.budget

    async def publish(self, **options: Any) -> None:
        """Publish the next version, and let everything follow from it."""
        await self.lifecycle.publish(SOURCE, version=(self.lifecycle.version or 0) + 1, **options)
        await settled()

    def submit(self, *data: Any, **options: Any) -> list[int]:
        """Submit the scripted workflow for each of `data`."""
        return [self.executor.submit(self.script, each, **options) for each in data]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Running, accepted and rejected rollouts, as the budget counts them."""
        return self.budget.running, self.budget.accepted, self.budget.rejected

    def of(self, kind: type[events.Event]) -> list[Any]:
        """Return the events of `kind`."""
        return self.rig.of(kind)


@asynccontextmanager
async def staged(
    *,
    batch_size: int = 4,
    max_staleness: int = 1,
    max_concurrent: int | None = None,
    budget: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Stage]:
    """Attach a lifecycle, enter an executor, and check the books when the block is left."""
    sizes: dict[str, Any] = {"batch_size": batch_size, "max_staleness": max_staleness, "max_concurrent": max_concurrent}
    under = rig(1, budget=StalenessBudget(**sizes, **(budget or {})))
    async with under.lifecycle as lifecycle:
        async with RolloutExecutor(lifecycle, **options) as executor:
            yield Stage(under, lifecycle, executor)
        books = lifecycle.budget
        assert books.running == 0
        assert books.submitted == books.accepted + books.rejected
        assert executor.running == executor.queued == 0
    check(under)


class Dataset:
    """Counts upwards, and remembers how far it was drawn."""

    def __init__(self, length: int = 10**9) -> None:
        self.length = length
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        while self.drawn < self.length:
            self.drawn += 1
            yield self.drawn

    def __len__(self) -> int:
        """Be falsy when empty, as lists are."""
        return self.length


async def echo(_: Episode, data: Any) -> Any:
    """Return the data: a workflow that never waits."""
    return data


async def within(seconds: float, call: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a call returns within so many seconds. Raises `TimeoutError`."""
    with anyio.fail_after(seconds):
        return await call()


def bring(results: list[Rollout]) -> list[tuple[Any, RolloutStatus]]:
    """Return data and status of each."""
    return [(result.data, result.status) for result in results]


async def outcome_of(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a call returns, or the exception that it raises."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 - to be looked at
        return error
