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
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Group"]

_WINDOW = 4
"""Operations in flight at once: while one is on the wire, the next are queued in the backend."""

_GRACE = 0.2
"""Seconds that the backend's own timeout, which says more about the cause, is given before ours strikes."""

_GLANCE = 0.5
"""Seconds between looks at the connections of an operation that lasts."""

_PATIENCE = {"nccl": 5.0, "gloo": 1.0}
"""Seconds to wait for a backend to let go of a group, before it is left to its thread."""


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
        self._waiting: set[threading.Event] = set()
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
                self._abort = _in_background(self._backend.abort)
            waiting = tuple(self._waiting)
        for event in waiting:
            event.set()

    def close(self) -> None:
        """Release threads and sockets. Idempotent. Blocks while an operation is running: `cut` first if one may be.

        A backend that does not let go, as gloo when it has lost an operation, is left to a thread of its own.
        """
        if self.kind == "nccl":
            self.cut()
        with self._lock:
            self._whole = False
            held = [self._backend, self._store]
            self._backend = self._store = None
            self._connections = frozenset()
        for release in (self._abort, _in_background(held.clear)):
            if release is not None:
                release.join(timeout=_PATIENCE[self.kind])

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
        if self.kind == "gloo":
            self._await(work, nbytes, deadline)
        try:
            work.wait(seconds(deadline - time.monotonic() + _GRACE))
            if self.kind == "nccl":
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise self._failure(nbytes, error) from error

    def _await(self, work: Any, nbytes: int, deadline: float) -> None:
        """Wait for the end of an operation, or raise where its connections are gone and it does not come.

        gloo loses an operation now and then that begins while a connection is being closed, and reports it only when
        its time is up. Its thread keeps the memory until then; nothing can arrive in it any more.
        """
        woken = _ending_of(work)
        with self._lock:
            self._waiting.add(woken)
            lasts = self._whole
        try:
            while lasts and not woken.wait(_GLANCE):
                lasts = self.whole and time.monotonic() < deadline + _GRACE
        finally:
            with self._lock:
                self._waiting.discard(woken)
        if not (work.is_completed() or self.whole or _ending_of(work).wait(_GRACE)):
            raise self._failure(nbytes, RuntimeError("a peer has hung up"))

    def _failure(self, nbytes: int, error: Exception) -> TransferFailed:
        cause = reason(error) if self._whole else "the group was cut"
        return TransferFailed(
            f"broadcast of {nbytes} bytes in {self.kind} group {self.name}, rank {self.rank} of {self.world_size}, "
            f"failed: {cause}"
        )


def _ending_of(work: Any) -> threading.Event:
    """Return what is set as soon as the operation ends, well or not."""
    ended = threading.Event()
    work.get_future().add_done_callback(lambda _: ended.set())
    return ended


def _in_background(function: Callable[[], object]) -> threading.Thread:
    """Call what may block for long, such as the release of a group that hangs, in a thread nobody need wait for."""
    thread = threading.Thread(target=function, name="release-group", daemon=True)
    thread.start()
    return thread
