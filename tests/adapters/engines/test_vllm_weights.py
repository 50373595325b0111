"""vLLM's dialect on weights: sessions, buckets, labels, and the ways out."""

from typing import Any

import pytest
from attrs import evolve

from adapters.engines.dialect import Missing, NoReply, Reply
from adapters.engines.vllm import VLLM
from lifecycle import events as e
from lifecycle.states import Outcome, PauseMode

from .dialogue import BUCKET, CHANNEL, CLEAN, CUT, DISK, LATE, ON_DISK, REFUSED, answer, converse, lines
from .vllm_stage import (
    ACTIVE,
    LABEL,
    LABELLED,
    NO_START,
    PAUSED,
    TAKEN,
    UNCONFIGURED,
    raised,
    worker_raised,
)

# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_opening_a_transfer_tells_our_backend_everything(backend: str) -> None:
    """Address, this engine's first rank, the group's name, time limit and backend, and where packed buffers end."""
    channel = evolve(CHANNEL, backend=backend)
    calls, ack = converse(VLLM().perform(e.OpenTransfer(channel=channel), CLEAN), TAKEN)
    info = {
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "rank_offset": 1,
        "world_size": 5,
        "group_name": "group-1",
        "timeout_s": 30.0,
        "backend": backend,
        "packed": False,
        "packed_buffer_size_bytes": 1024,
    }
    assert (calls[0].path, calls[0].body) == ("/init_weight_transfer_engine", {"init_info": info})
    assert (calls[0].idempotent, ack.done) == (False, True)


def test_disk_needs_no_channel_and_no_session() -> None:
    """A disk update is one call and a label: nothing to open, begin, abandon or close."""
    for request in (
        e.OpenTransfer(channel=DISK),
        e.BeginUpdate(kind="disk"),
        e.AbandonUpdate(kind="disk"),
        e.CloseTransfer(channel=DISK),
    ):
        calls, ack = converse(VLLM().perform(request, CLEAN))
        assert (calls, ack.done) == ([], True)


def test_a_broadcast_runs_in_a_session_that_sets_the_label() -> None:
    """Start, update, finish: none is sent twice, and the label comes with the finish."""
    dialect = VLLM()
    begin, _ = converse(dialect.perform(e.BeginUpdate(kind="broadcast"), PAUSED), TAKEN)
    transfer = e.TransferWeights(bucket=BUCKET, channel=CHANNEL, label="run:8")
    update, ack = converse(dialect.perform(transfer, PAUSED), TAKEN)
    finish, _ = converse(dialect.perform(e.FinishUpdate(kind="broadcast", label="run:8"), PAUSED), TAKEN)
    info = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}
    assert [(c.path, c.body, c.idempotent) for c in (*begin, *update, *finish)] == [
        ("/start_weight_update", None, False),
        ("/update_weights", {"update_info": info}, False),
        ("/finish_weight_update", {"weight_version": "run:8"}, False),
    ]
    assert ack.done


def test_a_session_left_by_a_dead_trainer_is_finished_first() -> None:
    """Sessions do not nest; a failure after that finish is never taken for an update that was not begun."""
    begin = e.BeginUpdate(kind="broadcast")
    calls, ack = converse(VLLM().perform(begin, PAUSED), ACTIVE, TAKEN, TAKEN)
    assert [c.path for c in calls] == ["/start_weight_update", "/finish_weight_update", "/start_weight_update"]
    assert (calls[1].body, ack.done) == (None, True)
    assert converse(VLLM().perform(begin, PAUSED), ACTIVE, TAKEN, REFUSED)[1].outcome is Outcome.UNKNOWN
    assert converse(VLLM().perform(begin, PAUSED), ACTIVE, REFUSED)[1].outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (UNCONFIGURED, Outcome.NOT_DONE),
        (worker_raised("out of memory"), Outcome.UNKNOWN),
        (LATE, Outcome.UNKNOWN),
        (REFUSED, Outcome.NOT_DONE),
    ],
)
def test_a_begin_that_failed_is_unknown_unless_it_cannot_have_happened(reply: Reply, outcome: Outcome) -> None:
    """A begin that is not done is believed to have left the weights alone, so only proof counts."""
    assert converse(VLLM().perform(e.BeginUpdate(kind="broadcast"), PAUSED), reply)[1].outcome is outcome


@pytest.mark.parametrize(
    ("reply", "outcome", "untouched"),
    [
        (worker_raised("Timed out waiting 5000ms for recv"), "NOT_DONE", False),
        (answer({"error": {"message": "Missing update_info"}}, 400), "NOT_DONE", True),
        (NoReply(kind=Missing.TIMEOUT, sent=False), "NOT_DONE", True),
        (REFUSED, "NOT_DONE", False),
        (raised("something else"), "UNKNOWN", False),
        (LATE, "UNKNOWN", False),
    ],
)
@pytest.mark.parametrize("bucket", [BUCKET, ON_DISK])
def test_a_failed_transfer_says_whether_weights_were_touched(
    reply: Reply, outcome: str, untouched: bool, bucket: Any
) -> None:
    """Only a request that did not reach the workers has touched nothing."""
    request = e.TransferWeights(bucket=bucket, channel=CHANNEL, label="run:8")
    _, ack = converse(VLLM().perform(request, PAUSED), reply)
    assert (ack.outcome.name, ack.untouched) == (outcome, untouched)


