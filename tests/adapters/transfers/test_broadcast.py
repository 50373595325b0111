"""The broadcast transfer: its channels, its deadlines, and what is left when it is cut."""

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import pytest
import torch
from anyio import to_thread

from adapters.transfers import Broadcast, StateDictSource
from adapters.transfers.process_group import Group
from lifecycle.errors import TransferFailed, UnusableWeights
from lifecycle.ports import Bucket, Channel, Member

from .peers import Outcome, Receiver, held, joining_channel, raw

pytestmark = pytest.mark.anyio

ONE = [Member(name="e1", world_size=1)]
WEIGHTS = {
    "embed.weight": torch.randn(33, 5).bfloat16(),
    "q_proj.weight": torch.randn(4, 4),
    "scale": torch.tensor(0.5),
    "nothing": torch.empty(0, 2),
    "positions": torch.arange(7),
}
BIG = {"small": torch.ones(1), "big": torch.empty(64 * 2**20, dtype=torch.uint8)}


@pytest.fixture
async def broadcast() -> AsyncIterator[Broadcast]:
    """A transfer over gloo with a bucket for each tensor."""
    transfer = Broadcast(backend="gloo", bucket_bytes=1)
    yield transfer
    await transfer.close()


async def opened(transfer: Broadcast) -> tuple[Channel, Group]:
    """Open a channel to one receiver in this process."""
    channel = await transfer.prepare(ONE, timeout=20.0)
    joined = joining_channel(channel)
    await transfer.connect(timeout=20.0)
    receiver: Group = await to_thread.run_sync(joined.result)
    return channel, receiver


