"""The journal: one event a line, JSON. Written before a request goes out and after its outcome is known."""

import contextlib
import errno
import json
import logging
import os
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import attrs

from .errors import JournalUnreadable
from .events import Event, all_events
from .history import History

_log = logging.getLogger("lifecycle")


def encode(event: Event) -> str:
    """Return `event` as one line of JSON, without the newline. Fields that stay in the process are left out."""
    fields = {"event": type(event).__name__}
    for name in _JOURNALLED[type(event)]:
        value = getattr(event, name)
        fields[name] = value.value if isinstance(value, Enum) else value
    return json.dumps(fields, separators=(",", ":"))


def decode(line: str | bytes, number: int = 1) -> Event:
    """Return the event that `line` holds. Raises `JournalUnreadable`, naming the line by `number`."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise JournalUnreadable(number, f"not JSON: {error}") from error
    kind = _VOCABULARY.get(str(fields.pop("event", None))) if isinstance(fields, dict) else None
    if kind is None:
        raise JournalUnreadable(number, "not an event that a lifecycle writes")
    expected = _CONVERTERS[kind]
    # A field that came later than the journal has a default.
    if odd := set(fields) - set(expected) | (_REQUIRED[kind] - set(fields)):
        raise JournalUnreadable(number, f"{kind.__name__}: missing or unknown fields {sorted(odd)}")
    try:
        return kind(**{name: expected[name](value) for name, value in fields.items()})
    except (TypeError, ValueError) as error:
        raise JournalUnreadable(number, f"{kind.__name__}: {error}") from error


def read(path: str | os.PathLike[str]) -> Iterator[tuple[int, Event]]:
    """Yield (line number, event). A torn last line is what a kill leaves, and is passed over.

    Raises `JournalUnreadable` for any other line that is not an event, and `OSError` where the file cannot be read.
    """
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            yield number, decode(line, number)


class Journal:
    """Append events to a file, continuing the history that it holds. Not shared between processes.

    A process that reads the file while it writes it gives up the lock that keeps others out.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file, and read what it holds.

        Raises `OSError` where it cannot be opened, also since another process writes it, and `JournalUnreadable`.
        """
        self.path = Path(path)
        self.history = History()
        """What it told before it was opened."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Opened before it is repaired: what another process is writing is not torn.
        self._file = self.path.open("a", encoding="utf-8", newline="\n")
        try:
            if not self.path.is_file():
                raise OSError(errno.EINVAL, "a journal is a regular file", str(self.path))
            _claim(self._file)
            self.last_seq = self._repair()
            _claim(self._file)  # again, since a process that closes a file gives up its locks on it
        except BaseException:
            self._file.close()
            raise
        self._error: OSError | None = None

    def write(self, event: Event) -> None:
        """Append an event and pass it to the operating system, so that it survives this process."""
        if self._file.closed:
            return
        try:
            self._file.write(encode(event) + "\n")
            self._file.flush()
        except OSError as error:
            if self._error is None:
                _log.error("the journal %s cannot be written: %s", self.path, error)
            self._error = error

    def sync(self) -> None:
        """Flush to disk. Raises `OSError`, also for a write that failed before: then no pause may go out."""
        if self._error is not None:
            raise OSError(f"the journal {self.path} cannot be written") from self._error
        if not self._file.closed:
            _claim(self._file)  # whoever read the file in this process has given up the lock
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent; what could not be written was told before."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _repair(self) -> int:
        """Cut off a torn last line, and return the number of the last event."""
        if not self.path.exists():
            return 0
        last = 0
        try:
            for _, event in read(self.path):
                last = event.seq
                self.history.note(event)
        except JournalUnreadable as error:
            raise JournalUnreadable(error.line, f"{error.problem} (in {self.path})") from error
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)
        return last


def _claim(file: TextIO) -> None:
    """Refuse a file that another living process writes. The lock goes with this process, and not to its children."""
    try:
        import fcntl  # noqa: PLC0415 - not on every system
    except ImportError:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EAGAIN}:
            raise OSError(error.errno, "another process writes this journal", file.name) from error


def _converter(declared: Any) -> Callable[[Any], Any]:
    options = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    if isinstance(options[0], type) and issubclass(options[0], Enum):
        kind = options[0]
        return lambda value: None if value is None and types.NoneType in options else kind(value)
    if typing.get_origin(declared) is tuple:
        return _strings
    accepted = tuple(int if option is float else option for option in options) + options

    def check(value: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in options):
            raise TypeError(f"{value!r} is not of type {declared}")
        return value

    return check


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{value!r} is not a list of strings")
    return tuple(value)


_VOCABULARY = all_events()
_JOURNALLED = {
    kind: tuple(f.name for f in attrs.fields(kind) if f.metadata.get("journal", True)) for kind in _VOCABULARY.values()
}
_STAMPS = {field.name for field in attrs.fields(Event)}
_REQUIRED = {
    kind: {f.name for f in attrs.fields(kind) if f.name in names and (f.default is attrs.NOTHING or f.name in _STAMPS)}
    for kind, names in _JOURNALLED.items()
}
_CONVERTERS = {
    kind: {name: _converter(typing.get_type_hints(kind)[name]) for name in names} for kind, names in _JOURNALLED.items()
}
