"""Where the ranks of a process group meet: a store hosted by rank 0 on a port of its own.

Everything here blocks for a bounded time; call it from a worker thread.
"""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in its __all__
from torch.distributed import distributed_c10d as c10d

from adapters.transfers import sockets
from lifecycle.errors import TransferFailed

if TYPE_CHECKING:
    from adapters.transfers.sockets import EndPoint

__all__ = ["PortTaken", "Rendezvous", "join", "reason", "seconds"]

_RETRY = 0.05
"""Seconds between two attempts to reach a rendezvous that is not there yet."""


class PortTaken(TransferFailed):
    """Somebody else listens on the port."""


class Rendezvous:
    """The store of one group, hosted by its rank 0.

    Args:
        address: Address of this machine that the other ranks connect to; the store listens on it alone.
        port: 0 to let the system choose a free one, which is bound here and so can't be stolen.
        timeout: Seconds until rank 0 gives up on the store.

    Raises:
        PortTaken: If somebody else has the port.
        TransferFailed: If the address is not one of this machine's.
    """

    def __init__(self, address: str, *, port: int = 0, timeout: float) -> None:
        self.address = address
        listener = _listen(address, port)
        self._end = sockets.EndPoint(*listener.getsockname()[:2])
        self.port = self._end.port
        self._store: c10d.Store | None = _store(address, self.port, timeout=timeout, listener=listener.detach())

    @property
    def store(self) -> c10d.Store:
        """The store. Raises `TransferFailed` once closed."""
        if self._store is None:
            raise TransferFailed(f"the rendezvous at {self.address}:{self.port} is closed")
        return self._store

    def cut(self, *, latecomers: float = 0.0) -> None:
        """End the waiting of every rank that is connected, this one's too, and stop listening. Idempotent, any thread.

        An engine may be blocked in its half for as long as the store lives, and generates nothing meanwhile. Where it
        may have been told to come and has not, its client would knock until its own time is up at a door that is gone:
        so ranks that come within `latecomers` seconds are still let in, and turned away.
        """
        store, self._store = self._store, None
        if store is None:
            return
        self._turn_away()
        if latecomers > 0:
            threading.Thread(target=self._linger, args=(store, latecomers), name="turn-away", daemon=True).start()

    def _turn_away(self) -> None:
        sockets.cut(sockets.find(lambda ours, peer: self._end in (ours, peer)))

    def _linger(self, _store: c10d.Store, limit: float) -> None:
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            time.sleep(_RETRY)
            self._turn_away()

    def close(self) -> None:
        """Stop listening; where a group still uses the store, as soon as that is closed. Idempotent."""
        self._store = None


def join(address: str, port: int, *, timeout: float) -> tuple[c10d.Store, str]:
    """Reach the store that another rank hosts, waiting for it to appear.

    Args:
        address: Its address or host name.
        port: Its port.
        timeout: Seconds.

    Returns:
        The store, and the address of ours that connections to it have, by which the other ranks reach this one.

    Raises:
        TransferFailed: If nothing listens there in time, or something that is no store.
    """
    deadline = time.monotonic() + timeout
    ours, store_end = _reach(address, port, timeout=timeout)
    # torch waits for ever where somebody accepts and keeps silent.
    watchdog = threading.Timer(
        _at_least(deadline - time.monotonic()), lambda: sockets.cut(sockets.find(lambda _, peer: peer == store_end))
    )
    watchdog.start()
    try:
        return _store(address, port, timeout=deadline - time.monotonic()), ours.host
    finally:
        watchdog.cancel()
        watchdog.join()


def seconds(number: float) -> timedelta:
    """Return the duration as torch takes it, never the 0 that would mean no limit."""
    return timedelta(seconds=_at_least(number))


def reason(error: Exception) -> str:
    """Return what torch says went wrong, without the place in its source and the C++ stack."""
    first = re.split(r"Exception raised from|\. This is typically", str(error))[0].strip().splitlines()
    return re.sub(r"^\[[^\]]*\]\s*", "", first[0] if first else type(error).__name__)[:200]


def _listen(address: str, port: int) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(where)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise (PortTaken if error.errno == errno.EADDRINUSE else TransferFailed)(
            f"rank 0 can't listen on {address}:{port or 'any port'}: {error.strerror or error}; give an address of "
            f"this machine that the engines reach"
        ) from error
    return listener


def _reach(address: str, port: int, *, timeout: float) -> tuple[EndPoint, EndPoint]:
    """Wait until something listens there and return both ends of a connection to it.

    torch's own client overshoots its timeout by half and fills the log with stack traces while nobody listens.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((address, port), timeout=_at_least(deadline - time.monotonic())) as probe:
                return sockets.end_points(probe)
        except OSError as error:
            if time.monotonic() + _RETRY >= deadline:
                raise TransferFailed(
                    f"no rendezvous at {address}:{port} within {timeout:.1f} s: {error.strerror or error}"
                ) from error
        time.sleep(_RETRY)


def _store(address: str, port: int, *, timeout: float, listener: int | None = None) -> c10d.Store:
    try:
        return TCPStore(
            address,
            port,
            is_master=listener is not None,
            timeout=seconds(timeout),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except RuntimeError as error:
        raise TransferFailed(f"no rendezvous at {address}:{port} within {timeout:.1f} s: {reason(error)}") from error


def _at_least(number: float) -> float:
    return max(number, 0.001)
