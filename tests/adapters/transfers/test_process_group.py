"""Groups of our own: they meet torch's, end when told to, and leave nothing behind."""

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import distributed as dist

from adapters.transfers import process_group
from adapters.transfers.process_group import Group, connect_group, host_group
from adapters.transfers.rendezvous import PortTaken, Rendezvous, reason
from lifecycle.errors import TransferFailed

from .peers import Outcome, Receiver, held, joining, raw

BIG = 64 * 2**20  # far more than sockets buffer, so that nobody can finish sending it alone


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    """A store hosted by this process."""
    hosted = Rendezvous("127.0.0.1", timeout=20.0)
    yield hosted
    hosted.close()


def big() -> torch.Tensor:
    """Return more than anybody can send alone."""
    return torch.empty(BIG, dtype=torch.uint8)


def host(rendezvous: Rendezvous, name: str = "a/group", *, world_size: int = 2, timeout: float = 20.0) -> Group:
    """Build rank 0's half."""
    return host_group(rendezvous, world_size=world_size, group_name=name, backend="gloo", timeout=timeout)


@pytest.fixture
def pair(rendezvous: Rendezvous) -> Iterator[tuple[Group, Group]]:
    """Both halves of a group of two, in this process."""
    joined = joining(rendezvous.port, "pair")
    sender = host(rendezvous, "pair")
    receiver = joined.result()
    yield sender, receiver
    sender.cut()
    sender.close()
    receiver.close()


@pytest.mark.parametrize("maker", ["library", "sglang"])
def test_a_peer_receives_every_bit_whichever_way_it_joined(
    rendezvous: Rendezvous, receivers: Callable[[Receiver], Receiver], maker: str
) -> None:
    """A peer that joins through torch's rendezvous and group helper, as SGLang does, meets ours."""
    peer = receivers(Receiver(maker, rendezvous.port, "a/group", 1, 2))
    group = host(rendezvous)
    tensors = [
        torch.randn(5, 3).bfloat16(),
        torch.tensor(3.5),
        torch.empty(0, 7),
        torch.arange(9).reshape(3, 3),
        torch.tensor([True, False]),
    ]
    peer.expect([(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors])
    group.broadcast_all(tensors, timeout=20.0)
    assert peer.read() == {"joined": 1}
    assert [peer.read()["bytes"] for _ in tensors] == [raw(tensor) for tensor in tensors]
    group.close()


def test_dtypes_that_gloo_refuses_travel_all_the_same(pair: tuple[Group, Group]) -> None:
    """float8 and uint16 arrive bit by bit, although gloo itself knows neither."""
    sender, receiver = pair
    sent = [torch.randn(16).to(torch.float8_e4m3fn), torch.tensor([1, 2, 65535], dtype=torch.uint16)]
    got = [torch.zeros_like(tensor) for tensor in sent]
    receiving = Outcome(lambda: receiver.broadcast_all(got, timeout=20.0))
    sender.broadcast_all(sent, timeout=20.0)
    receiving.result()
    assert [raw(tensor) for tensor in got] == [raw(tensor) for tensor in sent]


def test_a_group_of_three_reaches_everybody(rendezvous: Rendezvous) -> None:
    """Each receiving rank gets the tensor, and each half finds a socket for every other rank."""
    joined = [joining(rendezvous.port, "three", rank=rank, world_size=3) for rank in (1, 2)]
    groups = [host(rendezvous, "three", world_size=3), *(each.result() for each in joined)]
    tensors = [torch.tensor([1.0, 2.0]), torch.zeros(2), torch.zeros(2)]
    work = [Outcome(partial(g.broadcast, t, timeout=20.0)) for g, t in zip(groups, tensors, strict=True)]
    for each in work:
        each.result()
    assert all(len(group._connections) >= 2 for group in groups)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 2.0]] * 3
    for group in groups:
        group.close()


def test_a_peer_that_dies_mid_transfer_fails_the_broadcast(
    rendezvous: Rendezvous, receivers: Callable[[Receiver], Receiver]
) -> None:
    """The death of a receiver ends the sender's broadcast long before its deadline, with the facts."""
    peer = receivers(Receiver("library", rendezvous.port, "a/group", 1, 2))
    group = host(rendezvous)
    peer.expect([("float32", (1,))])
    sending = Outcome(lambda: group.broadcast_all([torch.ones(1), big()], timeout=60.0))
    assert [peer.read().keys(), peer.read().keys()] == [{"joined"}, {"bytes"}]
    peer.end()
    with pytest.raises(TransferFailed, match=rf"broadcast of {BIG} bytes in gloo group a/group, rank 0 of 2, failed"):
        sending.result()
    assert not group.whole
    group.close()


def test_a_cut_frees_both_ends_of_a_blocked_broadcast(pair: tuple[Group, Group]) -> None:
    """Cutting from another thread ends a broadcast that nobody would ever receive, and the peer's waiting as well."""
    sender, receiver = pair
    sending = Outcome(lambda: sender.broadcast_all([torch.ones(1), big()], timeout=60.0))
    receiver.broadcast(torch.zeros(1), timeout=20.0)  # so the sender has begun, and is stuck with the second tensor
    sender.cut()
    with pytest.raises(TransferFailed, match=f"broadcast of {BIG} bytes in gloo group pair.*: the group was cut"):
        sending.result()
    with pytest.raises(TransferFailed):
        receiver.broadcast(big(), timeout=60.0)


