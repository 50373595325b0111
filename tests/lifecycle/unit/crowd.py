"""Callers at a gate, and ways to let them run without waiting for a clock."""

from collections.abc import Callable

import anyio
from anyio.lowlevel import checkpoint

from lifecycle import Ticket
from lifecycle.errors import LifecycleError

from .workbench import Workbench


async def until(holds: Callable[[], bool]) -> None:
    """Let other tasks run until something holds."""
    with anyio.fail_after(5):
        while not holds():
            await checkpoint()


async def a_few_turns() -> None:
    """Let every task that could run do so."""
    for _ in range(20):
        await checkpoint()


class Crowd:
    """Callers at a gate, and the tickets they got, in order."""

    def __init__(self, bench: Workbench, tasks: anyio.abc.TaskGroup) -> None:
        self.bench = bench
        self.tasks = tasks
        self.through: list[str] = []
        self.tickets: dict[str, Ticket] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.errors: dict[str, LifecycleError] = {}

    async def add(self, *names: str, evaluation: bool = False) -> None:
        """Let callers come to the gate, one after the other."""
        for name in names:
            before = self.bench.gate.waiting
            self.tasks.start_soon(self._wait, name, evaluation)
            await until(lambda before=before: self.bench.gate.waiting > before)  # type: ignore[misc]

    async def _wait(self, name: str, evaluation: bool) -> None:
        with anyio.CancelScope() as self.scopes[name]:
            try:
                self.tickets[name] = await self.bench.gate.acquire(evaluation=evaluation)
            except LifecycleError as error:
                self.errors[name] = error
            else:
                self.through.append(name)
