"""What the tests ask of a server, in the same words for both dialects."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

import httpx

from .flights import Answer, Flight, until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from .engines.servers import Server
    from .flights import Completed

    Named = Sequence[tuple[str, Tensor]]

__all__ = ["GROUP", "PACKED_BYTES", "PROMPT", "TRANSFER_SECONDS", "Wire", "columns"]

PROMPT = [5, 6, 7, 8]
ROUND_TRIPS = 5
GROUP = "contract"
TRANSFER_SECONDS = 10.0
PACKED_BYTES = 100_000
"""A packed buffer of vLLM's ends as soon as it holds more than this."""


class Wire(ABC):
    """A client of one server. It keeps no pool: vLLM closes connections without saying so.

    Args:
        server: The server.
    """

    dialect: ClassVar[str]
    long: ClassVar[int]
    """Tokens of a request that is still running when the test has done what it wants to do."""
    enough: ClassVar[int]
    """Tokens of a request that is still running some calls later, and does not take too long to its end."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.patience = server.kind.patience
        self._flights: list[Flight] = []
        self._salt = uuid.uuid4().hex[:8]
        # Nothing here is encrypted, and loading certificate authorities would take longer than most tests.
        self._http = httpx.Client(
            base_url=server.url,
            timeout=self.patience,
            trust_env=False,
            verify=False,  # noqa: S501
            headers={"Connection": "close"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.land()
        self._http.close()

    # -- calls -----------------------------------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> Answer:
        """GET."""
        return _answer(self._http.get(path, params=query or None))

    def post(self, path: str, body: Any = None, **query: Any) -> Answer:
        """POST JSON, or no body at all where it is `None`."""
        return _answer(self._http.post(path, json=body, params=query or None))

    def later(self, path: str, body: Any = None, headers: dict[str, str] | None = None, **query: Any) -> Flight:
        """POST, and go on while it is under way."""
        return self._fly(str(httpx.URL(path, params=query)) if query else path, body, headers=headers)

    def land(self) -> None:
        """Hang up on whatever is still under way."""
        for flight in self._flights:
            flight.hang_up()
        self._flights.clear()

    def named(self, name: str) -> str:
        """Make a name this client's own: a server that notices late that a client is gone aborts by its name."""
        return f"{self._salt}-{name}"

    def exchange(self) -> None:
        """Do some calls that every state answers: by their end the server has read whatever was sent before."""
        for _ in range(ROUND_TRIPS):
            self.get("/v1/models")

    def _fly(self, path: str, body: Any, **more: Any) -> Flight:
        flight = Flight(self.server.url, path, body, patience=self.patience, **more)
        self._flights.append(flight)
        return flight

    # -- generation ------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(
        self, tokens: int, *, stream: bool = False, name: str | None = None, prompt: list[int] = PROMPT
    ) -> Flight:
        """Send a greedy request for `tokens` tokens, under the name that `abort` takes."""

    def fly(self, *, stream: bool = True, name: str | None = None, tokens: int | None = None) -> Flight:
        """Send a long request, and return when the engine makes tokens for it."""
        flight = self.start(tokens or self.long, stream=stream, name=name)
        if stream:
            return flight.begun()
        # First come, first served: what is answered after it proves that it is being served.
        self.exchange()
        self.generate(1)
        return flight

    def generate(self, tokens: int = 8, prompt: list[int] = PROMPT) -> Completed:
        """Generate greedily, and wait for it."""
        return self.start(tokens, prompt=prompt).completed()

    def tokens(self) -> list[int]:
        """The greedy tokens by which weights are told from others."""
        return self.generate().tokens

    def brake(self) -> None:  # noqa: B027 - only one dialect has a brake
        """Slow generation down."""

    def hurry(self) -> None:  # noqa: B027 - only one dialect has a brake
        """Let go of whatever slows generation down."""

    # -- control ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def pause(self, mode: str) -> Answer:
        """Pause."""

    @abstractmethod
    def pause_later(self, mode: str) -> Flight:
        """Pause, and go on while that is under way."""

    @abstractmethod
    def resume(self) -> Answer:
        """Continue."""

    @abstractmethod
    def paused(self) -> bool:
        """Whether the server says that it is paused."""

    @abstractmethod
    def abort(self, name: str) -> Answer:
        """Abort the request of this name."""

    @abstractmethod
    def abort_all(self) -> Answer:
        """Abort everything."""

    @abstractmethod
    def flush(self) -> bool:
        """Ask for the cache to be dropped, and say whether the server did."""

    def until(self, condition: Callable[[], bool]) -> None:
        """Ask again and again until it is so."""
        until(condition, self.patience)

    def until_idle(self) -> None:
        """Wait until the engine has nothing to do."""
        until(self.flush, self.patience)

    # -- weights ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def label(self, version: str) -> Answer:
        """Call the weights `version`, and touch neither them nor any request."""

    @abstractmethod
    def version(self) -> str:
        """What the server says that its weights are called."""

    @abstractmethod
    def load(self, path: Path | str) -> Answer:
        """Load a checkpoint from disk, without a version."""

    @abstractmethod
    def join(self, port: int, *, packed: bool = False) -> Flight:
        """Ask the engine into the group whose store is at `port`, as rank 1 of 2."""

    @abstractmethod
    def begin(self) -> Answer:
        """Open a session of updates."""

    @abstractmethod
    def announce(self, tensors: Named, *, packed: bool = False) -> Flight:
        """Say which tensors follow, so that the engine receives them."""

    @abstractmethod
    def end(self, version: str | None = None) -> Answer:
        """Close the session."""

    @abstractmethod
    def restore(self, path: Path) -> None:
        """Bring the server back to the weights of `path`, called "old", idle, running, with no session or group."""


def columns(tensors: Named) -> tuple[list[str], list[str], list[list[int]]]:
    """Return names, dtypes and shapes, as both dialects announce tensors."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    return [name for name, _ in tensors], dtypes, [list(tensor.shape) for _, tensor in tensors]


def _answer(response: httpx.Response) -> Answer:
    body: Any = response.text
    if "json" in response.headers.get("content-type", ""):
        with suppress(ValueError):
            body = response.json()
    return Answer(response.status_code, body)
