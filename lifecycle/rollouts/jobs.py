"""A submission on its way: queued, admitted as an attempt, and run member by member."""

from contextvars import Context
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, field

from lifecycle.ticket import Ticket

from .values import Accept, Rollout, RolloutStatus, Workflow

if TYPE_CHECKING:
    from .datasets import Stream
    from .results import Results


@define(kw_only=True, eq=False)
class Job:
    """One submission, from `submit()` to its result."""

    id: int
    workflow: Workflow
    threaded: bool
    """The workflow is an ordinary function."""
    data: Any
    accept: Accept | None
    group_size: int
    retries: int
    """How often it may still be run again after it failed."""
    results: "Results"
    """Where its result goes."""
    context: Context
    """Of whoever submitted it."""
    stream: "Stream | None" = None
    """The dataset that it was drawn from."""
    revocable: bool = False
    """Whoever waits for it may give it up while it runs."""


@define(eq=False)
class Attempt:
    """One admission of a job: a ticket, and what its members bring."""

    job: Job
    ticket: Ticket
    running: int
    """Members that have not ended."""
    values: dict[int, Any] = field(factory=dict)
    """By member; without those that were lost or returned `None`."""
    errors: list[BaseException] = field(factory=list)
    scopes: list[anyio.CancelScope] = field(factory=list)
    """Of members that can be cancelled one by one."""

    def result(self, status: RolloutStatus) -> Rollout:
        """Return what the job comes to with this attempt."""
        job, values = self.job, self.values
        ordered = tuple(values.values()) if len(values) < 2 else tuple(values[member] for member in sorted(values))
        return Rollout(
            id=job.id,
            data=job.data,
            status=status,
            values=ordered,
            errors=tuple(self.errors),
            version=self.ticket.version,
            ticket=self.ticket,
        )


@define(eq=False)
class Member:
    """One run of the workflow within an attempt."""

    attempt: Attempt
    index: int
