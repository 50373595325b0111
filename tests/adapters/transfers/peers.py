"""What the tests of groups share: receivers in processes and in threads, and the process's own descriptors."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.transfers.process_group import Group, connect_group
from lifecycle.ports import Bucket, Channel

ROOT = Path(__file__).parents[3]


class Receiver:
    """A receiving rank in another process."""

    def __init__(self, maker: str, port: int, name: str, rank: int, world_size: int) -> None:
        spec = {"maker": maker, "port": port, "name": name, "rank": rank, "world_size": world_size}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("receiver.py")), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    @classmethod
    def of(cls, channel: Channel, rank: int = 1, maker: str = "library") -> "Receiver":
        """Start the receiver that `channel` expects at `rank`."""
        return cls(maker, channel.master_port, channel.name, rank, channel.world_size)

    def expect(self, tensors: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Let it receive tensors of these (dtype, shape)."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(tensors) + "\n")
        self.process.stdin.flush()

    def expect_bucket(self, bucket: Bucket) -> None:
        """Let it receive a bucket."""
        if bucket.packed:
            self.expect([("uint8", (bucket.nbytes,))])
        else:
            self.expect(list(zip(bucket.dtypes, bucket.shapes, strict=True)))

    def read(self) -> dict[str, Any]:
        """Wait for its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the receiver died"
        fact: dict[str, Any] = json.loads(line)
        return fact

    def end(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Outcome:
    """What a function did that runs in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self.value = function()
        except BaseException as error:  # noqa: BLE001 it is handed to the test
            self.error = error

    def result(self) -> Any:
        """Wait for it, and return its value or raise its error."""
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "the thread is still blocked"
        if self.error is not None:
            raise self.error
        return self.value


def joining(port: int, name: str, *, rank: int = 1, world_size: int = 2, timeout: float = 20.0) -> Outcome:
    """Join a group as a receiver in a thread."""

    def join() -> Group:
        return connect_group(
            master_address="127.0.0.1",
            master_port=port,
            rank=rank,
            world_size=world_size,
            group_name=name,
            backend="gloo",
            timeout=timeout,
        )

    return Outcome(join)


def joining_channel(channel: Channel, *, rank: int = 1, timeout: float = 20.0) -> Outcome:
    """Join the group of a channel as a receiver in a thread."""
    return joining(channel.master_port, channel.name, rank=rank, world_size=channel.world_size, timeout=timeout)


def raw(tensor: torch.Tensor) -> str:
    """Return a tensor's bytes as the receiving process tells them."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()[:4096]).hex()


def held() -> tuple[int, int]:
    """Return how many descriptors and threads this process has, once nobody waits for latecomers any more."""
    for thread in threading.enumerate():
        if thread.name == "turn-away":
            thread.join()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))
