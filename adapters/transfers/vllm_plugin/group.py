"""A worker's half of the trainer's process group: join, receive, leave.

The group is nobody's default group, and meets a rank 0 that `adapters.transfers.process_group.host_group` makes, or
torch's own `rendezvous` with a group of that name: they look for each other under the same keys of the store.
"""

from __future__ import annotations

import os
import re
import socket
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet  # another class than the builtin before Python 3.11
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in its __all__
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Group", "TransferError", "join"]

_RETRY = 0.05
"""Seconds between two attempts to reach a store that is not there yet."""

_GRACE = 0.5
"""Seconds that torch, which keeps most deadlines and knows the cause, is given before the joining thread is left."""


class TransferError(RuntimeError):
    """The group could not be joined, or a tensor did not come. vLLM answers 500 with this text."""


class Group:
    """A receiving rank. Made by `join`; the caller closes it. After a failure it is closed and of no use."""

    def __init__(self, backend: Any, store: c10d.Store, *, title: str) -> None:
        self._backend = backend
        self._store: c10d.Store | None = store
        self._title = title
        self._nccl: bool = backend.name() == "nccl"

    def receive(self, tensor: Tensor, *, timeout: float, what: str) -> None:
        """Receive what rank 0 sends next into `tensor`, contiguous; blocks for at most `timeout` seconds.

        `what` is named in the error. Raises `TransferError` if a peer failed, time ran out, or the group is closed.
        """
        backend, work, done = self._backend, None, False
        if backend is None:
            raise TransferError(f"{self._title} is closed")
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = _seconds(timeout)
        # Bytes are the same on the wire, and gloo refuses the newer dtypes (float8, uint16).
        payload = tensor if self._nccl else tensor.reshape(-1).view(torch.uint8)
        try:
            work = backend.broadcast([payload], options)
            if self._nccl:
                work.wait(_seconds(timeout))
                torch.cuda.current_stream().synchronize()
            else:
                work.wait()  # a gloo operation ends at its own deadline, and not before may its memory be given away
            done = True
        except RuntimeError as error:
            raise TransferError(f"{self._title} failed while it received {what}: {_reason(error)}") from error
        finally:
            # An error that somebody keeps would keep this frame, and with these the connections to the other ranks.
            backend = work = None
            if not done:
                self.close()

    def close(self) -> None:
        """Hang up, so that peers which wait for this rank fail at once. Idempotent."""
        backend, self._backend, self._store = self._backend, None, None
        if backend is not None and self._nccl:
            with suppress(RuntimeError):
                backend.abort()


def join(
    *,
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout: float,
    device: torch.device,
) -> Group:
    """Join the group `name` at the store that rank 0 hosts; blocks until every rank has come, or for `timeout` seconds.

    Args:
        master_address: Where the store is; waited for until it listens.
        master_port: Its port.
        rank: This one, 1 to `world_size` - 1.
        world_size: Ranks, the trainer's included.
        name: The same on every rank.
        backend: `"gloo"` or `"nccl"`.
        timeout: Seconds.
        device: What nccl is to use.

    Raises:
        TransferError: If somebody did not come in time, something else answers at that port, or nccl has no device.
    """
    title = f"rank {rank} of {world_size} in {backend} group {name}"
    deadline = time.monotonic() + timeout

    def meet() -> Group:
        if backend == "nccl" and not (device.type == "cuda" and c10d.is_nccl_available()):
            raise TransferError("nccl needs a CUDA device and a torch that was built with it")
        store, own_address = _reach(master_address, master_port, deadline)
        keys = c10d.PrefixStore(name, store)
        for prefix in (name, "cpu" if backend == "gloo" else "cuda"):  # as torch's own helper nests them
            keys = c10d.PrefixStore(f"{prefix}/", keys)
        left = _seconds(deadline - time.monotonic())
        if backend == "gloo":
            return Group(_gloo(keys, rank, world_size, left, own_address), store, title=title)
        return Group(_nccl(keys, rank, world_size, left, device), store, title=title)

    try:
        return _within(timeout + _GRACE, meet)
    except NotYet:
        cause = "a rank keeps silent"
    except (RuntimeError, OSError) as error:
        cause = _reason(error)
    raise TransferError(f"{title} did not meet the others at {master_address}:{master_port} in {timeout:g} s: {cause}")


def _within(timeout: float, function: Callable[[], Group]) -> Group:
    """Call `function` in a thread that is left to itself after `timeout` seconds: torch may wait for ever.

    It does where somebody accepts its connection and says nothing, such as a trainer that was stopped.
    """
    outcome: Future[Group] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:  # noqa: BLE001 it is handed on
            outcome.set_exception(error)

    Thread(target=run, name="joining", daemon=True).start()
    return outcome.result(timeout)


def _reach(address: str, port: int, deadline: float) -> tuple[c10d.Store, str]:
    """Return the store, and the address of ours by which other ranks can reach this one.

    torch's own client overshoots its timeout by half and fills the log while nobody listens.
    """
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.001)) as probe:
                own_address = str(probe.getsockname()[0]).removeprefix("::ffff:")
                break
        except OSError as error:
            if time.monotonic() + _RETRY >= deadline:
                raise TransferError(f"nothing listens there ({error.strerror or error})") from error
        time.sleep(_RETRY)
    return TCPStore(
        address, port, is_master=False, timeout=_seconds(deadline - time.monotonic()), wait_for_workers=False
    ), own_address


def _gloo(keys: c10d.Store, rank: int, world_size: int, timeout: timedelta, own_address: str) -> Any:
    gloo: Any = c10d.ProcessGroupGloo  # neither options nor devices have a public way in
    options = gloo._Options()  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [gloo.create_default_device(lazy_init=False)]  # noqa: SLF001
    else:
        # Left alone, gloo announces what the host's name resolves to: on Debian 127.0.1.1, which no other host reaches.
        options._devices = [gloo.create_device(hostname=own_address, lazy_init=False)]  # noqa: SLF001
    return gloo(keys, rank, world_size, options)


def _nccl(keys: c10d.Store, rank: int, world_size: int, timeout: timedelta, device: torch.device) -> Any:
    """Make a NCCL group, as torch's helper does. Never run: the machines this was made on have no GPU.

    NCCL connects at the first broadcast, so that a rank that did not come is noticed only there.
    """
    torch.cuda.set_device(device)  # this thread's, which begins at device 0
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return c10d.ProcessGroupNCCL(keys, rank, world_size, options)


def _seconds(number: float) -> timedelta:
    """Return the duration as torch takes it, never the 0 that would mean no limit."""
    return timedelta(seconds=max(number, 0.001))


def _reason(error: Exception) -> str:
    """Return what torch says went wrong, without the place in its source and the C++ stack."""
    first = re.split(r"Exception raised from|\. This is typically", str(error))[0].strip().splitlines()
    return re.sub(r"^\[[^\]]*\]\s*", "", first[0] if first else type(error).__name__)[:200]
