"""Runs attempts: the workflow for each member, the filter over what they bring, and the one verdict at the end."""

from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

import anyio

from lifecycle.controller import Lifecycle
from lifecycle.errors import NoSuchRollout
from lifecycle.ticket import Ticket

from .crew import Conclusion
from .jobs import Attempt, Job, Member
from .results import Results
from .running import ends_this_task, in_context, in_thread, is_async, no_awaitable
from .values import Accept, BlockingEpisode, Episode, RolloutStatus


class Attempts:
    """The attempts that run, each with a ticket that it returns exactly once, whatever happens to its tasks."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        ended: Callable[[Attempt, RolloutStatus], None],
        interrupted: Callable[[BaseException], None],
        *,
        timeout: float | None,
        min_members: int | None,
        threads: int,
    ) -> None:
        self._lifecycle = lifecycle
        self._ended = ended
        self._interrupted = interrupted
        """Told of what ends a task, before the attempt is concluded and others may start in its place."""
        self.settling = False
        """A ticket is being returned whose result is not filed yet."""
        self._timeout = timeout
        self._min_members = min_members
        self._threads = anyio.CapacityLimiter(threads)
        self._filter = anyio.CapacityLimiter(1)
        self._running: set[Attempt] = set()

    def __len__(self) -> int:
        """How many run."""
        return len(self._running)

    def begin(self, job: Job, ticket: Ticket) -> list[Member]:
        """Begin an attempt, and return its members."""
        attempt = Attempt(job, ticket, job.group_size)
        self._running.add(attempt)
        return [Member(attempt, index) for index in range(job.group_size)]

    async def run(self, member: Member) -> Conclusion:
        """Run a member. Returns what concludes the attempt, where it was the last.

        Cancellation: the attempt counts as failed as soon as its last member has ended; its ticket is returned.
        """
        attempt = member.attempt
        try:
            value = await self._value_of(attempt, member.index)
        except BaseException as error:
            attempt.errors.append(error)
            attempt.running -= 1
            if ends_this_task(error):
                self._give_way(attempt, error)
                raise
        else:
            attempt.running -= 1
            if value is not None:
                attempt.values[member.index] = value
        if attempt.running:
            return _nothing
        try:
            status = await self._verdict(attempt)
        except BaseException as error:
            attempt.errors.append(error)
            if ends_this_task(error):
                self._give_way(attempt, error)
                raise
            status = RolloutStatus.FAILED
        return partial(self._conclude, attempt, status)

    def revoke(self, results: Results) -> None:
        """Cancel what runs for `results`, which nobody waits for any more."""
        for attempt in self._running:
            if attempt.job.results is results:
                for scope in attempt.scopes:
                    scope.cancel()

    def give_up(self) -> None:
        """Conclude what no task will: those that were cancelled before they began."""
        for attempt in list(self._running):
            self._conclude(attempt, RolloutStatus.FAILED)

    async def _value_of(self, attempt: Attempt, index: int) -> Any:
        if self._timeout is None and not attempt.job.revocable:
            return await self._call(attempt, index)
        with anyio.move_on_after(self._timeout) as scope:
            attempt.scopes.append(scope)
            if not attempt.job.results.closed:
                return await self._call(attempt, index)
        if attempt.job.results.closed:
            raise NoSuchRollout(f"nobody waits for rollout {attempt.job.id} any more")
        raise TimeoutError(f"rollout {attempt.job.id} took longer than {self._timeout:g} s")

    async def _call(self, attempt: Attempt, index: int) -> Any:
        job = attempt.job
        workflow: Any = job.workflow
        if job.threaded:
            blocking = BlockingEpisode(self._lifecycle, attempt.ticket, job.id, index)
            call = partial(job.context.copy().run, workflow, blocking, job.data)
            return no_awaitable(await in_thread(call, self._threads))
        episode = Episode(self._lifecycle, attempt.ticket, job.id, index)
        return await in_context(job.context.copy(), workflow(episode, job.data))

    async def _verdict(self, attempt: Attempt) -> RolloutStatus:
        """Return whether training may use what the members brought."""
        job, values = attempt.job, attempt.values
        if len(values) < self._fewest(job.group_size):
            return RolloutStatus.FAILED if attempt.errors else RolloutStatus.REJECTED
        if job.accept is None:
            return RolloutStatus.ACCEPTED
        ordered = tuple(values[member] for member in sorted(values))
        good = await self._judge(job.accept, ordered if job.group_size > 1 else ordered[0], job.context.copy())
        return RolloutStatus.ACCEPTED if good else RolloutStatus.REJECTED

    async def _judge(self, accept: Accept, value: Any, context: Context) -> bool:
        if is_async(accept):
            return bool(await in_context(context, accept(value)))
        return bool(no_awaitable(await in_thread(partial(context.run, accept, value), self._filter)))

    def _fewest(self, group_size: int) -> int:
        """Return how many members make a group: by default two, since one alone can be compared with nothing."""
        return min(group_size, 2 if self._min_members is None else self._min_members)

    def _give_way(self, attempt: Attempt, error: BaseException) -> None:
        if not attempt.ticket.evaluation:
            self._interrupted(error)
        if not attempt.running:
            self._conclude(attempt, RolloutStatus.FAILED)

    def _conclude(self, attempt: Attempt, status: RolloutStatus) -> None:
        """Return the ticket, and tell. Synchronous, so that it happens as a whole."""
        self._running.discard(attempt)
        ticket, job = attempt.ticket, attempt.job
        self.settling = True
        nothing = RolloutStatus.FAILED if attempt.errors else RolloutStatus.REJECTED
        if ticket.settled:  # by the workflow itself: its word counts, where there is a value to it
            if ticket.accepted and not attempt.values and not ticket.left_buffer:
                self._lifecycle.discard([ticket])
            status = RolloutStatus.ACCEPTED if ticket.accepted and attempt.values else nothing
        elif ticket.held:  # whoever holds it settles it
            status = nothing
        elif status is not RolloutStatus.ACCEPTED:
            ticket.reject()
        elif job.results.closed:  # nobody will take it
            ticket.reject()
            status = RolloutStatus.REJECTED
        else:
            ticket.accept(len(attempt.values))
        self.settling = False
        self._ended(attempt, status)


def _nothing() -> None:
    """Conclude nothing: other members still run."""
