"""How far rollouts may run ahead of training: the staleness budget and its tickets.

The capacity formula is that of AReaL (Fu et al., 2025, arXiv:2505.24298): what was accepted and what is
running may not exceed what training will have consumed `max_staleness` versions from now.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

from attrs import define, field
from attrs.validators import optional

from .errors import NoCapacity, TicketSettled


@define(eq=False)
class Ticket:
    """The right to run one rollout: a unit of capacity, and the version at admission."""

    id: int
    version: int | None
    """Published version when the rollout was admitted."""
    evaluation: bool = False
    """Outside the budget."""
    _settle: Callable[["Ticket", bool], None] = field(default=lambda _ticket, _accepted: None, repr=False)
    accepted: bool | None = field(default=None, init=False)
    """`None` while the rollout runs."""
    left_buffer: bool = field(default=False, init=False)
    """Training took the accepted rollout, or dropped it."""

    def accept(self) -> None:
        """Return the ticket with a rollout that training will use. Raises `TicketSettled` if it was rejected."""
        self._return(accepted=True)

    def reject(self) -> None:
        """Return the ticket without a rollout. Raises `TicketSettled` if it was accepted."""
        self._return(accepted=False)

    @property
    def settled(self) -> bool:
        """Whether it has been returned."""
        return self.accepted is not None

    def _return(self, *, accepted: bool) -> None:
        if self.accepted is accepted:
            return
        if self.accepted is not None:
            verdict = "accepted" if self.accepted else "rejected"
            raise TicketSettled(f"ticket {self.id} was already {verdict}")
        self.accepted = accepted
        self._settle(self, accepted)


def _whole(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an int of at least {minimum}, got {value!r}")


def _at_least(minimum: int) -> Callable[[object, Any, Any], None]:
    def check(_: object, attribute: Any, value: Any) -> None:
        _whole(attribute.name, value, minimum)

    return check


@define(kw_only=True, eq=False)
class StalenessBudget:
    """How many rollouts may be admitted now. A plain object, usable without a `Lifecycle`; not thread-safe."""

    batch_size: int = field(validator=_at_least(1))
    """Rollouts that one version consumes."""
    max_staleness: int = field(validator=_at_least(0))
    """Versions by which a consumed rollout may be older than the policy that trains on it. 0: synchronous."""
    max_concurrent: int | None = field(default=None, validator=optional(_at_least(1)))
    """Rollouts running at once. `None`: bounded by staleness alone."""
    version: int = field(default=0, validator=_at_least(0))
    running: int = field(default=0, validator=_at_least(0))
    accepted: int = field(default=0, validator=_at_least(0))
    rejected: int = field(default=0, validator=_at_least(0))
    _excess: int = field(default=0, init=False)
    """Accepted rollouts beyond `batch_size` a version that were consumed (negative: fewer were)."""
    _ids: "itertools.count[int]" = field(factory=lambda: itertools.count(1), init=False, repr=False)

    @property
    def submitted(self) -> int:
        """Rollouts ever admitted: running + accepted + rejected."""
        return self.running + self.accepted + self.rejected

    @property
    def counted(self) -> int:
        """Accepted rollouts as the formula counts them: as if every version had consumed exactly one batch."""
        return self.accepted - self._excess

    def capacity(self) -> int:
        """Return how many rollouts may be admitted now; negative when the bounds were tightened."""
        by_staleness = (self.max_staleness + self.version + 1) * self.batch_size
        left = by_staleness - (self.counted + self.running)
        return left if self.max_concurrent is None else min(self.max_concurrent - self.running, left)

    def admit(self) -> Ticket:
        """Take a unit of capacity. Raises `NoCapacity` when there is none."""
        return self.issue(self.settle, version=self.version)

    def issue(self, settle: Callable[[Ticket, bool], None], *, version: int | None) -> Ticket:
        """Take a unit of capacity; whoever gives out the ticket sees to it that `settle` calls `self.settle`, once."""
        if (capacity := self.capacity()) < 1:
            raise NoCapacity(f"staleness capacity is {capacity} at version {self.version}")
        self.running += 1
        return Ticket(next(self._ids), version, settle=settle)

    def settle(self, ticket: Ticket, accepted: bool) -> None:
        """Return the unit of capacity that `ticket` holds."""
        self.running -= 1
        if accepted:
            self.accepted += 1
        else:
            self.rejected += 1

    def advance(self, version: int, consumed: int | None = None) -> None:
        """Record that `version` is published.

        `consumed` is how many accepted rollouts left the buffer since the version before, trained on or dropped.
        `None`: `batch_size` for each version. With the true number, dynamic batches and filtered groups do not drift.
        Raises `ValueError` for a version that goes back.
        """
        _whole("version", version, 0)
        if version < self.version:
            raise ValueError(f"version {version} goes back from {self.version}")
        if consumed is not None:
            _whole("consumed", consumed, 0)
            self._excess += consumed - (version - self.version) * self.batch_size
        self.version = version

    def restore(self, version: int) -> None:
        """Take up a run again at `version`: as many rollouts count as accepted as that many versions consumed."""
        _whole("version", version, 0)
        self.version = version
        self.accepted = version * self.batch_size
        self._excess = 0


class Unlimited(StalenessBudget):
    """No bound at all: for fleets that nothing trains on, such as reward models."""

    def __init__(self) -> None:
        super().__init__(batch_size=1, max_staleness=0)

    def capacity(self) -> int:
        """Return a number that is never used up."""
        return sys.maxsize
