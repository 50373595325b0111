"""The crew: tasks that run members, one after the other, as many at once as were admitted."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from .jobs import Member
from .running import cancelled_alone

Conclusion = Callable[[], None]

_IN_A_ROW = 32
"""Members that a task runs before it yields to the event loop: workflows that never wait must not starve it. Not after
each, since a yield costs as much as such a workflow."""


class Crew:
    """Runs members as they are handed over. A task is kept for the next one: making one costs more than a rollout may.

    `hand_over` is synchronous, so that whoever gives out tickets never waits. `run` runs a member's workflow and
    returns what is to be done about it, synchronously; where it is cancelled it does that itself.
    """

    def __init__(self, tasks: TaskGroup, run: Callable[[Member], Awaitable[Conclusion]]) -> None:
        self._tasks = tasks
        self._run = run
        self._ready: deque[Member] = deque()
        self._parked: list[anyio.Event] = []
        self._in_a_row = 0
        """Members that ended since everybody else could run for certain."""
        self._coming = 0
        """Tasks that will look for work by themselves: just started, just woken, or concluding. At least one, while a
        member waits."""

    def hand_over(self, member: Member) -> None:
        """Have `member` run as soon as the event loop comes to it."""
        self._ready.append(member)
        if not self._coming:
            self._call_for_help()

    def also(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have something else run beside the members."""
        self._tasks.start_soon(work)

    def cancel(self) -> None:
        """Cancel everything that runs."""
        self._tasks.cancel_scope.cancel()

    def _call_for_help(self) -> None:
        """See to it that one more task comes, where one is wanted for a member that waits."""
        if len(self._ready) <= self._coming:
            return
        self._coming += 1
        if self._parked:
            self._parked.pop().set()
        else:
            self._tasks.start_soon(self._work)

    async def _work(self) -> None:
        """Run members until the task group ends.

        Cancellation: the member that runs is concluded. asyncio's own, of this task alone, ends it and nothing else.
        """
        try:
            await self._one_after_the_other()
        except BaseException as error:
            if not cancelled_alone(error):
                raise

    async def _one_after_the_other(self) -> None:
        task = asyncio.current_task() if asyncio._get_running_loop() else None  # noqa: SLF001 - asyncio exports it
        while True:
            self._coming -= 1
            if self._ready:
                member = self._ready.popleft()
                # Whoever comes calls the next two: where a thousand may start at once, the first does not wait until
                # all of them have a task.
                self._call_for_help()
                self._call_for_help()
                conclude = await self._run(member)
                # Counted first: what it lets through is for this task, and no other need be woken.
                self._coming += 1
                conclude()
                self._in_a_row += 1
                # A workflow may leave its task cancelled: that must not meet the next one.
                if self._in_a_row >= _IN_A_ROW or (task is not None and task.cancelling()):
                    await self._paused()
            else:
                await self._park()

    async def _paused(self) -> None:
        self._in_a_row = 0
        try:
            await checkpoint()
        except BaseException:
            self._leave()
            raise

    async def _park(self) -> None:
        event = anyio.Event()
        self._parked.append(event)
        try:
            await event.wait()
        except BaseException:
            if event in self._parked:
                self._parked.remove(event)
            else:
                self._leave()
            raise

    def _leave(self) -> None:
        """Let another task do what this one was woken for."""
        self._coming -= 1
        self._call_for_help()
