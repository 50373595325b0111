"""A transfer port without tensors: buckets are numbers, and it fails on a script."""

from collections.abc import Iterator, Sequence
from typing import Any

import anyio

from lifecycle.errors import TransferFailed
from lifecycle.ports import WeightSource
from lifecycle.values import Bucket, Channel, Member


class ScriptedTransfer:
    """Moves `buckets` empty buckets, whatever the source. `calls` holds what was asked of it, in order."""

    def __init__(
        self, *, buckets: int = 1, kind: str = "broadcast", fail_on: str | None = None, hang_on: str | None = None
    ) -> None:
        self.kind = kind
        self.fail_on = fail_on
        """A call that raises, such as `"send"`: every time until this is set to `None`."""
        self.hang_on = hang_on
        """A call that never returns by itself."""
        self.calls: list[str] = []
        self._count = buckets
        self._groups = 0
        self._members: tuple[Member, ...] | None = None

    async def prepare(self, members: Sequence[Member], *, timeout: float) -> Channel:
        """Return the standing channel for the same members, or a new one.

        Cancellation: nothing is left open.
        """
        await self._call("prepare")
        if self._members != tuple(members):
            self._members = tuple(members)
            self._groups += 1
        offsets, rank = {}, 1
        for member in members:
            offsets[member.name] = rank
            rank += member.world_size
        return Channel(kind=self.kind, name=f"scripted-{self._groups}", world_size=rank, rank_offsets=offsets)

    async def connect(self, *, timeout: float) -> None:
        """Do nothing, or what the script says.

        Cancellation: nothing is left open.
        """
        await self._call("connect")

    def buckets(self, source: WeightSource, version: int) -> Iterator[Bucket]:
        """Yield as many empty buckets as asked for."""
        for index in range(self._count):
            yield Bucket(index=index, last=index == self._count - 1, nbytes=8)

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Do nothing, or what the script says.

        Cancellation: nothing is left open.
        """
        await self._call("send")

    async def stop(self) -> None:
        """Forget the members: the next channel is a new one.

        Cancellation: complete.
        """
        self.calls.append("stop")
        self._members = None

    async def close(self) -> None:
        """Forget the members.

        Cancellation: complete.
        """
        self.calls.append("close")
        self._members = None

    async def _call(self, name: str, *_: Any) -> None:
        self.calls.append(name)
        if self.fail_on == name:
            raise TransferFailed(f"{name} failed by the script")
        if self.hang_on == name:
            await anyio.sleep_forever()
