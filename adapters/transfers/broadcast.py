"""Broadcast weights from the trainer to every worker rank of the engines, through a process group of its own."""

from __future__ import annotations

import itertools
import uuid
from ipaddress import ip_address
from typing import TYPE_CHECKING

import anyio
import torch
from anyio import CapacityLimiter, to_thread

from adapters.transfers.buckets import BUCKET_BYTES, fused, make_buckets
from adapters.transfers.hosted import HostedChannel
from lifecycle.errors import TransferFailed
from lifecycle.ports import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from adapters.transfers.buckets import Atomic
    from lifecycle.ports import Bucket, Member, WeightSource

__all__ = ["Broadcast"]

_PORTS = 1000
"""How many ports are walked through from a given first one, so that none is used again soon."""

_ANY_SIZE = 2**40
"""Bytes a packed bucket may have: receivers that cut by size themselves (vLLM) must never cut one of ours in two."""

_GRACE = 1.0
"""Seconds a worker is given beyond its own deadline, which it normally keeps, before it is cut and abandoned."""


class Broadcast:
    """Send weights over gloo or NCCL, rank 0 being this process and every worker rank of every engine a receiver.

    The group belongs to this object: torch's default group may exist or not and is left alone. It stands from one
    publication to the next while the members stay the same. After a failure or a cancellation it is cut, and the next
    `prepare` makes another on a fresh port under a fresh name.

    Args:
        backend: `"gloo"` or `"nccl"`; `None` for nccl where torch sees a CUDA device, else gloo.
        address: Address of this machine that the engines reach. No wildcard: engines are told to connect to it.
        port: 0 for any free port; else the first of 1000 from which each new group takes the next free one.
        bucket_bytes: Size of a bucket in bytes, which is sent after one request to each engine.
        packed: Send each bucket as one flat uint8 tensor, not tensor by tensor.
        timeout: Seconds after which the engines' half of an operation gives up.
        atomic: Function from a name to the group of tensors that must travel in one bucket, or to `None`; `None` for no
            groups.

    Raises:
        ValueError: If the address is a wildcard, or a number makes no sense.
    """

    kind = "broadcast"

    def __init__(
        self,
        *,
        backend: str | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        packed: bool = False,
        timeout: float = 60.0,
        atomic: Atomic | None = fused,
    ) -> None:
        _check(address, port, bucket_bytes, timeout)
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self._address = address
        self._ports: Iterator[int] = itertools.repeat(0)
        if port:
            self._ports = itertools.cycle(range(port, min(port + _PORTS, 65536)))
        self._bucket_bytes = bucket_bytes
        self._packed = packed
        self._timeout = timeout
        self._atomic = atomic
        self._hosted: HostedChannel | None = None

    async def prepare(self, members: Sequence[Member], *, timeout: float) -> Channel:
        """Return the channel for exactly these members: the standing one where it is still whole, else a new one.

        Raises:
            ValueError: If there are no members, or two of one name.
            TransferFailed: If no store can be hosted at the address.

        Cancellation: nothing is left open.
        """
        offsets, world_size = _ranks(members)
        hosted = self._hosted
        if hosted is not None and hosted.whole and (offsets, world_size) == hosted.ranks:
            return hosted.channel
        await self.close()
        channel = Channel(
            kind=self.kind,
            name=f"weights-{uuid.uuid4().hex[:12]}",
            master_address=self._address,
            world_size=world_size,
            rank_offsets=offsets,
            backend=self.backend,
            packed=self._packed,
            bucket_bytes=_ANY_SIZE if self._packed else self._bucket_bytes,
            timeout=self._timeout,
        )
        self._hosted = hosted = HostedChannel(channel)
        await _step(hosted, timeout, lambda: hosted.host(self._ports, timeout=timeout))
        return hosted.channel

    async def connect(self, *, timeout: float) -> None:
        """Build rank 0's half of the group within `timeout` seconds, once every engine's request has been written.

        Raises:
            TransferFailed: If an engine did not come in time, or the channel was cut.

        Cancellation: the channel is cut and not used again.
        """
        hosted = self._standing()
        await _step(hosted, timeout, lambda: hosted.connect(timeout=timeout))

    def buckets(self, source: WeightSource, version: int) -> Iterator[Bucket]:
        """Yield `source` in buckets, on the caller's thread.

        Raises:
            UnusableWeights: If the source is empty, a name comes twice, or a group would be split.
        """
        del version
        for bucket in make_buckets(source, bucket_bytes=self._bucket_bytes, atomic=self._atomic, packed=self._packed):
            if any(tensor.is_cuda for tensor in bucket.payload):
                torch.cuda.current_stream().synchronize()  # the worker that sends has a stream of its own
            yield bucket

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Broadcast one bucket within `timeout` seconds, once every engine's request has been written.

        Raises:
            TransferFailed: If an engine failed, time ran out, or the channel was cut. It is not used again.

        Cancellation: the channel is cut and not used again.
        """
        hosted = self._standing()
        await _step(hosted, timeout, lambda: hosted.send(bucket, timeout=timeout))

    async def stop(self) -> None:
        """Cut the channel now: whatever is blocked in it returns, and it is not used again. Idempotent.

        Cancellation: the cut itself is synchronous and complete.
        """
        if self._hosted is not None:
            self._hosted.cut(expected=True)

    async def close(self) -> None:
        """Release the group, its threads, sockets and port. Idempotent.

        Cancellation: the channel is cut.
        """
        hosted, self._hosted = self._hosted, None
        if hosted is not None:
            hosted.cut()
            await _in_thread(hosted.close)

    def _standing(self) -> HostedChannel:
        if self._hosted is None:
            raise TransferFailed("no channel is open: prepare() comes first")
        return self._hosted


async def _step(hosted: HostedChannel, timeout: float, function: Callable[[], None]) -> None:
    """Run a step of a channel in a thread. Whatever goes wrong the channel is cut, so a late result lands nowhere."""
    try:
        with anyio.fail_after(timeout + _GRACE):
            await _in_thread(function)
    except TimeoutError as error:
        hosted.cut(expected=True)
        raise TransferFailed(f"group {hosted.channel.name} hung for {timeout:.1f} s and was left to itself") from error
    except BaseException:
        hosted.cut(expected=True)
        raise


async def _in_thread(function: Callable[[], None]) -> None:
    # A limiter of its own, so that no thread which others abandoned takes our place.
    await to_thread.run_sync(function, abandon_on_cancel=True, limiter=CapacityLimiter(1))


def _check(address: str, port: int, bucket_bytes: int, timeout: float) -> None:
    try:
        wildcard = ip_address(address.strip("[]")).is_unspecified
    except ValueError:  # a host name
        wildcard = address in {"", "*"}
    if wildcard:
        raise ValueError(f"engines can't connect to the wildcard address {address!r}: give one of this machine's own")
    if not 0 <= port < 65536:
        raise ValueError(f"port is between 0 and 65535, not {port}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is at least 1, not {bucket_bytes}")
    if not timeout > 0:
        raise ValueError(f"timeout is a number of seconds above 0, not {timeout}")


def _ranks(members: Sequence[Member]) -> tuple[dict[str, int], int]:
    """Return each member's first rank, and the size of the group, whose rank 0 is the trainer's."""
    offsets: dict[str, int] = {}
    world_size = 1
    for member in members:
        if member.name in offsets or member.world_size < 1:
            raise ValueError(f"member {member.name!r} comes twice or has {member.world_size} ranks")
        offsets[member.name] = world_size
        world_size += member.world_size
    if not offsets:
        raise ValueError("a transfer needs at least one member")
    return offsets, world_size
