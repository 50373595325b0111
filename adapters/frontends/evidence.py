"""What a journal proves of the engines in it, as it was read, and whether it has changed since."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from attrs import field, frozen

from lifecycle import events
from lifecycle.history import History, Remembered
from lifecycle.journal import read

Mark = tuple[int, int, int, int]
"""By which a file that was written, repaired or replaced is told from what it was."""


@frozen(kw_only=True)
class Evidence:
    """A journal, read once."""

    path: Path
    history: History = field(factory=History)
    fleet: tuple[str, ...] = ()
    """Engines of the lifecycle that wrote last."""
    last_at: float = 0.0
    """When the last event was, in seconds of the Unix clock."""
    mark: Mark | None = None
    """`None`: there was no file."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read `path`; one that does not exist proves nothing.

        Raises `lifecycle.errors.JournalUnreadable`, and `OSError` for a file that cannot be read.
        """
        mark = mark_of(path)  # first: what is written while it is read counts as a change
        history, last_at = History(), 0.0
        fleet: tuple[str, ...] = ()
        for _, event in read(path) if mark is not None else ():
            history.note(event)
            last_at = event.at
            if isinstance(event, events.LifecycleOpened):
                fleet = event.engines
        return cls(path=path, history=history, fleet=fleet, last_at=last_at, mark=mark)

    def changed(self) -> bool:
        """Whether somebody has written since: a trainer that lives, or the lifecycle that comes after it."""
        return mark_of(self.path) != self.mark

    @property
    def ended(self) -> bool:
        """Whether the lifecycle that wrote last has closed, and was not killed."""
        return bool(self.fleet) and self.history.closed

    @property
    def engines(self) -> Mapping[str, Remembered]:
        """The engines that matter: of the last fleet, or still owed something."""
        known = self.history.engines
        return {name: about for name, about in known.items() if name in self.fleet or about.debt or about.dirty}

    @property
    def owing(self) -> Mapping[str, Remembered]:
        """The engines that a continue is owed to, dirty ones included."""
        return {name: about for name, about in self.engines.items() if about.debt or about.dirty}

    def named(self, name: str, address: str) -> tuple[str, Remembered] | None:
        """Return the journal's own name of the engine at `address`, and what is known of it; else of that `name`."""
        at = [known for known, where in self.history.addresses.items() if where == address]
        candidates = [(n, self.history.engines[n]) for n in at or [name] if n in self.history.engines]
        # Under several names, whichever forbids more.
        return max(candidates, key=lambda known: (known[1].dirty, known[1].debt is not None), default=None)


def mark_of(path: Path) -> Mark | None:
    """Return what tells this state of the file from every other; `None` where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
