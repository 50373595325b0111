"""Results that nobody has taken yet, oldest first, and those who wait for them."""

import heapq
from collections.abc import Callable, Iterable

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from attrs import define, field

from lifecycle.errors import LifecycleError
from lifecycle.staleness import StalenessBudget
from lifecycle.states import OnStale
from lifecycle.ticket import Ticket
from lifecycle.turnstile import Turnstile

from .values import Rollout

Drop = Callable[["Results", list[Rollout]], None]
"""Discards accepted results that are too old, or that nobody will take."""

Beside = Callable[["Results"], Iterable[Ticket]]
"""Gives the tickets of accepted rollouts that wait elsewhere to be trained on."""


@define(eq=False)
class _Taker:
    """Somebody who waits for so many results."""

    size: int
    take: Callable[[int], list[Rollout]]
    event: anyio.Event = field(factory=anyio.Event)
    taken: list[Rollout] | None = None
    error: LifecycleError | None = None

    def go(self) -> None:
        self.taken = self.take(self.size)
        self.event.set()

    def refuse(self, error: LifecycleError) -> None:
        self.error = error
        self.event.set()


class Results:
    """The results of some submissions: `wait()`'s, or those of one dataset.

    What is put in stays until it is taken, or until it is stale and the budget says that it is dropped.
    """

    def __init__(self, budget: StalenessBudget, drop: Drop, beside: Beside, *, keeps_all: bool = False) -> None:
        self._budget = budget
        self._drop = drop
        self._beside = beside
        self.keeps_all = keeps_all
        """Also results that training cannot use are put in."""
        self._heap: list[tuple[int, int, Rollout]] = []
        self._takers = Turnstile(self._enough)
        self.reserved = 0
        """Results on their way to whoever waited for them."""
        self.closed = False
        """Nobody will come for what is put in."""

    def __len__(self) -> int:
        """How many are there."""
        return len(self._heap)

    @property
    def waited(self) -> int:
        """How many callers wait."""
        return len(self._takers)

    def put(self, result: Rollout) -> None:
        """Add a result; whoever waits first is woken if that makes enough. Dropped where nobody will come for it."""
        if self.closed:
            if result.accepted:
                self._drop(self, [result])
            return
        if self._is_stale(result):  # it grew too old while it ran
            self._drop(self, [result])
            return
        heapq.heappush(self._heap, (result.version or 0, result.id, result))
        if self._takers:
            self._takers.wake()

    def tickets(self) -> Iterable[Ticket]:
        """Return the tickets of the accepted rollouts that are there."""
        return [result.ticket for _, _, result in self._heap if result.accepted]

    def put_back(self, results: Iterable[Rollout]) -> None:
        """Return results that were taken and not delivered."""
        for result in results:
            self.put(result)

    async def take(self, count: int) -> list[Rollout]:
        """Wait for `count` results, and take the oldest. Whoever comes first is served first.

        Cancellation: nothing is taken.
        """
        while True:
            taken = await self._reserved(count)
            self.reserved -= count
            # A version may have been published between the reservation and this line.
            stale = [result for result in taken if self._is_stale(result)]
            if not stale:
                return taken
            fresh = [result for result in taken if result not in stale]
            self._drop(self, stale)
            self.put_back(fresh)

    def pick(self, rollout_id: int) -> Rollout | None:
        """Take the result of one submission, if it is there."""
        for entry in self._heap:
            if entry[1] == rollout_id:
                self._heap.remove(entry)
                heapq.heapify(self._heap)
                return entry[2]
        return None

    def refresh(self) -> None:
        """Drop what has become too old, and wake whoever can go: after a version, and whenever a rollout has ended."""
        if self._heap and self._drops:
            stale = [entry[2] for entry in self._heap if self._is_stale(entry[2])]
            if stale:
                self._heap = [entry for entry in self._heap if not self._is_stale(entry[2])]
                heapq.heapify(self._heap)
                self._drop(self, stale)
        self._takers.wake()

    def refuse(self, error: LifecycleError) -> None:
        """Give everybody who waits `error`. Results stay."""
        self._takers.refuse(error)

    def take_all(self) -> list[Rollout]:
        """Take whatever is there, in no order."""
        taken = [entry[2] for entry in self._heap]
        self._heap.clear()
        return taken

    def close(self) -> None:
        """Drop everything: nobody will come for it."""
        self.closed = True
        if left := [result for result in self.take_all() if result.accepted]:
            self._drop(self, left)

    async def _reserved(self, count: int) -> list[Rollout]:
        if self._takers.may_pass(count):
            return self._oldest(count)
        taker = _Taker(count, self._oldest)
        self._takers.join(taker)
        try:
            await taker.event.wait()
        except BaseException:
            self._takers.leave(taker)
            if taker.taken is not None:
                self.reserved -= count
                self.put_back(taker.taken)
            raise
        if taker.error is not None:
            await checkpoint_if_cancelled()  # who is cancelled, too, gets the cancellation
            raise taker.error
        return taker.taken or []

    def _enough(self, count: int) -> bool:
        if len(self._heap) < count:
            return False
        return self._budget.on_stale is not OnStale.WAIT or self._in_time(count)

    def _in_time(self, count: int) -> bool:
        """Whether what is left, running rollouts included, can still be trained on within the bound."""
        left = [result.ticket for _, _, result in sorted(self._heap)[count:] if result.accepted]
        return self._budget.leaves_time([*left, *self._beside(self)])

    def _oldest(self, count: int) -> list[Rollout]:
        self.reserved += count
        return [heapq.heappop(self._heap)[2] for _ in range(count)]

    @property
    def _drops(self) -> bool:
        return self._budget.on_stale in {OnStale.DROP, OnStale.WAIT}

    def _is_stale(self, result: Rollout) -> bool:
        return self._drops and result.accepted and self._budget.is_stale(result.ticket)
