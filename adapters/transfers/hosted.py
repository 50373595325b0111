"""The life of one broadcast channel on the trainer's side: hosted, connected, used, and cut once for all."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from ipaddress import ip_address
from typing import TYPE_CHECKING

import attrs
import torch

from adapters.transfers.process_group import Group, host_group
from adapters.transfers.rendezvous import PortTaken, Rendezvous
from lifecycle.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from lifecycle.ports import Bucket, Channel

__all__ = ["HostedChannel"]

_ATTEMPTS = 100
"""Ports tried before giving up, where somebody else took them."""

_LATECOMERS = 3.0
"""Seconds for which engines that were told to join, but did not yet, are turned away instead of finding nobody."""


class HostedChannel:
    """A store, then a group at it, and a buffer: what one channel holds.

    `host`, `connect` and `send` block and belong in worker threads, one at a time; `cut` may be called from any thread
    at any time, and whatever a thread finishes after that it releases itself. Nothing here survives a cut, the buffer
    neither, since an abandoned worker may still read from it.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._rendezvous: Rendezvous | None = None
        self._group: Group | None = None
        self._buffer: Tensor | None = None
        self._was_cut = False
        self._lock = threading.Lock()

    @property
    def ranks(self) -> tuple[dict[str, int], int]:
        """Each member's first rank, and the size of the group."""
        return dict(self.channel.rank_offsets), self.channel.world_size

    @property
    def whole(self) -> bool:
        """Whether every rank is connected, as far as can be told without talking to it."""
        return not self._was_cut and self._group is not None and self._group.whole

    def host(self, ports: Iterator[int], *, timeout: float) -> None:
        """Host the store on the next of `ports` that is free, and note it in the channel."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                rendezvous = Rendezvous(self.channel.master_address, port=next(ports), timeout=timeout)
                break
            except PortTaken:
                if attempt == _ATTEMPTS:
                    raise
        with self._lock:
            self._rendezvous = rendezvous
            self.channel = attrs.evolve(self.channel, master_port=rendezvous.port)
        self._unless_cut()

    def connect(self, *, timeout: float) -> None:
        """Meet the other ranks."""
        channel = self.channel
        if self._rendezvous is None or self._group is not None:
            raise TransferFailed(f"group {channel.name} is not waiting to be connected")
        try:
            group = host_group(
                self._rendezvous,
                world_size=channel.world_size,
                group_name=channel.name,
                backend=channel.backend,
                timeout=timeout,
            )
        except TransferFailed as error:
            raise TransferFailed(f"{error}{self._hint()}") from error
        with self._lock:
            self._group = group
        self._unless_cut()

    def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Broadcast a bucket's tensors, or their bytes as one tensor where the channel is packed."""
        self._unless_cut()
        if self._group is None:
            raise TransferFailed(f"group {self.channel.name} is not connected: connect() comes first")
        if bucket.payload is None:
            raise ValueError(f"bucket {bucket.index} has no payload: it was not made by this transfer")
        with _device_of(bucket.payload):
            self._group.broadcast_all(self._staged(bucket.payload, bucket.nbytes), timeout=timeout)

    def cut(self, *, expected: bool = False) -> None:
        """End it: blocked threads return, here and in the engines. Idempotent, any thread.

        Args:
            expected: Whether engines may have been told to join. Those that come a little later are turned away.
        """
        with self._lock:
            self._was_cut = True
            rendezvous, group = self._rendezvous, self._group
        if rendezvous is not None:
            rendezvous.cut(latecomers=_LATECOMERS if expected and group is None else 0.0)
        if group is not None:
            group.cut()

    def close(self) -> None:
        """Cut it and release what it holds. Idempotent."""
        self.cut()
        with self._lock:
            rendezvous, self._rendezvous = self._rendezvous, None
            group, self._group = self._group, None
            self._buffer = None
        if group is not None:
            group.close()
        if rendezvous is not None:
            rendezvous.close()

    def _unless_cut(self) -> None:
        """Release what was made too late, and fail."""
        if self._was_cut:
            self.close()
            raise TransferFailed(f"group {self.channel.name} was cut and can't be used again")

    def _staged(self, tensors: Sequence[Tensor], nbytes: int) -> list[Tensor]:
        """Return the tensors to send: as they are where they lie right, else copies in the standing buffer."""
        device = torch.device("cpu" if self.channel.backend == "gloo" else "cuda")
        if not self.channel.packed and all(tensor.device.type == device.type for tensor in tensors):
            return list(tensors)
        buffer = self._buffer
        if buffer is None or buffer.numel() < nbytes:
            # Reused, since writing into fresh memory is four times slower than into memory that was touched before.
            pinned = device.type == "cpu" and any(tensor.is_cuda for tensor in tensors)
            self._buffer = buffer = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        pieces, start = [], 0
        for tensor in tensors:
            pieces.append(buffer[start : start + tensor.nbytes])
            pieces[-1].copy_(tensor.detach().reshape(-1).view(torch.uint8))
            start += tensor.nbytes
        return [buffer[:nbytes]] if self.channel.packed else pieces

    def _hint(self) -> str:
        try:
            loopback = ip_address(self.channel.master_address).is_loopback
        except ValueError:
            return ""
        return f" ({self.channel.master_address} is reached from this machine only)" if loopback else ""


def _device_of(tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Select the tensors' CUDA device in this thread, since a new thread begins at device 0."""
    on_device = next((tensor for tensor in tensors if tensor.is_cuda), None)
    return nullcontext() if on_device is None else torch.cuda.device(on_device.device)
