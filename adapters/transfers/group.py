"""One rank's half of a process group: broadcast, cut, close."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from adapters.transfers import sockets
from adapters.transfers.rendezvous import reason, seconds
from lifecycle.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Group"]

_WINDOW = 4
"""Operations in flight at once: while one is on the wire, the next are queued in the backend."""

_GRACE = 0.2
"""Seconds that the backend's own timeout, which says more about the cause, is given before ours strikes."""

_PATIENCE = 5.0
"""Seconds to wait for NCCL to let go of a communicator, before it is left to its thread."""


class Group:
    """One rank's half of a process group. Made by `connect_group` or `host_group`.

    A group that failed or was cut once is never used again: `whole` says so, and every later operation is refused.
    """

    def __init__(
        self,
        backend: Any,
        store: c10d.Store,
        connections: frozenset[int],
        *,
        name: str,
        rank: int,
        world_size: int,
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.kind: str = backend.name()
        self._backend = backend
        self._store: c10d.Store | None = store
        self._connections = connections
        self._whole = True
        self._abort: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def whole(self) -> bool:
        """Whether it can still be used: it was not cut, did not fail, and no peer has hung up."""
        with self._lock:
            return self._whole and sockets.all_alive(self._connections)

    def broadcast(self, tensor: Tensor, src: int = 0, *, timeout: float) -> None:
        """Send `tensor` to all ranks where this is rank `src`, else receive into it, in place; blocks until done.

        Args:
            tensor: Contiguous, of any dtype and shape; on the CPU for gloo, on the device for nccl.
            src: The sending rank.
            timeout: Seconds.

        Raises:
            ValueError: If the tensor is not contiguous, or not on the CPU where it must be.
            TransferFailed: If a peer failed, time ran out, or the group was cut. The group is of no use afterwards.
        """
        self.broadcast_all([tensor], src, timeout=timeout)

    def broadcast_all(self, tensors: Sequence[Tensor], src: int = 0, *, timeout: float) -> None:
        """Broadcast `tensors` one after another, a few in flight at once; for the rest as `broadcast`.

        On the wire this is one broadcast a tensor, in order: peers need not do it in the same way.
        """
        payloads = [self._payload(tensor) for tensor in tensors]
        deadline = time.monotonic() + timeout
        outstanding: deque[tuple[Any, int]] = deque()
        try:
            for payload in payloads:
                outstanding.append((self._start(payload, src, deadline), payload.nbytes))
                if len(outstanding) == _WINDOW:
                    self._finish(*outstanding.popleft(), deadline)
            while outstanding:
                self._finish(*outstanding.popleft(), deadline)
        except BaseException:
            self.cut()  # what is still in flight must end before its memory is given to somebody else
            raise

    def cut(self) -> None:
        """Break the group now: what is blocked in it, here and at the peers, fails at once. Idempotent, any thread."""
        with self._lock:
            was_whole, self._whole = self._whole, False
            sockets.cut(self._connections)
            if was_whole and self.kind == "nccl":
                self._abort = _abort(self._backend)

    def close(self) -> None:
        """Release threads and sockets. Idempotent. Blocks while an operation is running: `cut` first if one may be."""
        if self.kind == "nccl":
            self.cut()
        with self._lock:
            self._whole = False
            self._backend = self._store = None
            self._connections = frozenset()
        if self._abort is not None:
            self._abort.join(timeout=_PATIENCE)

    def _payload(self, tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous, so it can't travel in place")
        if self.kind == "nccl":
            return tensor.detach()
        if tensor.device.type != "cpu":
            raise ValueError(f"gloo moves tensors in main memory, not on {tensor.device}")
        # Bytes are the same on the wire, and gloo refuses the newer dtypes (float8, uint16).
        return tensor.detach().reshape(-1).view(torch.uint8)

    def _start(self, payload: Tensor, src: int, deadline: float) -> Any:
        backend = self._backend
        if backend is None or not self._whole:
            raise TransferFailed(f"group {self.name} was cut or closed and can't be used again")
        options = c10d.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        options.timeout = seconds(deadline - time.monotonic())
        try:
            return backend.broadcast([payload], options)
        except RuntimeError as error:
            raise self._failure(payload.nbytes, error) from error

    def _finish(self, work: Any, nbytes: int, deadline: float) -> None:
        try:
            work.wait(seconds(deadline - time.monotonic() + _GRACE))
            if self.kind == "nccl":
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise self._failure(nbytes, error) from error

    def _failure(self, nbytes: int, error: Exception) -> TransferFailed:
        cause = reason(error) if self._whole else "the group was cut"
        return TransferFailed(
            f"broadcast of {nbytes} bytes in {self.kind} group {self.name}, rank {self.rank} of {self.world_size}, "
            f"failed: {cause}"
        )


def _abort(backend: Any) -> threading.Thread:
    """Abort a NCCL communicator, in a thread that nobody must wait for: it blocks while another group hangs."""
    thread = threading.Thread(target=backend.abort, name="nccl-abort", daemon=True)
    thread.start()
    return thread
