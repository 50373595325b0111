"""A request that is under way while the test does something else, whole or as a stream, and how it came back."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import httpx

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Answer", "Completed", "Flight"]


@attrs.frozen
class Answer:
    """What a server answered: the status, and the body, parsed where it is JSON."""

    status: int
    body: Any


@attrs.frozen
class Completed:
    """A generation as both dialects tell it.

    Args:
        tokens: The output tokens.
        finish: Why it ended, such as "length" or "abort"; `None` for what a stream has brought so far.
        versions: Spans of tokens with the version that made them: (version, start, end).
        detail: What the server adds to the reason, if anything.
    """

    tokens: list[int]
    finish: str | None
    versions: list[tuple[str, int, int]]
    detail: str | None = None


class Flight:
    """One POST, sent when this is made, and read by a thread of its own.

    Args:
        url: Base URL of the server.
        path: Path with its query.
        body: JSON to send; `None` for no body.
        headers: Headers to add.
        patience: Seconds after which an answer that must come is given up.
        read: Turns the answer, or the events of a stream, into a `Completed`; `None` where it is no generation.
    """

    def __init__(
        self,
        url: str,
        path: str,
        body: Any,
        *,
        headers: dict[str, str] | None = None,
        patience: float,
        read: Callable[[Any], Completed] | None = None,
    ) -> None:
        where = httpx.URL(url)
        self._patience, self._read = patience, read
        self._connection = http.client.HTTPConnection(where.host, where.port or 80)
        self._news = threading.Condition()
        self._events: list[Any] = []
        self._answer: Answer | None = None
        self._error: Exception | None = None
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        # Without its type SGLang does not take a body for JSON.
        kind = {"Content-Type": "application/json"}
        self._connection.request("POST", path, b"" if body is None else json.dumps(body), {**kind, **(headers or {})})
        self._thread = threading.Thread(target=self._receive, name=f"flight {path}", daemon=True)
        self._thread.start()

    @property
    def landed(self) -> bool:
        """Whether its answer is complete, or its connection ended."""
        return not self._thread.is_alive()

    @property
    def events(self) -> list[Any]:
        """The events of a stream that have come, parsed; the last of all is "[DONE]"."""
        with self._news:
            return list(self._events)

    def begun(self) -> Flight:
        """Wait until a stream has brought its first event, and so runs in the engine; returns the flight itself."""
        with self._news:
            self._news.wait_for(lambda: self._events or self._over, self._patience)
            assert self._events, f"the stream brought nothing: {self._answer or self._error}"
        return self

    def goes_on(self) -> bool:
        """Wait until a stream brings more than it has by now, and say whether it did."""
        with self._news:
            before = len(self._events)
            return self._news.wait_for(lambda: len(self._events) > before or self._over, self._patience) and (
                self._answer is None
            )

    def answer(self) -> Answer:
        """Wait for the answer. Raises `OSError` or `http.client.HTTPException` where the connection ended before."""
        with self._news:
            assert self._news.wait_for(lambda: self._over, self._patience), "no answer came"
            if self._error is not None:
                raise self._error
            assert self._answer is not None
            return self._answer

    def completed(self) -> Completed:
        """Wait for the end of the generation, which must have been answered with 200."""
        answer = self.answer()
        assert self._read is not None
        assert answer.status == 200, answer
        return self._read(answer.body)

    def hang_up(self) -> None:
        """Close the connection without waiting for anything. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(self._patience)
        self._connection.close()

    @property
    def _over(self) -> bool:
        return self._answer is not None or self._error is not None

    def _receive(self) -> None:
        try:
            answer = self._take(self._connection.getresponse())
        except (OSError, http.client.HTTPException, ValueError) as error:
            with self._news:
                self._error = error
                self._news.notify_all()
        else:
            with self._news:
                self._answer = answer
                self._news.notify_all()

    def _take(self, response: http.client.HTTPResponse) -> Answer:
        kind = response.getheader("content-type", "")
        if "event-stream" not in kind:
            text = response.read()
            return Answer(response.status, json.loads(text) if "json" in kind and text else text.decode())
        for line in response:
            if line.startswith(b"data: "):
                event = line[6:].strip()
                with self._news:
                    self._events.append("[DONE]" if event == b"[DONE]" else json.loads(event))
                    self._news.notify_all()
        return Answer(response.status, self.events)


def until(condition: Callable[[], bool], patience: float) -> None:
    """Ask again and again until it is so, for at most `patience` seconds; fail where it does not come about."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