def test_a_new_group_after_a_cut_works_at_once(pair: tuple[Group, Group], rendezvous: Rendezvous) -> None:
    """A cut group is no obstacle to the next one."""
    pair[0].cut()
    joined = joining(rendezvous.port, "next")
    sender, receiver = host(rendezvous, "next"), joined.result()
    got = torch.zeros(2)
    receiving = Outcome(lambda: receiver.broadcast(got, timeout=20.0))
    sender.broadcast(torch.ones(2), timeout=20.0)
    receiving.result()
    assert got.tolist() == [1.0, 1.0]
    sender.close()
    receiver.close()


def test_a_cut_group_is_refused_for_good(pair: tuple[Group, Group]) -> None:
    """A group that was cut is not whole and takes no further operation."""
    sender, _ = pair
    sender.cut()
    sender.cut()
    assert not sender.whole
    with pytest.raises(TransferFailed, match="can't be used again"):
        sender.broadcast(torch.zeros(1), timeout=20.0)


def test_a_cut_leaves_other_connections_alone(rendezvous: Rendezvous, pair: tuple[Group, Group]) -> None:
    """Another group and an unrelated connection of the process survive a cut."""
    joined = joining(rendezvous.port, "other")
    other, other_receiver = host(rendezvous, "other"), joined.result()
    left, right = socket.create_server(("127.0.0.1", 0)), socket.socket()
    right.connect(left.getsockname())
    accepted, _ = left.accept()
    pair[0].cut()
    got = torch.zeros(3)
    receiving = Outcome(lambda: other_receiver.broadcast(got, timeout=20.0))
    other.broadcast(torch.ones(3), timeout=20.0)
    receiving.result()
    accepted.sendall(b"x")
    assert (got.tolist(), right.recv(1)) == ([1.0] * 3, b"x")
    for each in (other, other_receiver, left, right, accepted):
        each.close()


def test_a_group_notices_that_an_idle_peer_hung_up(pair: tuple[Group, Group]) -> None:
    """A group whose peer has gone is not whole, although nobody used it since."""
    sender, receiver = pair
    assert sender.whole
    receiver.cut()
    assert not sender.whole


def test_a_rank_that_never_comes_is_waited_for_until_the_deadline(rendezvous: Rendezvous) -> None:
    """Rank 0 gives up at its timeout and says who did not meet whom."""
    with pytest.raises(TransferFailed, match=r"rank 0 of 2 did not meet the others in gloo group a/group within 0.3 s"):
        host(rendezvous, timeout=0.3)


def test_waiting_for_ranks_can_be_cut(rendezvous: Rendezvous) -> None:
    """Cutting the rendezvous ends the waiting of rank 0 and of the ranks that have come already."""
    joined = joining(rendezvous.port, "a/group", world_size=3, timeout=60.0)
    waiting = Outcome(lambda: host(rendezvous, world_size=3, timeout=60.0))
    process_group._keys(rendezvous.store, "a/group", "cpu").wait(["0/1"])  # rank 1 has come
    rendezvous.cut()
    for each in (waiting, joined):
        with pytest.raises(TransferFailed, match="did not meet"):
            each.result()
    with pytest.raises(TransferFailed, match="closed"):
        host(rendezvous)


def test_ranks_that_come_too_late_are_turned_away(rendezvous: Rendezvous) -> None:
    """A rank that was told to join, and comes after the cut, would knock at a closed door until its own time is up."""
    rendezvous.cut(latecomers=60.0)
    with pytest.raises(TransferFailed, match=r"rank 1 of 2 did not meet the others .*: (?!wait timeout)"):
        joining(rendezvous.port, "a/group", timeout=25.0).result()


class Lost:
    """An operation of which gloo never says that it has ended."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def broadcast(self, _tensors: list[torch.Tensor], _options: object) -> "Lost":
        """Begin."""
        self.begun.set()
        return self

    def get_future(self) -> torch.futures.Future[None]:
        """Return what is never set."""
        return torch.futures.Future()

    def is_completed(self) -> bool:
        """Say that it goes on."""
        return False

    def wait(self, _timeout: object) -> None:
        """Fail: this would last until the time is up."""
        raise AssertionError("nobody may wait for it")


@pytest.mark.parametrize("end", [0, 1], ids=["ours", "the peer's"])
def test_an_operation_that_gloo_has_lost_blocks_nobody(pair: tuple[Group, Group], end: int) -> None:
    """Where the connections are gone, by our cut or the peer's, its end is not waited for."""
    sender, backend = pair[0], pair[0]._backend
    sender._backend = lost = Lost()
    sending = Outcome(lambda: sender.broadcast(torch.ones(9), timeout=600.0))
    lost.begun.wait()
    pair[end].cut()
    with pytest.raises(TransferFailed, match="the group was cut" if end == 0 else "a peer has hung up"):
        sending.result()
    sender._backend = backend


