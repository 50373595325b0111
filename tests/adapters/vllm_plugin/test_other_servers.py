"""What a broadcast to a server without the plugin is told, before any weight is touched."""

from typing import Any

import pytest

from adapters.engines.dialect import HttpCall, HttpReply, Missing, NoReply, Reply
from adapters.engines.vllm import VLLM
from lifecycle import events as e
from lifecycle.fleet import EngineFacts
from lifecycle.ports import Acknowledgement, Channel
from lifecycle.states import Outcome

CHANNEL = Channel(
    kind="broadcast",
    name="g",
    master_address="10.0.0.1",
    master_port=29500,
    world_size=2,
    rank_offsets={"E1": 1},
    backend="gloo",
)
ADVICE = "publish through Disk(), or install rollout-lifecycle-vllm in its environment and start it with"


def raised(text: str) -> HttpReply:
    """Return the 500 that quotes a worker."""
    message = f"Call to collective_rpc method failed: Worker failed with error '{text}', please check the stack trace"
    return HttpReply(status=500, data={"error": {"message": message, "code": 500}}, text="json")


def configured(backend: Any) -> HttpReply:
    """Return what /server_info tells."""
    return HttpReply(status=200, data={"vllm_config": {"weight_transfer_config": backend}}, text="json")


def opened(*replies: Reply) -> tuple[list[HttpCall], Acknowledgement]:
    """Open a transfer with a server that answers this, in turn."""
    steps = VLLM().perform(e.OpenTransfer(channel=CHANNEL), EngineFacts(name="E1"))
    calls, waiting = [next(steps)], list(replies)
    try:
        while True:
            calls.append(steps.send(waiting.pop(0)))
    except StopIteration as stop:
        assert not waiting
        acknowledgement: Acknowledgement = stop.value
        return calls, acknowledgement


UNKNOWN_FIELD = "Invalid init_info for NCCLWeightTransferEngine: got an unexpected keyword argument"


@pytest.mark.parametrize(
    ("told", "backend"),
    [
        (configured({"backend": "nccl"}), "'nccl'"),
        (configured(None), "'NCCLWeightTransferEngine'"),
        (NoReply(kind=Missing.TIMEOUT), "'NCCLWeightTransferEngine'"),
    ],
)
def test_another_backend_is_named(told: Reply, backend: str) -> None:
    """The server says which it has, in seconds, so it is asked only when it has refused."""
    calls, ack = opened(raised(UNKNOWN_FIELD), told)
    assert [(c.method, c.path, dict(c.query)) for c in calls[1:]] == [
        ("GET", "/server_info", {"config_format": "json"})
    ]
    assert ack.outcome is Outcome.NOT_DONE
    assert ack.detail.startswith(f"this server's weight-transfer backend {backend} does not meet a Broadcast(): ")
    assert ADVICE in ack.detail
    assert len(ack.detail) < 300


@pytest.mark.parametrize(
    "reply", [raised("Weight transfer not configured. Please set it."), HttpReply(status=404, data={"detail": "no"})]
)
def test_no_backend_is_said_without_another_call(reply: Reply) -> None:
    """Such a server can do with disk what it was asked for."""
    calls, ack = opened(reply)
    assert (len(calls), ack.outcome) == (1, Outcome.NOT_DONE)
    assert ack.detail.startswith(f"this server has no weight-transfer backend: {ADVICE}")


@pytest.mark.parametrize(
    "text",
    [
        "rank 1 of 2 in gloo group g did not meet the others at 10.0.0.1:29500 in 5 s: nothing listens there",
        "Invalid init_info for GlooWeightTransferEngine: got an unexpected keyword argument",
    ],
)
def test_our_own_backend_is_quoted(text: str) -> None:
    """Where the plugin is there, what it says is what is the matter."""
    calls, ack = opened(raised(text))
    assert (len(calls), ack.outcome) == (1, Outcome.NOT_DONE)
    assert text in ack.detail
    assert "Disk" not in ack.detail
