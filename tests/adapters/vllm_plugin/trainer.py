"""A trainer in a process of its own, which opens a channel to one worker and then sends nothing."""

import json
import signal
import sys

import anyio
import attrs

from adapters.transfers import Broadcast
from lifecycle.ports import Member


async def main() -> None:
    """Print the channel, and a second line once the worker has joined it."""
    transfer = Broadcast(backend="gloo")
    channel = await transfer.prepare([Member(name="e", world_size=1)], timeout=20.0)
    tell(attrs.asdict(channel))
    await transfer.connect(timeout=20.0)
    tell({})
    signal.pause()


def tell(fact: dict[str, object]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main)