async def receive(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Receive in a thread."""
    await to_thread.run_sync(partial(group.broadcast, tensor, timeout=20.0))
    return tensor


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
async def test_weights_arrive_bit_by_bit(
    receivers: Callable[[Receiver], Receiver], packed: bool, bucket_bytes: int
) -> None:
    """Plain or packed, in one bucket or many, another process receives the very bits, a second time as well."""
    transfer = Broadcast(backend="gloo", bucket_bytes=bucket_bytes, packed=packed)
    channel = await transfer.prepare(ONE, timeout=20.0)
    peer = receivers(Receiver.of(channel))
    await transfer.connect(timeout=20.0)
    assert peer.read() == {"joined": 1}
    for version in (1, 2):
        weights = {name: tensor * version for name, tensor in WEIGHTS.items()}
        for bucket in transfer.buckets(StateDictSource(weights), version):
            peer.expect_bucket(bucket)
            await transfer.send(bucket, timeout=20.0)
            pieces = 1 if packed else len(bucket.names)
            got = "".join([peer.read()["bytes"] for _ in range(pieces)])
            assert got == "".join(raw(weights[name]) for name in bucket.names)
    await transfer.close()


async def test_ranks_follow_the_members(broadcast: Broadcast) -> None:
    """Rank 0 is the trainer's, then each member has as many as it has workers."""
    members = [Member(name=name, world_size=size) for name, size in (("a", 2), ("b", 1), ("c", 4))]
    channel = await broadcast.prepare(members, timeout=20.0)
    assert (dict(channel.rank_offsets), channel.world_size) == ({"a": 1, "b": 3, "c": 4}, 8)
    assert (channel.kind, channel.backend, channel.master_address) == ("broadcast", "gloo", "127.0.0.1")
    assert channel.master_port > 0


async def test_a_channel_stands_while_the_members_stay(broadcast: Broadcast) -> None:
    """The same members get the same channel, in use before or not, and others a new one under a new name and port."""
    channel, receiver = await opened(broadcast)
    assert await broadcast.prepare(ONE, timeout=20.0) == channel
    other = await broadcast.prepare([Member(name="e1", world_size=2)], timeout=20.0)
    assert other.name != channel.name
    assert other.master_port != channel.master_port
    receiver.close()


async def test_a_channel_that_was_never_connected_is_not_offered_again(broadcast: Broadcast) -> None:
    """Engines may have joined half of it."""
    channel = await broadcast.prepare(ONE, timeout=20.0)
    assert (await broadcast.prepare(ONE, timeout=20.0)).name != channel.name


async def test_a_channel_whose_receiver_has_gone_is_not_offered_again(broadcast: Broadcast) -> None:
    """An engine that was restarted needs a new group, although nobody has noticed in a transfer."""
    channel, receiver = await opened(broadcast)
    receiver.cut()
    receiver.close()
    assert (await broadcast.prepare(ONE, timeout=20.0)).name != channel.name


async def test_a_receiver_that_never_joins_costs_the_deadline(broadcast: Broadcast) -> None:
    """Connecting ends at its timeout, and says from where the address is reached."""
    await broadcast.prepare(ONE, timeout=20.0)
    with pytest.raises(TransferFailed, match=r"within 0.3 s.*127.0.0.1 is reached from this machine only"):
        await broadcast.connect(timeout=0.3)


async def test_a_receiver_that_does_not_receive_costs_the_deadline(broadcast: Broadcast) -> None:
    """Sending ends at its timeout, and the channel is not offered again."""
    channel, receiver = await opened(broadcast)
    bucket = list(broadcast.buckets(StateDictSource(BIG), 1))[1]
    with pytest.raises(TransferFailed, match="broadcast of 67108864 bytes"):
        await broadcast.send(bucket, timeout=0.3)
    assert (await broadcast.prepare(ONE, timeout=20.0)).name != channel.name
    receiver.close()


async def test_a_peer_that_dies_fails_the_send_and_the_next_channel_works(
    broadcast: Broadcast, receivers: Callable[[Receiver], Receiver]
) -> None:
    """A killed engine ends the send long before its deadline; a new group builds at once."""
    channel = await broadcast.prepare(ONE, timeout=20.0)
    peer = receivers(Receiver.of(channel))
    await broadcast.connect(timeout=20.0)
    peer.read()
    bucket = list(broadcast.buckets(StateDictSource(BIG), 1))[1]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(to_thread.run_sync, peer.end)
        with pytest.raises(TransferFailed, match="failed"):
            await broadcast.send(bucket, timeout=60.0)
    await _works(broadcast)


async def test_stopping_frees_a_blocked_send(broadcast: Broadcast) -> None:
    """`stop` from another task ends a send that nobody receives, and a new channel works at once."""
    _, receiver = await opened(broadcast)
    small, big = broadcast.buckets(StateDictSource(BIG), 1)
    failures: list[TransferFailed] = []

    async def send() -> None:
        try:
            await broadcast.send(small, timeout=60.0)
            await broadcast.send(big, timeout=60.0)
        except TransferFailed as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await receive(receiver, torch.zeros(1))
        await anyio.wait_all_tasks_blocked()
        await broadcast.stop()
        await broadcast.stop()
    assert "cut" in str(failures[0])
    receiver.close()
    await _works(broadcast)


async def test_a_cancelled_send_is_cancelled_and_cuts(broadcast: Broadcast) -> None:
    """The caller gets its cancellation at once, the receiver is freed, and a new channel works."""
    _, receiver = await opened(broadcast)
    _, big = broadcast.buckets(StateDictSource(BIG), 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(broadcast.send, big, timeout=60.0))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert tasks.cancel_scope.cancelled_caught
    with pytest.raises(TransferFailed):
        await receive(receiver, torch.empty(64 * 2**20, dtype=torch.uint8))
    receiver.close()
    with pytest.raises(TransferFailed, match="was cut"):
        await broadcast.send(big, timeout=1.0)
    await _works(broadcast)


async def test_cancelling_a_connect_frees_the_engines_that_have_come(broadcast: Broadcast) -> None:
    """An engine that is blocked in the rendezvous is let go, since it generates nothing meanwhile."""
    two = [*ONE, Member(name="e2", world_size=1)]
    channel = await broadcast.prepare(two, timeout=20.0)
    joined = joining_channel(channel, timeout=60.0)
    with anyio.move_on_after(0.2) as scope:
        await broadcast.connect(timeout=60.0)
    assert scope.cancelled_caught
    with pytest.raises(TransferFailed):
        await to_thread.run_sync(joined.result)
    await _works(broadcast)


async def test_a_cancelled_prepare_leaves_nothing_open() -> None:
    """A cancellation before or during hosting leaves no socket."""
    transfer = Broadcast(backend="gloo")
    await transfer.prepare(ONE, timeout=20.0)
    await transfer.close()
    before = held()[0]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await transfer.prepare(ONE, timeout=20.0)
    await transfer.close()
    assert scope.cancelled_caught
    assert held()[0] == before


async def test_channels_leave_no_descriptors() -> None:
    """Ten channels, stopped or closed, connected or not, return every descriptor."""
    transfer = Broadcast(backend="gloo")

    async def cycle(number: int) -> None:
        _, receiver = await opened(transfer)
        if number % 2:
            await transfer.stop()
        receiver.close()
        await transfer.prepare(ONE, timeout=20.0)
        await transfer.close()
        await transfer.close()

    await cycle(0)
    await cycle(1)
    before = held()[0]
    for number in range(10):
        await cycle(number)
    assert held()[0] == before


async def test_each_group_takes_the_next_free_port_of_a_range() -> None:
    """A given port is the first of a range: taken ones are skipped, and none is used twice in a row."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        transfer = Broadcast(backend="gloo", port=first)
        one = await transfer.prepare(ONE, timeout=20.0)
        two = await transfer.prepare(ONE, timeout=20.0)
        await transfer.close()
    assert first < one.master_port < two.master_port


async def test_steps_out_of_order_are_refused(broadcast: Broadcast) -> None:
    """Connecting without a channel, sending without a group, and foreign buckets are clear errors."""
    with pytest.raises(TransferFailed, match=r"prepare\(\) comes first"):
        await broadcast.connect(timeout=1.0)
    await broadcast.prepare(ONE, timeout=20.0)
    with pytest.raises(TransferFailed, match=r"connect\(\) comes first"):
        await broadcast.send(Bucket(index=0, last=True, payload=()), timeout=1.0)
    _, receiver = await opened(broadcast)
    with pytest.raises(ValueError, match="no payload"):
        await broadcast.send(Bucket(index=0, last=True, path="/weights"), timeout=1.0)
    receiver.close()


async def test_packed_buckets_reuse_their_memory() -> None:
    """The flat buffer is the same from bucket to bucket, and another after a cut."""
    transfer = Broadcast(backend="gloo", packed=True)
    (bucket,) = transfer.buckets(StateDictSource({"a": torch.zeros(3), "b": torch.ones(4)}), 1)
    buffers = []
    for _ in range(2):
        _, receiver = await opened(transfer)
        hosted: Any = transfer._hosted
        for _ in range(2):
            receiving = Outcome(
                partial(receiver.broadcast, torch.zeros(bucket.nbytes, dtype=torch.uint8), timeout=20.0)
            )
            await transfer.send(bucket, timeout=20.0)
            await to_thread.run_sync(receiving.result)
            buffers.append(hosted._buffer)
        await transfer.stop()
        receiver.close()
    await transfer.close()
    assert buffers[0] is buffers[1]
    assert buffers[2] is buffers[3]
    assert buffers[1] is not buffers[2]


async def test_an_empty_source_is_refused(broadcast: Broadcast) -> None:
    """A publication of nothing is an error of the source."""
    with pytest.raises(UnusableWeights):
        list(broadcast.buckets(StateDictSource({}), 1))


@pytest.mark.parametrize("members", [[], ONE * 2, [Member(name="a", world_size=0)]])
async def test_senseless_members_are_refused(broadcast: Broadcast, members: list[Member]) -> None:
    """A group needs members, each once and with ranks."""
    with pytest.raises(ValueError, match="member"):
        await broadcast.prepare(members, timeout=1.0)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]", "", "*"])  # noqa: S104 they are refused
def test_wildcard_addresses_are_refused(address: str) -> None:
    """Engines would be told to connect to a wildcard, and hang."""
    with pytest.raises(ValueError, match="wildcard"):
        Broadcast(address=address)


@pytest.mark.parametrize("options", [{"port": -1}, {"port": 70000}, {"bucket_bytes": 0}, {"timeout": 0.0}])
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    """Misuse is told at once."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Broadcast(**options)


def test_importing_the_package_does_not_import_torch() -> None:
    """A trainer's other processes can look at the package cheaply; a wrong name is an `AttributeError`."""
    script = (
        "import sys, adapters.transfers as t; assert 'torch' not in sys.modules and 'safetensors' not in sys.modules\n"
        "assert not hasattr(t, 'Nothing')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


async def _works(transfer: Broadcast) -> None:
    """Prove that a new channel transfers."""
    _, receiver = await opened(transfer)
    (bucket,) = transfer.buckets(StateDictSource({"w": torch.arange(3.0)}), 1)
    receiving = Outcome(partial(receiver.broadcast, got := torch.zeros(3), timeout=20.0))
    await transfer.send(bucket, timeout=20.0)
    await to_thread.run_sync(receiving.result)
    assert got.tolist() == [0.0, 1.0, 2.0]
    receiver.close()