def test_a_receiver_without_rank_0_gives_up(unused: int) -> None:
    """A receiving rank says where nobody listened."""
    with pytest.raises(TransferFailed, match=rf"no rendezvous at 127.0.0.1:{unused} within 0.2 s"):
        joining(unused, "a/group", timeout=0.2).result()


@pytest.fixture
def unused() -> Iterator[int]:
    """A port that is bound and on which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_port_where_somebody_keeps_silent_does_not_hang_the_receiver() -> None:
    """A server that accepts and says nothing, on a stolen port, costs no more than the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TransferFailed, match=rf"no rendezvous at 127.0.0.1:{port}"):
            joining(port, "a/group", timeout=0.3).result()


def test_a_taken_port_is_told_apart() -> None:
    """A port that somebody else listens on is `PortTaken`, an address of another machine is not."""
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(PortTaken, match=r"can't listen on 127\.0\.0\.1"),
    ):
        Rendezvous("127.0.0.1", port=other.getsockname()[1], timeout=5.0)
    with pytest.raises(TransferFailed, match="address of this machine") as refused:
        Rendezvous("192.0.2.1", timeout=5.0)
    assert not isinstance(refused.value, PortTaken)


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    """A receiving rank is one of 1 to world size - 1."""
    with pytest.raises(ValueError, match="between 1 and 1"):
        joining(1, "a/group", rank=rank).result()


def test_an_unknown_backend_is_refused_at_once() -> None:
    """A misspelt backend is an error of its own and no timeout."""
    with pytest.raises(ValueError, match="'gloo' or 'nccl', not 'glo'"):
        connect_group(
            master_address="127.0.0.1",
            master_port=1,
            rank=1,
            world_size=2,
            group_name="a",
            backend="glo",
            timeout=1.0,
        )


def test_a_tensor_that_has_gaps_is_refused(pair: tuple[Group, Group]) -> None:
    """A tensor that is not contiguous can't be received in place, and the group stays whole."""
    with pytest.raises(ValueError, match="not contiguous"):
        pair[0].broadcast(torch.zeros(4, 4).T[1:], timeout=1.0)
    assert pair[0].whole


def test_twenty_groups_leave_nothing_behind() -> None:
    """Opening and closing groups, used, unused and cut, returns every descriptor and thread."""

    def cycle(number: int) -> None:
        rendezvous = Rendezvous("127.0.0.1", timeout=20.0)
        joined = joining(rendezvous.port, "cycle")
        sender, receiver = host(rendezvous, "cycle"), joined.result()
        if number % 2:
            receiving = Outcome(lambda: receiver.broadcast(torch.zeros(9), timeout=20.0))
            sender.broadcast(torch.ones(9), timeout=20.0)
            receiving.result()
        if number % 3:
            sender.cut()
        for each in (sender, receiver, rendezvous):
            each.close()
            each.close()

    for number in range(4):
        cycle(number)
    before = held()
    for number in range(20):
        cycle(number)
    after = held()
    assert after[0] == before[0]
    assert after[1] <= before[1]  # a thread that another test left idle may end meanwhile


@pytest.mark.parametrize("initialised", [False, True])
def test_the_default_group_is_left_alone(rendezvous: Rendezvous, initialised: bool) -> None:
    """A trainer's default group exists or not, and works, as before."""
    if initialised:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        joined = joining(rendezvous.port, "beside")
        sender, receiver = host(rendezvous, "beside"), joined.result()
        receiving = Outcome(lambda: receiver.broadcast(torch.zeros(2), timeout=20.0))
        sender.broadcast(torch.ones(2), timeout=20.0)
        receiving.result()
        sender.cut()
        sender.close()
        receiver.close()
        assert dist.is_initialized() is initialised
        if initialised:
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 1.0
    finally:
        if initialised:
            dist.destroy_process_group()


def test_nccl_without_a_gpu_says_so(rendezvous: Rendezvous) -> None:
    """Asking for nccl where there is no CUDA device is a clear failure."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(TransferFailed, match="needs a CUDA device"):
        host_group(rendezvous, world_size=2, group_name="n", backend="nccl", timeout=1.0)


def test_reasons_are_short() -> None:
    """The message of torch is kept, its source location, advice and stack are not."""
    long = "[/pytorch/gloo/pair.cc:1] Connection closed by peer [::1]:5. This is typically caused by something"
    assert reason(RuntimeError(long)) == "Connection closed by peer [::1]:5"
    assert reason(RuntimeError("wait timeout\nException raised from doWait\nframe #0")) == "wait timeout"
    assert reason(RuntimeError("")) == "RuntimeError"


def test_gloo_takes_the_interface_that_the_environment_names(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`GLOO_SOCKET_IFNAME` goes before the address that reached rank 0."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    joined = joining(rendezvous.port, "lo")
    sender, receiver = host(rendezvous, "lo"), joined.result()
    assert sender.whole
    for each in (sender, receiver):
        each.close()
