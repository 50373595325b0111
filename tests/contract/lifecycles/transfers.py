"""Broadcasts that come to grief once their first bucket has arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.transfers import Broadcast

from .stage import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lifecycle.ports import Bucket, WeightSource

__all__ = ["Cutting", "Killing", "KillingBetweenBuckets", "KillingInFlight", "Splitting"]


class Cutting(Broadcast):
    """The trainer is cut off from its engines before it sends the second bucket."""

    def __init__(self, *, timeout: float) -> None:
        super().__init__(backend="gloo", bucket_bytes=BUCKET_BYTES, timeout=timeout)

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Cut the channel instead of sending the second bucket.

        Cancellation: as for a broadcast.
        """
        if bucket.index == 1:
            await self.stop()
        await super().send(bucket, timeout=timeout)


class Splitting(Broadcast):
    """Each tensor has a bucket of its own, also those that vLLM fuses into one; the trainer is cut off before one.

    Args:
        name: The tensor; `None` for no trouble from this side.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(backend="gloo", bucket_bytes=1, atomic=None)
        self._name = name

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Cut the channel instead of sending the tensor.

        Cancellation: as for a broadcast.
        """
        if self._name in bucket.names:
            await self.stop()
        await super().send(bucket, timeout=timeout)


class Killing(Broadcast):
    """A server is killed.

    Args:
        kill: Kills it.
        timeout: Seconds after which the engines' half gives up.
    """

    def __init__(self, kill: Callable[[], None], *, timeout: float) -> None:
        super().__init__(backend="gloo", bucket_bytes=BUCKET_BYTES, timeout=timeout)
        self._kill = kill


class KillingBetweenBuckets(Killing):
    """Before it is told of the second bucket."""

    def buckets(self, source: WeightSource, version: int) -> Iterator[Bucket]:
        """Kill before the second bucket is made."""
        for bucket in super().buckets(source, version):
            if bucket.index == 1:
                self._kill()
            yield bucket


class KillingInFlight(Killing):
    """While it waits for the second bucket."""

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        """Kill when the engine has been told of the second bucket.

        Cancellation: as for a broadcast.
        """
        if bucket.index == 1:
            self._kill()
        await super().send(bucket, timeout=timeout)
