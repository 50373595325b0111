"""A turnstile: callers go through first come, first served, as far as there is room.

Uncontended it is one comparison. Contended, each caller who waits has an entry of its own, so that room that becomes
free wakes exactly those that can go, in order, and nobody else.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from .errors import LifecycleError


class Waiter(Protocol):
    """Somebody in the queue. Woken synchronously: what it does then must be quick and must not raise."""

    size: int
    """How much room it needs, int ≥ 1."""

    def go(self) -> None:
        """Take the room that is free now. It is no longer in the queue."""
        ...

    def refuse(self, error: LifecycleError) -> None:
        """Learn that waiting is in vain. It is no longer in the queue."""
        ...


class Turnstile:
    """A queue before a room. Whoever is first waits until there is room for it; nobody overtakes.

    It keeps no count: `has_room(size)` is asked each time, and `wake()` is to be called whenever it may have changed.
    """

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room = has_room
        self._queue: OrderedDict[Waiter, None] = OrderedDict()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def may_pass(self, size: int = 1) -> bool:
        """Whether a newcomer may go through at once."""
        return not self._queue and self._has_room(size)

    def join(self, waiter: Waiter) -> None:
        """Put `waiter` at the end of the queue."""
        self._queue[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        """Take `waiter` out of the queue, wherever it stands; those behind it may then go. Idempotent."""
        if waiter in self._queue:
            del self._queue[waiter]
            self.wake()

    def wake(self) -> None:
        """Let through whoever can go now, in order."""
        queue = self._queue
        while queue:
            first = next(iter(queue))
            if not self._has_room(first.size):
                return
            del queue[first]
            first.go()

    def refuse(self, error: LifecycleError) -> None:
        """Empty the queue, and give everybody in it `error`."""
        waiting = list(self._queue)
        self._queue.clear()
        for waiter in waiting:
            waiter.refuse(error)
