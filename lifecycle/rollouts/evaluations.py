"""Evaluations: rollouts outside the budget, no more than a given number at once."""

from collections import deque
from collections.abc import Iterable

import anyio
from anyio.lowlevel import checkpoint

from lifecycle.gate import SubmissionGate

from .attempts import Attempts
from .jobs import Job
from .running import cancelled_alone


class Evaluations:
    """The evaluations that run. They have tasks of their own, within those who asked for them."""

    def __init__(self, gate: SubmissionGate, attempts: Attempts) -> None:
        self._gate = gate
        self._attempts = attempts
        self._scopes: set[anyio.CancelScope] = set()
        self._one_over = anyio.Event()

    async def run(self, jobs: Iterable[Job], concurrency: int) -> None:
        """Run `jobs`, at most `concurrency` at once. Returns early where `cancel()` is called.

        Cancellation: those that run are given up.
        """
        waiting = deque(jobs)
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                while waiting:  # again where asyncio has cancelled tasks before they began
                    async with anyio.create_task_group() as tasks:
                        for _ in range(min(concurrency, len(waiting))):
                            tasks.start_soon(self._one_after_the_other, waiting)
            finally:
                self._scopes.discard(scope)
                self._one_over.set()

    def cancel(self) -> None:
        """Give up everything that runs."""
        for scope in self._scopes:
            scope.cancel()

    async def over(self) -> None:
        """Wait until none runs.

        Cancellation: nothing is changed.
        """
        while self._scopes:
            self._one_over = anyio.Event()
            await self._one_over.wait()

    async def _one_after_the_other(self, waiting: deque[Job]) -> None:
        """Run what waits.

        Cancellation: the ticket of the one that runs is returned. asyncio's own, of this task alone, ends that one.
        """
        while waiting:
            try:
                await self._one(waiting)
            except BaseException as error:
                if not cancelled_alone(error):
                    raise

    async def _one(self, waiting: deque[Job]) -> None:
        ticket = await self._gate.acquire(evaluation=True)
        if not waiting:
            ticket.reject()
            return
        for member in self._attempts.begin(waiting.popleft(), ticket):
            conclude = await self._attempts.run(member)
            conclude()
        await checkpoint()
