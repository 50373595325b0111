"""What the gate costs: one passage, one admission, and everybody who waits let through by one publication.

All of it is work of one thread, measured in the time that the processor gave to it: what others took does not count.
"""

import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from time import thread_time
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from lifecycle import Lifecycle, StalenessBudget
from lifecycle.testing import ScriptedEngine
from lifecycle.turnstile import Turnstile

from .measuring import Contest, Figure

PASSAGES = 200_000
ADMISSIONS = 20_000
CROWDS = (1_000, 10_000, 100_000)

FIGURES = {
    "passage": Figure("gate alone: through and back", "µs", at_most=0.5),
    "semaphore": Figure("  anyio.Semaphore", "µs"),
    "fast semaphore": Figure("  anyio.Semaphore, fast_acquire", "µs"),
    "limiter": Figure("  anyio.CapacityLimiter", "µs"),
    "admit": Figure("admit and accept", "µs", at_most=5.0),
    "admit subscribed": Figure("  with a subscriber", "µs"),
    "admit journalled": Figure("  with a journal file", "µs"),
    "wake 1000": Figure("waking a waiter of 1 000", "µs"),
    "wake 10000": Figure("waking a waiter of 10 000", "µs", at_most=12.0),
    "wake 100000": Figure("waking a waiter of 100 000", "µs"),
    "events 10000": Figure("  10 000 bare anyio.Events", "µs"),
    "semaphore 10000": Figure("  10 000 at an anyio.Semaphore", "µs"),
}


def contest() -> Contest:
    """Return what takes turns."""
    return {
        "gate": lambda: {"passage": _passage()},
        "semaphore": lambda: {"semaphore": anyio.run(_semaphore, False)},
        "fast semaphore": lambda: {"fast semaphore": anyio.run(_semaphore, True)},
        "capacity limiter": lambda: {"limiter": anyio.run(_limiter)},
        "admission": _admissions,
        **{f"{crowd} waiters": _waker(crowd) for crowd in CROWDS},
        "bare events": lambda: {"events 10000": anyio.run(_bare_events, 10_000)},
        "waiters at a semaphore": lambda: {"semaphore 10000": anyio.run(_semaphore_waiters, 10_000)},
    }


class _Room:
    """A counter with a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    def has(self, size: int) -> bool:
        return self.taken + size <= self.limit


def _passage() -> float:
    room = _Room(8)
    turnstile = Turnstile(room.has)
    began = thread_time()
    for _ in range(PASSAGES):
        if turnstile.may_pass():
            room.taken += 1
        room.taken -= 1
        turnstile.wake()
    return (thread_time() - began) / PASSAGES * 1e6


async def _semaphore(fast: bool) -> float:
    semaphore = anyio.Semaphore(8, fast_acquire=fast)
    return await _each(semaphore.acquire, semaphore.release)


async def _limiter() -> float:
    limiter = anyio.CapacityLimiter(8)
    return await _each(limiter.acquire, limiter.release)


async def _each(acquire: Callable[[], Awaitable[None]], release: Callable[[], None]) -> float:
    count = PASSAGES // 10
    began = thread_time()
    for _ in range(count):
        await acquire()
        release()
    return (thread_time() - began) / count * 1e6


def _admissions() -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            "admit": anyio.run(_admission, None, False),
            "admit subscribed": anyio.run(_admission, None, True),
            "admit journalled": anyio.run(_admission, Path(folder) / "journal.jsonl", False),
        }


async def _admission(journal: Path | None, subscribed: bool) -> float:
    budget = StalenessBudget(batch_size=ADMISSIONS, max_staleness=0, max_concurrent=64)
    async with Lifecycle([ScriptedEngine()], budget=budget, journal=journal) as lifecycle:
        if subscribed:
            lifecycle.subscribe(_listen)
        began = thread_time()
        for _ in range(ADMISSIONS):
            async with lifecycle.admit() as ticket:
                ticket.accept()
        return (thread_time() - began) / ADMISSIONS * 1e6


def _listen(_: Any) -> None:
    """Hear an event."""


def _waker(crowd: int) -> Callable[[], Mapping[str, float]]:
    return lambda: {f"wake {crowd}": anyio.run(_waking, crowd)}


async def _waking(crowd: int) -> float:
    """Return how long each of a crowd at the gate takes, from the publication until the last was admitted."""
    budget = StalenessBudget(batch_size=crowd, max_staleness=0)
    through = _Count(crowd)
    async with Lifecycle([ScriptedEngine()], budget=budget) as lifecycle:
        fill(budget)

        async def rollout() -> None:
            async with lifecycle.admit() as ticket:
                ticket.accept()
            through.add()

        async with anyio.create_task_group() as tasks:
            for _ in range(crowd):
                tasks.start_soon(rollout)
            while lifecycle.gate.waiting < crowd:
                await checkpoint()
            began = thread_time()
            budget.advance(1)
            lifecycle.gate.wake()
    return (through.full_at - began) / crowd * 1e6


async def _bare_events(crowd: int) -> float:
    through, events = _Count(crowd), [anyio.Event() for _ in range(crowd)]
    waiting = _Count(crowd)

    async def wait(event: anyio.Event) -> None:
        waiting.add()
        await event.wait()
        through.add()

    async with anyio.create_task_group() as tasks:
        for event in events:
            tasks.start_soon(wait, event)
        while not waiting.full_at:
            await checkpoint()
        began = thread_time()
        for event in events:
            event.set()
    return (through.full_at - began) / crowd * 1e6


async def _semaphore_waiters(crowd: int) -> float:
    through, waiting, semaphore = _Count(crowd), _Count(crowd), anyio.Semaphore(0)

    async def wait() -> None:
        waiting.add()
        await semaphore.acquire()
        through.add()

    async with anyio.create_task_group() as tasks:
        for _ in range(crowd):
            tasks.start_soon(wait)
        while not waiting.full_at:
            await checkpoint()
        began = thread_time()
        for _ in range(crowd):
            semaphore.release()
    return (through.full_at - began) / crowd * 1e6


class _Count:
    """Counts, and remembers when all were counted."""

    def __init__(self, full: int) -> None:
        self._left = full
        self.full_at = 0.0

    def add(self) -> None:
        self._left -= 1
        if not self._left:
            self.full_at = thread_time()


def fill(budget: StalenessBudget) -> None:
    """Use the budget up with accepted rollouts: only a publication makes room."""
    while budget.capacity() > 0:
        budget.admit().accept()


def linearity(figures: Mapping[str, Figure]) -> Figure:
    """Return how much more each of 100 000 waiters costs than each of 1 000, by the best rounds."""
    times = figures[f"wake {CROWDS[-1]}"].best / figures[f"wake {CROWDS[0]}"].best
    return Figure("  a waiter of 100 000 : of 1 000", "times", at_most=2.0, samples=[times])
