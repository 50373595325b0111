"""How far rollouts may run ahead of training: the staleness budget.

The capacity formula is that of AReaL (Fu et al., 2025, arXiv:2505.24298): what was accepted and what is
running may not exceed what training will have consumed `max_staleness` versions from now.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field
from attrs.setters import NO_OP, validate
from attrs.validators import instance_of, optional

from .checks import whole
from .errors import NoCapacity
from .states import MeasuredFrom, OnStale
from .ticket import Ticket


def _at_least(minimum: int) -> Callable[[object, Any, Any], None]:
    def check(_: object, attribute: Any, value: Any) -> None:
        whole(attribute.name, value, minimum)

    return check


def _from_now_on(budget: "StalenessBudget", _: Any, batch_size: int) -> int:
    """Let another size of batches count from this version on, and not for those that were consumed."""
    budget._excess += budget.version * (budget.batch_size - batch_size)  # noqa: SLF001 - its own setter
    return batch_size


def _told(budget: "StalenessBudget", attribute: Any, value: Any) -> Any:
    """Let those who wait look at the new bound: there may be room now."""
    vars(StalenessBudget)[attribute.name].__set__(budget, value)
    budget.rebound()
    return value


@define(kw_only=True, eq=False)
class StalenessBudget:
    """How many rollouts may be admitted now, and which are too old. A plain object, usable without a `Lifecycle`.

    At all times `submitted = running + accepted + rejected`, counted in rollouts: a group of n counts n times. Not
    thread-safe.
    """

    batch_size: int = field(validator=_at_least(1), on_setattr=[validate, _from_now_on, _told])
    """Rollouts that one version consumes."""
    max_staleness: int = field(validator=_at_least(0), on_setattr=[validate, _told])
    """Versions by which a consumed rollout may be older than the policy that trains on it. 0: synchronous."""
    max_concurrent: int | None = field(default=None, validator=optional(_at_least(1)), on_setattr=[validate, _told])
    """Rollouts running at once. `None`: bounded by staleness alone."""
    on_stale: OnStale = field(default=OnStale.DROP, validator=instance_of(OnStale))
    """What becomes of rollouts that are too old when training would take them."""
    measured_from: MeasuredFrom = field(default=MeasuredFrom.ADMISSION, validator=instance_of(MeasuredFrom))
    """Which version their staleness is counted from."""
    version: int = field(default=0, validator=_at_least(0))
    """The published version; `advance()` sets it."""
    running: int = field(default=0, validator=_at_least(0), on_setattr=NO_OP)
    """Rollouts that hold a ticket."""
    accepted: int = field(default=0, validator=_at_least(0), on_setattr=NO_OP)
    """Rollouts accepted in the whole run so far, whether training took them, will take them, or dropped them."""
    rejected: int = field(default=0, validator=_at_least(0), on_setattr=NO_OP)
    """Rollouts rejected in the whole run so far."""
    _excess: int = field(default=0, init=False)
    """Accepted rollouts beyond `batch_size` a version that left the buffer (negative: fewer did)."""
    _taken: int | None = field(default=None, init=False)
    """Rollouts that `consume()` was told of since the last version; `None` where it never was."""
    _out: dict[int, Ticket] = field(factory=dict, init=False, repr=False)
    rebound: Callable[[], None] = field(default=lambda: None, init=False, repr=False)
    """Called when a bound was assigned."""
    _ids: "itertools.count[int]" = field(factory=lambda: itertools.count(1), init=False, repr=False)

    # ------------------------------------------------------------------------------------------------------- admission

    @property
    def submitted(self) -> int:
        """Rollouts ever admitted: running + accepted + rejected."""
        return self.running + self.accepted + self.rejected

    @property
    def counted(self) -> int:
        """Accepted rollouts as the formula counts them: as if every version had consumed exactly one batch."""
        return self.accepted - self._excess

    @property
    def max_unconsumed(self) -> int:
        """The most rollouts that can be running, or accepted and not yet consumed, at once."""
        return (self.max_staleness + 1) * self.batch_size

    @property
    def largest_group(self) -> int:
        """The most rollouts that can be admitted as one group."""
        return self.max_unconsumed if self.max_concurrent is None else min(self.max_unconsumed, self.max_concurrent)

    @property
    def unsettled(self) -> Iterable[Ticket]:
        """The tickets that are not settled, oldest first."""
        return self._out.values()

    def capacity(self) -> int:
        """Return how many rollouts may be admitted now; negative when the bounds were tightened."""
        left = (self.max_staleness + self.version + 1) * self.batch_size - self.accepted + self._excess - self.running
        if self.max_concurrent is None:
            return left
        free = self.max_concurrent - self.running
        return min(left, free)

    def admit(self, group_size: int = 1) -> Ticket:
        """Take capacity for a rollout, or for a group. Raises `NoCapacity` when there is not enough."""
        return self.issue(self.returned, version=self.version, group_size=group_size)

    def issue(self, returned: Callable[[Ticket], None], *, version: int | None, group_size: int = 1) -> Ticket:
        """Take capacity; whoever gives out the ticket sees to it that `returned` calls `self.returned`, once."""
        if group_size.__class__ is not int or group_size < 1:
            group_size = whole("group_size", group_size, 1)
        if (capacity := self.capacity()) < group_size:
            wanted = f" and {group_size} are wanted" if group_size > 1 else ""
            raise NoCapacity(f"staleness capacity is {capacity} at version {self.version}{wanted}")
        _running(self, self.running + group_size)
        ticket = Ticket(next(self._ids), version, False, group_size, returned)
        self._out[ticket.id] = ticket
        return ticket

    def settle(self, ticket: Ticket, accepted: bool) -> None:
        """Settle `ticket`: the same as its `accept()` or `reject()`. Twice the same changes nothing.

        Raises `TicketSettled` for the contrary, and `ValueError` for another budget's ticket.
        """
        if not ticket.settled:
            self._refuse_foreign(ticket)
        if accepted:
            ticket.accept()
        else:
            ticket.reject()

    def returned(self, ticket: Ticket) -> None:
        """Take back the capacity of a ticket that was just settled. Raises `ValueError` for one that is not out."""
        self._refuse_foreign(ticket)
        del self._out[ticket.id]
        size, members = ticket.group_size, ticket.members
        _running(self, self.running - size)
        if members:
            _accepted(self, self.accepted + members)
        if members < size:
            _rejected(self, self.rejected + size - members)

    def _refuse_foreign(self, ticket: Ticket) -> None:
        if self._out.get(ticket.id) is not ticket:
            raise ValueError(f"ticket {ticket.id} is not out: it is another budget's, or was returned before")

    # ----------------------------------------------------------------------------------------------------- consumption

    @property
    def oldest_allowed(self) -> int:
        """The oldest version that is within the bound now: `version - max_staleness`, perhaps negative."""
        return self.version - self.max_staleness

    def staleness(self, ticket: Ticket) -> int:
        """Return how many versions old its rollout is now, counted as `measured_from` says."""
        since = ticket.version
        if self.measured_from is MeasuredFrom.OLDEST_TOKEN and ticket.oldest_token_version is not None:
            since = ticket.oldest_token_version
        return self.version - (since or 0)

    def is_stale(self, ticket: Ticket) -> bool:
        """Whether its rollout is older than the bound: with `max_staleness` 4, 5 versions are and 4 are not."""
        return self.staleness(ticket) > self.max_staleness

    def leaves_time(self, waiting: Iterable[Ticket]) -> bool:
        """Whether training may take a batch now, leave the rest for later, and nothing grows too old: `OnStale.WAIT`.

        `waiting`: tickets of the accepted rollouts that are left; those that run count by themselves. After the batch
        at version v, rollouts admitted at a or before can be taken at the versions v + 1 to a + `max_staleness`, in
        batches of `batch_size`: there may be no more of them than that. `True` also where no running rollout could
        change it, so that waiting would be in vain.
        """
        rest: Counter[int] = Counter()
        for ticket in waiting:
            rest[self.version - self.staleness(ticket)] += ticket.members
        due = rest.copy()
        for ticket in self._out.values():
            due[self.version - self.staleness(ticket)] += ticket.group_size
        late = running = 0
        for since in sorted(due):
            late += due[since]
            running += due[since] - rest[since]
            if running and late > (since + self.max_staleness - self.version) * self.batch_size:
                return False
        return True

    def mask(self, versions: Sequence[int | None]) -> tuple[bool, ...]:
        """Return for each token, by the version that made it, whether training may use it: `OnStale.MASK`.

        `False` also where the version is not known.
        """
        oldest = self.oldest_allowed
        return tuple(version is not None and version >= oldest for version in versions)

    def consume(self, count: int) -> None:
        """Record that training took `count` accepted rollouts. Their capacity is free with the next version."""
        whole("count", count, 0)
        self._taken = (self._taken or 0) + count

    def discard(self, count: int) -> None:
        """Record that `count` accepted rollouts were dropped instead. Their capacity is free at once."""
        whole("count", count, 0)
        self._excess += count

    def advance(self, version: int, consumed: int | None = None) -> None:
        """Record that `version` is published.

        `consumed`: how many accepted rollouts training took since the version before. `None`: as many as `consume()`
        was told of; where it never was, `batch_size` for each version. With the true number, dynamic batches and
        filtered groups do not drift. Raises `ValueError` for a version that goes back.
        """
        whole("version", version, 0)
        if version < self.version:
            raise ValueError(f"version {version} goes back from {self.version}")
        if consumed is None:
            consumed = self._taken
        else:
            whole("consumed", consumed, 0)
        if consumed is not None:
            self._excess += consumed - (version - self.version) * self.batch_size
        if self._taken is not None:
            self._taken = 0
        self.version = version

    def restore(self, version: int) -> None:
        """Take up a run again at `version`: as many rollouts count as accepted as that many versions consumed."""
        whole("version", version, 0)
        self.version = version
        self.accepted = version * self.batch_size
        self._excess = 0
        self._taken = None if self._taken is None else 0


# attrs checks every assignment to a class with validators, which costs more than the counting.
_running, _accepted, _rejected = (vars(StalenessBudget)[name].__set__ for name in ("running", "accepted", "rejected"))


class Unlimited(StalenessBudget):
    """No bound at all: for fleets that nothing trains on, such as reward models."""

    def __init__(self) -> None:
        super().__init__(batch_size=1, max_staleness=0, on_stale=OnStale.KEEP)

    @property
    def max_unconsumed(self) -> int:
        """A number that is never used up."""
        return sys.maxsize

    def capacity(self) -> int:
        """Return a number that is never used up."""
        return sys.maxsize
