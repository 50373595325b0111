"""What the core asks of the outside: the protocols that adapters implement.

An *engine port* acts on requests and generates. A *transfer port* is the trainer's half of moving weights. A *weight
source* yields the tensors. The core imports none of their libraries: tensors pass through it unseen.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from .events import Request
from .fleet import EngineFacts
from .generation import GenerationRequest, Segment, Tokens
from .values import Acknowledgement, Bucket, Capabilities, Channel, EngineReport, Member

__all__ = [
    "Acknowledgement",
    "Bucket",
    "Capabilities",
    "Channel",
    "EnginePort",
    "EngineReport",
    "Member",
    "TransferPort",
    "WeightSource",
]


class WeightSource(Protocol):
    """The weights of one version, as the trainer holds them."""

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """Yield (name, tensor) in a fixed order, names as in the Hugging Face checkpoint.

        Iterated on the caller's thread, since gathering shards is a collective of the trainer's ranks.
        """
        ...


class TransferPort(Protocol):
    """The trainer's half of moving weights. Knows no engine protocol: dialects translate channels and buckets."""

    kind: str

    async def prepare(self, members: Sequence[Member], *, timeout: float) -> Channel:
        """Return the channel for exactly these members: the standing one where it is still whole, else a new one.

        Cancellation: nothing is left open.
        """
        ...

    async def connect(self, *, timeout: float) -> None:
        """Perform the trainer's half of opening the channel, once every engine's request has been written.

        Cancellation: the channel is cut and not used again.
        """
        ...

    def buckets(self, source: WeightSource, version: int) -> Iterator[Bucket]:
        """Yield the publication piece by piece, on the caller's thread. Raises `ValueError` for an unusable source."""
        ...

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Perform the trainer's half of one bucket, once every engine's request has been written.

        Cancellation: the channel is cut and not used again.
        """
        ...

    async def stop(self) -> None:
        """Cut the channel now: whatever is blocked in it returns, and it is not used again. Idempotent.

        Cancellation: the cut itself is synchronous and complete.
        """
        ...

    async def close(self) -> None:
        """Release everything the transfer holds. Idempotent.

        Cancellation: the channel is cut.
        """
        ...


def _nothing() -> None:
    """Stand in where nobody waits for the request to be written."""


class EnginePort(Protocol):
    """One inference server behind one base URL. It reports failures as outcomes, and raises only on bugs.

    A port may also have an `address: str`, its URL without credentials: it goes to the journal, so that whoever comes
    after a killed trainer finds the engine.
    """

    @property
    def name(self) -> str:
        """A name unique in the fleet, without credentials."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do. May be refined by a probe."""
        ...

    async def perform(
        self, request: Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = _nothing
    ) -> Acknowledgement:
        """Act on `request` within `timeout` seconds and say what is known afterwards.

        Calls `sent` once the bytes that make the engine act have been written, before waiting for its reply.

        Cancellation: the request may or may not have taken effect; the caller counts it as unknown.
        """
        ...

    async def generate(
        self, request: GenerationRequest, *, timeout: float, arrived: Callable[[Tokens], None] | None = None
    ) -> Segment:
        """Generate until a stop, the budget, or an abort, within `timeout` seconds.

        `arrived`: given only to an engine whose capabilities say `streams`. It is called with tokens as they come, each
        once and in order, before the segment that holds them all is returned, or an error is raised.

        Raises `errors.EngineUnavailable` when the engine did not answer, `errors.GenerationRefused` when it refused
        the request for good.

        Cancellation: the connection is closed, on which servers abort the request.
        """
        ...

    async def aclose(self) -> None:
        """Close connections. The engine itself is left as it is. Idempotent.

        Cancellation: connections are dropped without waiting for the peer.
        """
        ...
