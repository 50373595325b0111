"""Process groups that belong to nobody but their owner: no default group, no registry of torch's is touched.

A group made here meets a peer that calls torch's `rendezvous("tcp://HOST:PORT")` and then
`_new_process_group_helper(..., PrefixStore(group_name, store), group_name=group_name)`, as SGLang does, since both look
for each other under the same keys of the store. `connect_group` and `host_group` block; call them from a worker thread.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from adapters.transfers import sockets
from adapters.transfers.group import Group
from adapters.transfers.rendezvous import Rendezvous, join, reason, seconds
from lifecycle.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

__all__ = ["Group", "connect_group", "host_group"]

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
