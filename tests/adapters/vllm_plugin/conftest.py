"""Workers in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import adapters.transfers.vllm_plugin as plugin
from lifecycle.ports import Bucket, Channel


class Worker:
    """A worker, and the orders it is given."""

    def __init__(self, installed: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(installed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def order(self, *order: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def open(self, channel: Channel, *, worker: int = 0, **more: Any) -> None:
        """Let it join a channel, as the dialect would tell it to."""
        info = {
            "master_address": channel.master_address,
            "master_port": channel.master_port,
            "rank_offset": 1,
            "world_size": channel.world_size,
            "group_name": channel.name,
            "timeout_s": 20.0,
            "packed": channel.packed,
            "packed_buffer_size_bytes": channel.bucket_bytes,
        }
        self.order("open", info | more, worker)

    def update(self, bucket: Bucket) -> None:
        """Let it receive a bucket."""
        shapes = [list(shape) for shape in bucket.shapes]
        self.order("update", {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": shapes})

    def answer(self) -> dict[str, Any]:
        """Wait for what came of an order."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker died"
        answer: dict[str, Any] = json.loads(line)
        assert answer.pop("foreign") == [], "the plugin must not need what an engine's environment does not have"
        return answer

    def end(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def anyio_backend() -> str:
    """The receiving half knows no event loop, and the sending half's tests run on both."""
    return "asyncio"


@pytest.fixture
def new_worker(tmp_path: Path) -> Iterator[Callable[[], Worker]]:
    """Return what starts a worker; all are ended after the test."""
    workers: list[Worker] = []
    (tmp_path / "rollout_lifecycle_vllm").symlink_to(Path(plugin.__file__).parent)

    def start() -> Worker:
        workers.append(Worker(tmp_path))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture
def trainer() -> Iterator["subprocess.Popen[str]"]:
    """A trainer in another process, ended after the test."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("trainer.py"))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    with process:
        yield process
        process.kill()
