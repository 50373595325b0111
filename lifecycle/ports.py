"""What the core asks of the outside: the protocols that adapters implement, and the values that cross them.

An *engine port* acts on requests and generates. A *transfer port* is the trainer's half of moving weights. A *weight
source* yields the tensors. The core imports none of their libraries: tensors pass through it unseen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from .states import Outcome, PauseMode

if TYPE_CHECKING:
    from .events import Request
    from .fleet import EngineFacts
    from .generation import GenerationRequest, Segment


@frozen(kw_only=True)
class Capabilities:
    """What a server can do, and what its answers are worth."""

    pause_modes: frozenset[PauseMode]
    transfers: frozenset[str] = frozenset({"broadcast", "disk"})
    """Kinds of `Channel` it can receive from."""
    at_risk_from_begin: frozenset[str] = frozenset()
    """Kinds of channel for which weights may be partly written as soon as `BeginUpdate` is sent (vLLM's broadcast), not
    only from the first transfer."""
    reports_versions: bool = False
    """Its replies say which weight version made which token, exactly."""


@frozen(kw_only=True)
class EngineReport:
    """What a probe learnt from an engine. `None` means that the server does not say."""

    kind: str
    """The server's name: `"sglang"`, `"vllm"`, ..."""
    server_version: str | None = None
    ready: bool = True
    """It answers control calls. A paused engine is ready."""
    incarnation: str | None = None
    """Changes when the server process was started anew."""
    paused: bool | None = None
    asleep: bool = False
    """Weights are not in memory, so that an update has nowhere to go."""
    whole: bool | None = None
    """Whether its weights are one complete version; `False` means an update is open or was left half-way."""
    label: str | None = None
    """The weight version it is labelled with, `RUN:VERSION` where a lifecycle labelled it."""
    world_size: int = 1
    """Worker ranks behind this engine that take part in a broadcast."""
    detail: str = ""


@frozen(kw_only=True)
class Acknowledgement:
    """What is known after a request. Made by the dialect from the server's reply, or from the lack of one."""

    outcome: Outcome
    detail: str = ""
    """One sentence for people. Never a payload, a key or a prompt."""
    stopped: bool | None = None
    """PauseGeneration, ProvePaused: the scheduler has stopped stepping."""
    idle: bool | None = None
    """PauseGeneration, ProvePaused: no request is left in the engine."""
    untouched: bool = False
    """The engine proves that its weights are whole and the ones from before the update."""
    unreachable: bool = False
    """No connection could be made, or the server said it is dead: nothing was and nothing will be done."""
    report: EngineReport | None = None
    """ProbeEngine: what was learnt."""

    @property
    def done(self) -> bool:
        """Whether the request is known to have taken effect."""
        return self.outcome is Outcome.DONE


@frozen(kw_only=True)
class Channel:
    """What engines must know to receive from a transfer. A new transfer group is a new channel, never a reused name."""

    kind: str
    """`"broadcast"` or `"disk"`."""
    name: str
    """Unique among this transfer's groups; the process group's name for a broadcast."""
    master_address: str = ""
    master_port: int = 0
    world_size: int = 0
    """Ranks in the group: the trainer's sending rank 0 and every worker rank of every member."""
    rank_offsets: Mapping[str, int] = field(factory=dict)
    """First rank of each member, by engine name."""
    backend: str = ""
    """`"gloo"` or `"nccl"`."""
    packed: bool = False
    """Buckets travel as one flat uint8 tensor."""
    bucket_bytes: int = 0
    """Upper size of a packed bucket, which vLLM's receivers must agree on."""
    timeout: float = 60.0
    """Seconds after which the engine's half gives up."""


@frozen(kw_only=True)
class Bucket:
    """A piece of a publication: which tensors travel together."""

    index: int
    last: bool
    """Nothing follows: the place for flags that servers want once (flush, version label)."""
    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    """Such as `"bfloat16"`."""
    shapes: tuple[tuple[int, ...], ...] = ()
    nbytes: int = 0
    packed: bool = False
    path: str | None = None
    """Disk: the directory that holds the whole version."""
    payload: Any = field(default=None, repr=False, eq=False)
    """The trainer's half. Read only by the transfer that made the bucket."""


class WeightSource(Protocol):
    """The weights of one version, as the trainer holds them."""

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """Yield (name, tensor) in a fixed order, names as in the Hugging Face checkpoint.

        Iterated on the caller's thread, since gathering shards is a collective of the trainer's ranks.
        """
        ...


@frozen(kw_only=True)
class Member:
    """An engine that takes part in a transfer."""

    name: str
    world_size: int


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
    """One inference server behind one base URL. It reports failures as outcomes, and raises only on bugs."""

    @property
    def name(self) -> str:
        """A name unique in the fleet, without credentials."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do. May be refined by a probe."""
        ...

    async def perform(
        self, request: "Request", facts: "EngineFacts", *, timeout: float, sent: Callable[[], None] = _nothing
    ) -> Acknowledgement:
        """Act on `request` within `timeout` seconds and say what is known afterwards.

        Calls `sent` once the bytes that make the engine act have been written, before waiting for its reply.

        Cancellation: the request may or may not have taken effect; the caller counts it as unknown.
        """
        ...

    async def generate(self, request: "GenerationRequest", *, timeout: float) -> "Segment":
        """Generate until a stop, the budget, or an abort, within `timeout` seconds.

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
