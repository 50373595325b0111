"""Server-sent events, taken apart as their bytes come in (WHATWG HTML, section 9.2.6). No I/O."""

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventParser:
    """Turns pieces of a stream, cut anywhere, into the data of its events.

    Comments, event names, ids and retry times are dropped: no engine says anything by them. An event that is not
    complete when the stream ends is none.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """Pieces of a line that has not ended."""
        self._data: list[str] = []
        """Lines of an event that has not ended."""
        self._after_cr = False
        self._first = True

    def feed(self, piece: bytes) -> list[str]:
        """Take in the next bytes and return the data of the events that they complete."""
        if not piece:
            return []
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]  # the other half of a line end that fell between two pieces
        self._after_cr = piece.endswith(b"\r")
        *ended, rest = _LINE_END.split(piece)
        complete = [event for line in ended if (event := self._end_line(line)) is not None]
        if rest:
            self._line.append(rest)
        return complete

    def _end_line(self, last: bytes) -> str | None:
        """Take in a line whose `last` piece has come; return the event that it ends, if it ends one."""
        line = b"".join((*self._line, last)).decode("utf-8", errors="replace")
        self._line.clear()
        if self._first:
            line, self._first = line.removeprefix("\ufeff"), False
        if line:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return None
        event = "\n".join(self._data) if self._data else None
        self._data.clear()
        return event
