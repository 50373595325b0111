"""The trainer's half of a transfer, without weights: what of it matters is which channel is whole."""

from collections.abc import Iterator, Sequence

from lifecycle.ports import WeightSource
from lifecycle.values import Bucket, Channel, Member


class Courier:
    """A transfer port that never waits."""

    kind = "broadcast"

    def __init__(self, buckets: int) -> None:
        self.count = buckets
        self.standing: Channel | None = None
        """The channel that is whole."""
        self._made = 0

    async def prepare(self, members: Sequence[Member], *, timeout: float) -> Channel:
        """Return the standing channel where it is that of `members`, or a new one.

        Cancellation: it waits for nothing.
        """
        names = [member.name for member in members]
        if self.standing is None or list(self.standing.rank_offsets) != names:
            self.standing = self.channel(names)
        return self.standing

    def channel(self, names: Sequence[str]) -> Channel:
        """Return a channel that did not exist before."""
        self._made += 1
        offsets = {name: rank for rank, name in enumerate(names, 1)}
        return Channel(kind=self.kind, name=f"channel-{self._made}", rank_offsets=offsets)

    async def connect(self, *, timeout: float) -> None:
        """Do nothing.

        Cancellation: it waits for nothing.
        """

    def bucket(self, index: int) -> Bucket:
        """Return the bucket at `index`."""
        return Bucket(index=index, last=index == self.count - 1, nbytes=8)

    def buckets(self, source: WeightSource, version: int) -> Iterator[Bucket]:
        """Yield the buckets of any version."""
        yield from map(self.bucket, range(self.count))

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Do nothing.

        Cancellation: it waits for nothing.
        """

    async def stop(self) -> None:
        """Cut the channel.

        Cancellation: complete.
        """
        self.standing = None

    async def close(self) -> None:
        """Cut the channel.

        Cancellation: complete.
        """
        self.standing = None
