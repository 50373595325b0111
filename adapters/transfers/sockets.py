"""Find this process's own ends of TCP connections, and cut them.

gloo keeps its descriptors to itself, and in torch 2.13 neither `abort()` nor `shutdown()` of a group frees a thread
that is blocked in it; shutting its sockets down does. Connections are remembered by inode, since the number of a
descriptor that gloo closed is given to somebody else, and looked at through a duplicate, which nobody can close in
between: no foreign socket is ever touched. No duplicate is kept, or a peer would not notice that a rank has gone.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["EndPoint", "all_alive", "cut", "end_points", "find"]


class EndPoint(NamedTuple):
    """One end of a TCP connection."""

    host: str
    """Numeric; an IPv4 address in an IPv6 socket is written as IPv4."""
    port: int

    @property
    def packed(self) -> bytes:
        """The start of the kernel's `sockaddr`, as gloo publishes it: family, port, address."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        flow_label = bytes(4) if family is socket.AF_INET6 else b""
        host = socket.inet_pton(family, self.host.partition("%")[0])
        return struct.pack("=H", family) + struct.pack("!H", self.port) + flow_label + host


def find(wanted: Callable[[EndPoint, EndPoint], bool]) -> frozenset[int]:
    """Return the inodes of this process's connected TCP sockets for which `wanted(ours, peer)` is true."""
    found = set()
    for inode, connection in _sockets():
        with suppress(OSError):  # not connected
            if wanted(*end_points(connection)):
                found.add(inode)
    return frozenset(found)


def cut(inodes: frozenset[int]) -> None:
    """Shut these connections down both ways: whoever is blocked in them, here or at the peer, returns at once."""
    for inode, connection in _sockets() if inodes else ():
        if inode in inodes:
            with suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)


def all_alive(inodes: frozenset[int]) -> bool:
    """Return whether all of these connections are still open at both ends, as far as the kernel knows."""
    alive = {inode for inode, connection in _sockets() if inode in inodes and _is_alive(connection)}
    return alive == inodes


def end_points(connection: socket.socket) -> tuple[EndPoint, EndPoint]:
    """Return our end and the peer's. Raises `OSError` for a socket that is not a connected TCP socket."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        raise OSError("not a TCP socket")
    ours, peer = connection.getsockname(), connection.getpeername()
    return EndPoint(ours[0].removeprefix("::ffff:"), ours[1]), EndPoint(peer[0].removeprefix("::ffff:"), peer[1])


def _is_alive(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield a short-lived duplicate of each socket of this process, with its inode."""
    table = Path("/proc/self/fd")
    for descriptor in [int(entry.name) for entry in (table if table.exists() else Path("/dev/fd")).iterdir()]:
        try:
            copy = os.dup(descriptor)
        except OSError:  # closed since it was listed
            continue
        status = os.fstat(copy)
        if stat.S_ISSOCK(status.st_mode):
            with socket.socket(fileno=copy) as connection:
                yield status.st_ino, connection
        else:
            os.close(copy)