def test_a_disk_update_reloads_from_a_path_and_is_labelled_by_its_finish() -> None:
    """A reload keeps the old label, so the finish writes the new one."""
    dialect = VLLM()
    transfer = e.TransferWeights(bucket=ON_DISK, channel=DISK, label="run:8")
    reload, ack = converse(dialect.perform(transfer, PAUSED), answer({"results": [None]}))
    finish, _ = converse(dialect.perform(e.FinishUpdate(kind="disk", label="run:8"), PAUSED), LABELLED)
    body = {"method": "reload_weights", "args": [], "kwargs": {"weights_path": "/weights/v8"}}
    assert [(c.path, c.body) for c in (*reload, *finish)] == [
        ("/collective_rpc", body),
        ("/update_weight_version", {"new_version": "run:8"}),
    ]
    assert ack.done


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [(NO_START, Outcome.NOT_DONE), (worker_raised("boom"), Outcome.UNKNOWN), (CUT, Outcome.UNKNOWN)],
)
def test_a_finish_without_a_session_is_not_done(reply: Reply, outcome: Outcome) -> None:
    """A session that is gone was closed by a failed update, and its label was not taken."""
    finish = e.FinishUpdate(kind="broadcast", label="run:8")
    assert converse(VLLM().perform(finish, PAUSED), reply)[1].outcome is outcome


@pytest.mark.parametrize(
    ("reply", "touched", "outcome", "untouched"),
    [
        (TAKEN, False, Outcome.DONE, True),
        (TAKEN, True, Outcome.DONE, False),
        (NO_START, False, Outcome.DONE, False),
        (NO_START, True, Outcome.DONE, False),
        (UNCONFIGURED, False, Outcome.DONE, False),
        (LATE, False, Outcome.UNKNOWN, False),
        (worker_raised("boom"), False, Outcome.UNKNOWN, False),
    ],
)
def test_abandoning_closes_the_session_without_a_label(
    reply: Reply, touched: bool, outcome: Outcome, untouched: bool
) -> None:
    """The old weights are back only when an open session was finished in which nothing had been sent."""
    abandon = e.AbandonUpdate(kind="broadcast")
    calls, ack = converse(VLLM().perform(abandon, evolve(PAUSED, touched=touched)), reply)
    assert (lines(calls), calls[0].body) == (["POST /finish_weight_update"], None)
    assert (ack.outcome, ack.untouched) == (outcome, untouched)


def test_verification_compares_labels() -> None:
    """Another label is a refusal that names both."""
    assert converse(VLLM().perform(e.VerifyWeights(label="run:7"), PAUSED), LABEL)[1].done
    _, ack = converse(VLLM().perform(e.VerifyWeights(label="run:8"), PAUSED), LABEL)
    assert (ack.outcome, ack.detail) == (Outcome.NOT_DONE, "the engine is labelled 'run:7', not 'run:8'")
    assert converse(VLLM().perform(e.VerifyWeights(label="run:7"), PAUSED), LATE)[1].outcome is Outcome.UNKNOWN


def test_a_right_label_is_not_written_again() -> None:
    """Labelling asks first."""
    assert len(converse(VLLM().perform(e.LabelVersion(label="run:7"), PAUSED), LABEL)[0]) == 1
    calls, ack = converse(VLLM().perform(e.LabelVersion(label="run:8"), PAUSED), LABEL, LABELLED)
    assert (calls[1].path, calls[1].body, ack.done) == ("/update_weight_version", {"new_version": "run:8"}, True)


@pytest.mark.parametrize(("mode", "reset"), [(PauseMode.ABORT, "false"), (PauseMode.KEEP, "true")])
def test_a_flush_reads_the_answer_behind_the_200(mode: PauseMode, reset: str) -> None:
    """A cache that could not be reset is answered with 200 all the same."""
    calls, ack = converse(VLLM().perform(e.FlushCache(mode=mode), PAUSED), answer({"success": True}))
    assert (calls[0].path, calls[0].query) == ("/reset_prefix_cache", {"reset_running_requests": reset})
    assert ack.done
    _, ack = converse(VLLM().perform(e.FlushCache(mode=mode), PAUSED), answer({"success": False}))
    assert (ack.outcome, ack.detail[:24]) == (Outcome.NOT_DONE, "requests still hold cach")


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (answer({"message": "Weight transfer shut down"}), Outcome.DONE),
        (worker_raised("Cannot release a trainer connection during a weight update"), Outcome.NOT_DONE),
    ],
)
def test_closing_a_transfer_shuts_the_receiver_down(reply: Reply, outcome: Outcome) -> None:
    """The receiver is shut down, unless an update is open."""
    calls, ack = converse(VLLM().perform(e.CloseTransfer(channel=CHANNEL), CLEAN), reply)
    assert (lines(calls), ack.outcome) == (["POST /shutdown_weight_transfer_engine"], outcome)


def test_other_requests_are_programming_errors() -> None:
    """A request that the lifecycle performs itself never reaches a dialect."""
    with pytest.raises(TypeError, match="Drain is not a request to an engine"):
        VLLM().perform(e.Drain(), CLEAN)
