"""What an executor's rollouts are made of, and what comes of them."""

from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.from_thread
from attrs import define, field

from lifecycle.generation import Generation, GenerationRequest, Tokens
from lifecycle.ticket import Ticket

if TYPE_CHECKING:
    from lifecycle.controller import Lifecycle

Workflow = Callable[["Episode", Any], Awaitable[Any]] | Callable[["BlockingEpisode", Any], Any]
"""`async def workflow(episode, data)`, or an ordinary function of the same arguments, which runs in a thread. What it
returns is the rollout's value; `None`: there is nothing to train on."""

Accept = Callable[[Any], Any]
"""Whether training may use a rollout's value (of a group: the tuple of its values), truthy or not. An ordinary function
runs in a thread, one call at a time; an async one on the event loop."""


class RolloutStatus(Enum):
    """What became of a rollout."""

    ACCEPTED = "accepted"
    """Its value is there for training."""
    REJECTED = "rejected"
    """It returned `None`, the filter did not accept it, or the workflow rejected or held its ticket."""
    FAILED = "failed"
    """The workflow or the filter raised, or it took too long; so did each retry."""
    STALE = "stale"
    """It was accepted, and grew older than the bound before it was taken."""


@define(kw_only=True, eq=False)
class Rollout:
    """The result of one submission. Nobody changes it after it was delivered."""

    id: int
    """As `submit()` returned it."""
    data: Any
    status: RolloutStatus
    ticket: Ticket = field(repr=False)
    """The ticket of its last attempt, settled or held."""
    values: tuple[Any, ...] = ()
    """What each member of the group returned, in order; those that were lost are left out."""
    errors: tuple[BaseException, ...] = ()
    """What its lost members, or its filter, raised the last time."""
    version: int | None
    """Published version when it was admitted; `None` where none was published yet."""
    staleness: int | None = None
    """Versions between that (or its oldest token, see `StalenessBudget.measured_from`) and its delivery, or its being
    dropped. `None` for one that was never accepted, and for evaluations."""

    @property
    def value(self) -> Any:
        """What the workflow returned: of a group the first; `None` where there is nothing."""
        return self.values[0] if self.values else None

    @property
    def error(self) -> BaseException | None:
        """The first of `errors`; `None` where there is none."""
        return self.errors[0] if self.errors else None

    @property
    def accepted(self) -> bool:
        """Whether its values are there for training."""
        return self.status is RolloutStatus.ACCEPTED


class Episode:
    """What a workflow holds while it runs: one member of one rollout."""

    __slots__ = ("_lifecycle", "id", "member", "ticket")

    def __init__(self, lifecycle: "Lifecycle", ticket: Ticket, rollout_id: int, member: int) -> None:
        self._lifecycle = lifecycle
        self.ticket = ticket
        self.id = rollout_id
        """As `submit()` returned it."""
        self.member = member
        """Its place in the group, from 0."""

    @property
    def version(self) -> int | None:
        """Published version when the rollout was admitted."""
        return self.ticket.version

    async def generate(
        self, request: GenerationRequest, *, on_tokens: Callable[[Tokens], None] | None = None
    ) -> Generation:
        """Generate under this rollout's ticket: see `Lifecycle.generate`.

        Cancellation: the engine is told by the closed connection.
        """
        return await self._lifecycle.generate(request, ticket=self.ticket, on_tokens=on_tokens)


class BlockingEpisode(Episode):
    """The same for an ordinary function in a thread."""

    __slots__ = ()

    def generate(  # type: ignore[override]
        self, request: GenerationRequest, *, on_tokens: Callable[[Tokens], None] | None = None
    ) -> Generation:
        """Generate, and block this thread meanwhile: see `Lifecycle.generate`. `on_tokens` runs on the event loop."""
        return anyio.from_thread.run(partial(super().generate, request, on_tokens=on_tokens))
