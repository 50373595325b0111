"""Process groups that belong to nobody but their owner: no default group, no registry of torch's is touched.

A group made here meets a peer that calls torch's `rendezvous("tcp://HOST:PORT")` and then
`_new_process_group_helper(..., PrefixStore(group_name, store), group_name=group_name)`, as SGLang does, since both look
for each other under the same keys of the store. `connect_group` and `host_group` block; call them from a worker thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from adapters.transfers import sockets
from adapters.transfers.rendezvous import Rendezvous, join, reason, seconds
from lifecycle.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch import Tensor

__all__ = ["Group", "connect_group", "host_group"]

_WINDOW = 4
"""Operations in flight at once: while one is on the wire, the next are queued in the backend."""

_GRACE = 0.2
"""Seconds that the backend's own timeout, which says more about the cause, is given before ours strikes."""

_PATIENCE = 5.0
"""Seconds to wait for NCCL to let go of a communicator, before it is left to its thread."""

_ADDRESS_BYTES = 44
"""What gloo publishes begins with 16 bytes of its own and a `sockaddr` of up to 28; uninitialised memory follows."""


def connect_group(
    *,
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout: float,
) -> Group:
    """Join a group as a receiving rank; blocks until every rank has come.

    Args:
        master_address: Where rank 0 hosts the store; waited for until it listens.
        master_port: Its port.
        rank: 1 to `world_size` - 1.
        world_size: Ranks in the group, rank 0 included.
        group_name: The name that all ranks agree on; part of the keys under which they meet.
        backend: `"gloo"`, or `"nccl"` with one CUDA device for this process.
        timeout: Seconds for all of it.

    Returns:
        The group. The caller closes it.

    Raises:
        ValueError: If rank, size or backend make no sense.
        TransferFailed: If rank 0 or another rank did not come in time, or something else answers at that port.
    """
    make = _maker(backend)
    if not 0 < rank < world_size:
        raise ValueError(f"a receiving rank of {world_size} is between 1 and {world_size - 1}, not {rank}")
    deadline = time.monotonic() + timeout
    # The store has no name in this frame: an error that somebody keeps would keep it, with its sockets, alive.
    return make(
        *join(master_address, master_port, timeout=timeout),
        name=group_name,
        rank=rank,
        world_size=world_size,
        deadline=deadline,
    )


def host_group(rendezvous: Rendezvous, *, world_size: int, group_name: str, backend: str, timeout: float) -> Group:
    """Build rank 0's half of a group at the store it hosts; blocks until every rank has come.

    Returns:
        The group. The caller closes it, and the rendezvous.

    Raises:
        ValueError: If the backend is unknown.
        TransferFailed: If a rank did not come within `timeout` seconds, or the rendezvous was cut or closed.
    """
    make = _maker(backend)
    return make(
        rendezvous.store,
        rendezvous.address,
        name=group_name,
        rank=0,
        world_size=world_size,
        deadline=time.monotonic() + timeout,
    )


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


def _maker(backend: str) -> Callable[..., Group]:
    try:
        return {"gloo": _gloo, "nccl": _nccl}[backend]
    except KeyError:
        raise ValueError(f"backend is 'gloo' or 'nccl', not {backend!r}") from None


def _gloo(store: c10d.Store, own_address: str, *, name: str, rank: int, world_size: int, deadline: float) -> Group:
    keys = _keys(store, name, "cpu")
    # Neither options nor devices have a public way in; torch's own helper only lacks the choice of the device.
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001
    options._timeout = waited = seconds(deadline - time.monotonic())  # noqa: SLF001
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        device = gloo.create_default_device(lazy_init=False)
    else:
        # Left alone, gloo announces what the host's name resolves to: on Debian 127.0.1.1, which no other host reaches.
        device = gloo.create_device(hostname=own_address, lazy_init=False)
    options._devices = [device]  # noqa: SLF001
    try:
        backend = gloo(keys, rank, world_size, options)
    except RuntimeError as error:
        del store, keys
        raise _nobody_came(f"rank {rank} of {world_size}", f"gloo group {name}", waited, error) from error
    connections = _connections(keys, rank, world_size)
    return Group(backend, store, connections, name=name, rank=rank, world_size=world_size)


def _nccl(store: c10d.Store, own_address: str, *, name: str, rank: int, world_size: int, deadline: float) -> Group:
    """Make a NCCL group, as torch's helper does. Never run: the machines this was made on have no GPU.

    NCCL connects at the first broadcast, so that a rank that did not come is noticed only there.
    """
    del own_address  # NCCL_SOCKET_IFNAME decides
    if not (torch.cuda.is_available() and c10d.is_nccl_available()):
        raise TransferFailed("nccl needs a CUDA device and a torch that was built with it; use gloo on this machine")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = waited = seconds(deadline - time.monotonic())  # noqa: SLF001
    try:
        backend = c10d.ProcessGroupNCCL(_keys(store, name, "cuda"), rank, world_size, options)
    except RuntimeError as error:
        del store
        raise _nobody_came(f"rank {rank} of {world_size}", f"nccl group {name}", waited, error) from error
    return Group(backend, store, frozenset(), name=name, rank=rank, world_size=world_size)


def _keys(store: c10d.Store, name: str, device: str) -> c10d.Store:
    """Nest the store as torch does: its user prefixes the bare name, its helper the name and the device once more."""
    return c10d.PrefixStore(f"{device}/", c10d.PrefixStore(f"{name}/", c10d.PrefixStore(name, store)))


def _nobody_came(who: str, group: str, waited: timedelta, error: Exception) -> TransferFailed:
    return TransferFailed(
        f"{who} did not meet the others in {group} within {waited.total_seconds():.1f} s: {reason(error)}"
    )


def _connections(keys: c10d.Store, rank: int, world_size: int) -> frozenset[int]:
    """Find the sockets of a gloo group just made: those with an end at an address that a rank published.

    Each pair of ranks has one connection, from one of them to the address on which the other listens. Where several
    ranks of a group live in one process, some of the others' are found too: they fall with the group anyway.
    """
    published: dict[int, bytes] = {}
    with suppress(RuntimeError):  # another torch may name the keys differently: then only timeouts free a thread
        for each in range(world_size):
            if keys.check([key := f"0/{each}"]):
                published[each] = keys.get(key)[:_ADDRESS_BYTES]
    own = published.pop(rank, b"")

    def wanted(here: sockets.EndPoint, there: sockets.EndPoint) -> bool:
        return here.packed in own or any(there.packed in address for address in published.values())

    return sockets.find(wanted)


def _abort(backend: Any) -> threading.Thread:
    """Abort a NCCL communicator, in a thread that nobody must wait for: it blocks while another group hangs."""
    thread = threading.Thread(target=backend.abort, name="nccl-abort", daemon=True)
    thread.start()
    return thread
