"""The ticket: the right to run one rollout, or one group of them."""

from collections.abc import Callable

from attrs import define, field

from .checks import whole
from .errors import TicketSettled, WrongEventLoop


def _nobody(_: "Ticket") -> None:
    """Stand in where nobody wants to know."""


@define(eq=False)
class Ticket:
    """The right to run one rollout, or a group that is admitted and settled as a unit.

    It holds capacity from admission until it is settled, and the version at admission. Settled once: the same verdict
    again changes nothing, another one raises `TicketSettled`. In the event loop of the lifecycle only: elsewhere
    settling raises `WrongEventLoop`.
    """

    id: int
    version: int | None
    """Published version when the rollout was admitted."""
    evaluation: bool = False
    """Outside the budget."""
    group_size: int = 1
    """Rollouts that it stands for, int ≥ 1."""
    _returned: Callable[["Ticket"], None] = field(default=_nobody, repr=False)
    accepted: bool | None = field(default=None, init=False)
    """`None` while the rollout runs."""
    members: int = field(default=0, init=False)
    """Rollouts of it that training will use: 0 until it is accepted."""
    oldest_token_version: int | None = field(default=None, init=False)
    """The oldest version that made one of its tokens, as far as they came through `Lifecycle.generate()`."""
    held: bool = field(default=False, init=False)
    """Neither leaving `admit()` nor an executor returns it."""
    left_buffer: bool = field(default=False, init=False)
    """Training took the accepted rollout, or dropped it."""

    def accept(self, members: int | None = None) -> None:
        """Return the ticket with a rollout that training will use.

        `members`: how many of the group are left; `None`: all. The others count as rejected. Raises `TicketSettled` if
        it was rejected, and `ValueError` for a number that the group does not have.
        """
        count = self.group_size if members is None else whole("members", members, 1, self.group_size)
        self._settle(True, count)

    def reject(self) -> None:
        """Return the ticket without a rollout. Raises `TicketSettled` if it was accepted."""
        self._settle(False, 0)

    def hold(self) -> None:
        """Keep the capacity when `admit()` is left: what became of the attempt is not known yet.

        Whoever learns it calls `accept()` or `reject()`; until then the rollout counts as running, as it may be. An
        executor does not return it either, and has no result of it for training.
        """
        self.held = True

    @property
    def settled(self) -> bool:
        """Whether it has been returned."""
        return self.accepted is not None

    def is_of(self, returned: Callable[["Ticket"], None]) -> bool:
        """Whether it was given out by whoever is told by `returned` that it comes back."""
        return self._returned == returned

    def saw(self, versions: tuple[int | None, ...]) -> None:
        """Take note of the versions that made tokens of this rollout."""
        known = [version for version in versions if version is not None]
        if self.oldest_token_version is not None:
            known.append(self.oldest_token_version)
        self.oldest_token_version = min(known, default=None)

    def _settle(self, accepted: bool, members: int) -> None:
        if self.accepted is accepted:
            return
        if self.accepted is not None:
            verdict = "accepted" if self.accepted else "rejected"
            raise TicketSettled(f"ticket {self.id} was already {verdict}")
        self.accepted, self.members = accepted, members
        try:
            self._returned(self)
        except WrongEventLoop:  # nothing was counted
            self.accepted, self.members = None, 0
            raise
