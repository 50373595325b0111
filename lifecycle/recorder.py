"""Where events are made: numbered, stamped, written to the journal, and handed to subscribers in order."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .cohort import Cohort
from .events import Event

_log = logging.getLogger("lifecycle")

E = TypeVar("E", bound=Event)
Subscriber = Callable[[Event], object]


class EventSink(Protocol):
    """Where the recorder writes. `lifecycle.journal.Journal` is one."""

    last_seq: int
    """The number of the last event already there; 0 for an empty one."""

    def write(self, event: Event) -> None:
        """Append an event. Must not raise; a failure is told by `sync`."""
        ...

    def sync(self) -> None:
        """Make everything written survive the death of this process and machine. Raises `OSError` if it cannot."""
        ...

    def close(self) -> None:
        """Release the sink. Idempotent."""
        ...


class Recorder:
    """Stamps events and passes them on. A subscriber that raises is reported to the log and hurts nobody else."""

    def __init__(self, cohort: Cohort, sink: EventSink | None = None) -> None:
        self._cohort = cohort
        self._sink = sink
        self._seq = sink.last_seq if sink else 0
        self._subscribers: tuple[tuple[Subscriber], ...] = ()
        self._reactions: dict[type[Event], Callable[[Any], None]] = {}
        self._pending: deque[Event] = deque()
        self._delivering = False

    def emit(self, kind: type[E], /, **fields: Any) -> E:
        """Make an event of `kind`, write it, deliver it, and return it."""
        self._seq += 1
        event = kind(
            seq=self._seq,
            at=time.time(),
            monotonic=time.monotonic(),
            cohort=self._cohort.name,
            epoch=self._cohort.epoch,
            version=self._cohort.version,
            **fields,
        )
        if self._sink is not None:
            self._sink.write(event)
        if (react := self._reactions.get(kind)) is not None:
            react(event)
        if self._subscribers:
            self._deliver(event)
        return event

    @property
    def heard(self) -> bool:
        """Whether anybody hears events."""
        return self._sink is not None or bool(self._subscribers)

    def note(self, kind: type[Event], /, **fields: Any) -> None:
        """Emit an event that is made only where somebody hears it: rollouts come and go by the thousand."""
        if self.heard:
            self.emit(kind, **fields)

    def react(self, kind: type[E], reaction: Callable[[E], None]) -> None:
        """Let the library's own `reaction` follow every event of `kind` that is emitted, before subscribers hear it."""
        self._reactions[kind] = reaction

    def sync(self) -> None:
        """Make the events so far durable. Raises `OSError` when the journal cannot be written."""
        if self._sink is not None:
            self._sink.sync()

    def close(self) -> None:
        """Close the journal."""
        if self._sink is not None:
            self._sink.close()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on. Returns what ends that; calling it twice is harmless."""
        entry = (subscriber,)  # of its own, since a callback may be subscribed twice
        self._subscribers = (*self._subscribers, entry)

        def unsubscribe() -> None:
            self._subscribers = tuple(other for other in self._subscribers if other is not entry)

        return unsubscribe

    def _deliver(self, event: Event) -> None:
        # A subscriber may cause further events (by settling a ticket, say): they wait, so that all see one order.
        self._pending.append(event)
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._pending:
                following = self._pending.popleft()
                for (subscriber,) in self._subscribers:
                    _call(subscriber, following)
        finally:
            self._delivering = False


def _call(subscriber: Subscriber, event: Event) -> None:
    try:
        subscriber(event)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 - user code; whatever it raises must not stop a hand-over half-way
        _log.exception("a subscriber failed on %s (seq %d)", type(event).__name__, event.seq)
