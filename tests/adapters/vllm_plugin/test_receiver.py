"""The plugin's receiving half against the library's own broadcast: no vLLM, and nothing of the project, on its side."""

import json
import re
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import torch
from anyio import to_thread

from adapters.transfers import Broadcast, StateDictSource
from lifecycle.errors import TransferFailed
from lifecycle.ports import Channel, Member

from .conftest import Worker
from .worker import raw

pytestmark = pytest.mark.anyio

Start = Callable[[], Worker]

WEIGHTS = {
    "embed.weight": torch.randn(33, 5).bfloat16(),
    "q_proj.weight": torch.randn(4, 4),
    "scale": torch.tensor(0.5),
    "nothing": torch.empty(0, 2),
    "positions": torch.arange(7),
    "tiny": torch.randn(3).to(torch.float8_e4m3fn),
}


@pytest.fixture
async def broadcast() -> AsyncIterator[Broadcast]:
    """A transfer with a bucket for each tensor."""
    transfer = Broadcast(backend="gloo", bucket_bytes=1)
    yield transfer
    await transfer.close()


async def meet(transfer: Broadcast, *workers: Worker, timeout_s: float = 20.0) -> None:
    """Let the workers of one engine join."""
    channel = await transfer.prepare([Member(name="e", world_size=len(workers))], timeout=20.0)
    for number, worker in enumerate(workers):
        worker.open(channel, worker=number, timeout_s=timeout_s)
    await transfer.connect(timeout=20.0)
    for number, worker in enumerate(workers):
        size = len(workers) + 1
        assert worker.answer() == {"joined": f"rank {number + 1} of {size} in gloo group {channel.name}"}


def told(weights: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, str]:
    """Return tensors as a worker tells them."""
    return {
        name: f"{weights[name].dtype} {list(weights[name].shape)} {bytes(raw(weights[name])).hex()}" for name in names
    }


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
async def test_weights_arrive_bit_by_bit(new_worker: Start, packed: bool, bucket_bytes: int) -> None:
    """Two workers of an engine receive the very bits, in one update or many, for one version and the next."""
    transfer = Broadcast(backend="gloo", bucket_bytes=bucket_bytes, packed=packed)
    workers = [new_worker(), new_worker()]
    await meet(transfer, *workers)
    for version in (1, 2):
        weights = {name: (tensor.float() * version).to(tensor.dtype) for name, tensor in WEIGHTS.items()}
        for bucket in transfer.buckets(StateDictSource(weights), version):
            for worker in workers:
                worker.update(bucket)
            await transfer.send(bucket, timeout=20.0)
            for worker in workers:
                assert worker.answer() == {"loaded": told(weights, bucket.names)}
    await transfer.close()


async def test_packed_tensors_need_not_be_aligned(new_worker: Start) -> None:
    """Another trainer's packed buffer may have a float begin after a single byte."""
    transfer = Broadcast(backend="gloo", packed=True)
    worker = new_worker()
    await meet(transfer, worker)
    weights = {"flag": torch.tensor([True]), "scale": torch.tensor([0.5, 2.0])}
    (sent,) = transfer.buckets(StateDictSource({"bytes": torch.cat([raw_of(each) for each in weights.values()])}), 1)
    worker.order("update", {"names": list(weights), "dtype_names": ["bool", "float32"], "shapes": [[1], [2]]})
    await transfer.send(sent, timeout=20.0)
    assert worker.answer() == {"loaded": told(weights, tuple(weights))}
    await transfer.close()


