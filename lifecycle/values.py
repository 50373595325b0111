"""The values that cross the ports: what engines are told, and what is known of them afterwards."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from .states import Outcome, PauseMode


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
    streams: bool = False
    """It can send tokens as it makes them."""


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


@frozen(kw_only=True)
class Member:
    """An engine that takes part in a transfer."""

    name: str
    world_size: int