def raw_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a tensor."""
    return tensor.view(torch.uint8)


async def test_a_refused_tensor_frees_the_trainer_and_the_other_worker(new_worker: Start, broadcast: Broadcast) -> None:
    """A model that refuses without a word is quoted with the tensor, and nobody waits for this worker any more."""
    worker = new_worker()
    await meet(broadcast, worker)
    first, second = broadcast.buckets(StateDictSource({"refused": torch.ones(2, 3), "fine": torch.ones(1)}), 1)
    worker.update(first)
    await broadcast.send(first, timeout=20.0)
    assert worker.answer() == {"error": "the model refused 'refused' (float32 [2, 3]): AssertionError"}
    with pytest.raises(TransferFailed):
        await broadcast.send(second, timeout=20.0)
    worker.update(second)
    assert worker.answer() == {"error": "there is no group to receive in: init comes first, and again after a failure"}


@pytest.mark.parametrize(
    ("how", "timeout_s", "cause"),
    [(signal.SIGKILL, 20.0, "onnection"), (signal.SIGSTOP, 0.5, "Timed out")],
    ids=["dies", "stops"],
)
def test_a_trainer_that_is_gone_ends_the_receiving(
    new_worker: Start, trainer: subprocess.Popen[str], how: int, timeout_s: float, cause: str
) -> None:
    """Death is noticed at once and silence after the timeout; the error says in what the worker was engaged."""
    assert trainer.stdout is not None
    worker = new_worker()
    worker.open(Channel(**json.loads(trainer.stdout.readline())), timeout_s=timeout_s)
    assert "joined" in worker.answer()
    trainer.stdout.readline()
    worker.order("update", {"names": ["a"], "dtype_names": ["int8"], "shapes": [[5]]})
    trainer.send_signal(how)
    error = worker.answer()["error"]
    assert re.match(r"rank 1 of 2 in gloo group weights-\w+ failed while it received 'a' \(int8 \[5\]\): ", error)
    assert cause in error


async def test_a_trainer_that_says_nothing_is_given_up(new_worker: Start, broadcast: Broadcast) -> None:
    """A tensor that nobody sends ends the update within timeout_s, and a new group is joined without a shutdown."""
    worker = new_worker()
    await meet(broadcast, worker, timeout_s=2.0)
    (bucket,) = broadcast.buckets(StateDictSource({"a": torch.ones(3)}), 1)
    worker.update(bucket)
    error = (await to_thread.run_sync(worker.answer))["error"]
    assert "failed while it received 'a' (float32 [3]): Timed out" in error
    await meet(broadcast, worker)
    await meet(fresh := Broadcast(backend="gloo"), worker)  # and while the old one stands
    worker.update(bucket)
    await fresh.send(bucket, timeout=20.0)
    assert set(worker.answer()["loaded"]) == {"a"}
    await fresh.close()


async def test_nobody_to_join_costs_the_time_given(new_worker: Start) -> None:
    """Whether nothing listens there, or something that accepts and keeps silent, or another rank is missing."""
    worker = new_worker()
    info = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2, "group_name": "g", "timeout_s": 0.3}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        worker.order("open", info | {"master_port": silent.getsockname()[1]}, 0)
        assert (await to_thread.run_sync(worker.answer))["error"].endswith("in 0.3 s: a rank keeps silent")
        port = silent.getsockname()[1]
    worker.order("open", info | {"master_port": port}, 0)
    error = (await to_thread.run_sync(worker.answer))["error"]
    assert error == (
        f"rank 1 of 2 in gloo group g did not meet the others at 127.0.0.1:{port} in 0.3 s: nothing listens there "
        f"(Connection refused)"
    )


async def test_a_missing_rank_ends_the_joining(new_worker: Start, broadcast: Broadcast) -> None:
    """The store is there, but one of the ranks never comes."""
    worker = new_worker()
    worker.open(await broadcast.prepare([Member(name="e", world_size=2)], timeout=20.0), timeout_s=0.5)
    error = (await to_thread.run_sync(worker.answer))["error"]
    assert "rank 1 of 3 in gloo group weights-" in error
    assert " in 0.5 s: " in error


async def test_nccl_without_a_device_is_refused_at_once(new_worker: Start) -> None:
    """The backend is the trainer's choice, and this worker has no CUDA device."""
    worker = new_worker()
    info = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "nccl"}
    worker.order("open", info, 0)
    assert worker.answer()["error"].endswith("nccl needs a CUDA device and a torch that was built with it")
