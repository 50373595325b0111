"""SGLang's dialect, weight updates: call by call, with the answers that a real server gave."""

import pytest
from attrs import evolve

from adapters.engines.dialect import Missing, NoReply, Reply
from adapters.engines.sglang import SGLang
from lifecycle import events as e
from lifecycle.states import Outcome, PauseMode

from .dialogue import BUCKET, CHANNEL, CLEAN, CUT, DISK, FIRST, LATE, ON_DISK, REFUSED, answer, converse, lines, words
from .sglang_stage import (
    MODEL,
    NO_SESSION,
    OLD_ROUTES,
    PAUSED,
    READY,
    SERVER,
    TAKEN,
    UNFLUSHED,
    probed,
)


def test_opening_a_transfer_names_this_engines_first_rank() -> None:
    """The group is joined by the channel's name, at the engine's own rank offset."""
    calls, ack = converse(SGLang().perform(e.OpenTransfer(channel=CHANNEL), evolve(CLEAN, name="E2")), TAKEN)
    assert (calls[0].path, calls[0].body, calls[0].idempotent) == (
        "/init_weights_update_group",
        {
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "rank_offset": 3,
            "world_size": 5,
            "group_name": "group-1",
            "backend": "gloo",
        },
        False,
    )
    assert ack.done


def test_disk_needs_no_channel_and_no_session() -> None:
    """Disk updates are one call: nothing to open, begin, finish, abandon or close."""
    dialect = SGLang()
    for request in (
        e.OpenTransfer(channel=DISK),
        e.BeginUpdate(kind="disk"),
        e.FinishUpdate(kind="disk"),
        e.AbandonUpdate(kind="disk"),
        e.CloseTransfer(channel=DISK),
    ):
        calls, ack = converse(dialect.perform(request, CLEAN))
        assert (calls, ack.done) == ([], True)


def test_a_session_is_begun_and_finished() -> None:
    """A broadcast runs between begin and end."""
    dialect = SGLang()
    begin, _ = converse(dialect.perform(e.BeginUpdate(kind="broadcast"), CLEAN), TAKEN)
    finish, _ = converse(dialect.perform(e.FinishUpdate(kind="broadcast"), CLEAN), TAKEN)
    assert [(c.path, c.body) for c in (*begin, *finish)] == [
        ("/begin_weight_update", {"selector": "all"}),
        ("/end_weight_update", {}),
    ]


def test_a_session_left_by_a_dead_trainer_is_ended_first() -> None:
    """Sessions survive their client and do not nest."""
    held = answer({"success": False, "message": "a weight-update session is already open; call end"}, 400)
    calls, ack = converse(SGLang().perform(e.BeginUpdate(kind="broadcast"), CLEAN), held, TAKEN, TAKEN)
    assert [c.path for c in calls] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
    assert ack.done


def test_a_server_without_sessions_is_not_asked_for_one() -> None:
    """Whether sessions exist is read from the routes, never tried."""
    dialect, _ = probed(MODEL, SERVER, READY, OLD_ROUTES)
    for request in (
        e.BeginUpdate(kind="broadcast"),
        e.FinishUpdate(kind="broadcast"),
        e.AbandonUpdate(kind="broadcast"),
    ):
        calls, ack = converse(dialect.perform(request, CLEAN))
        assert (calls, ack.done) == ([], True)


@pytest.mark.parametrize(
    ("mode", "flush"), [(PauseMode.ABORT, True), (PauseMode.RETRACT, True), (PauseMode.IN_PLACE, False)]
)
def test_the_last_bucket_flushes_and_labels(mode: PauseMode, flush: bool) -> None:
    """Every destructive default is explicit; a flush is not asked for while requests stand in place."""
    request = e.TransferWeights(bucket=BUCKET, channel=CHANNEL, label="run:8", mode=mode)
    calls, ack = converse(SGLang().perform(request, PAUSED), TAKEN)
    assert (calls[0].path, calls[0].idempotent) == ("/update_weights_from_distributed", False)
    assert calls[0].body == {
        "names": ["a", "b"],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[2, 3], [4]],
        "group_name": "group-1",
        "load_format": None,
        "selector": "all",
        "flush_cache": flush,
        "abort_all_requests": False,
        "weight_version": "run:8",
        "torch_empty_cache": False,
    }
    assert ack.done


def test_an_earlier_bucket_neither_flushes_nor_labels() -> None:
    """The label and the flush belong to the bucket after which nothing follows."""
    request = e.TransferWeights(bucket=evolve(FIRST, packed=True), channel=CHANNEL, label="run:8")
    calls, _ = converse(SGLang().perform(request, PAUSED), TAKEN)
    body = calls[0].body
    assert (body["flush_cache"], body["weight_version"], body["load_format"]) == (False, None, "flattened_bucket")


def test_a_disk_transfer_is_one_labelled_call() -> None:
    """The disk update carries path and label, and leaves requests alone."""
    request = e.TransferWeights(bucket=ON_DISK, channel=DISK, label="run:8", mode=PauseMode.RETRACT)
    calls, ack = converse(SGLang().perform(request, PAUSED), TAKEN)
    assert calls[0].path == "/update_weights_from_disk"
    assert calls[0].body == {
        "model_path": "/weights/v8",
        "flush_cache": True,
        "abort_all_requests": False,
        "weight_version": "run:8",
        "torch_empty_cache": False,
    }
    assert ack.done


def test_a_400_that_changed_the_weights_is_done_and_its_label_is_repaired() -> None:
    """After a refused flush the new weights are in under the old label: verified, then labelled."""
    dialect = SGLang()
    request = e.TransferWeights(bucket=BUCKET, channel=CHANNEL, label="run:8")
    _, ack = converse(dialect.perform(request, PAUSED), UNFLUSHED)
    assert ack.done
    assert "label is missing" in ack.detail
    assert converse(dialect.perform(e.VerifyWeights(label="run:8"), PAUSED), MODEL)[1].done
    calls, _ = converse(dialect.perform(e.LabelVersion(label="run:8"), PAUSED), TAKEN)
    assert (calls[0].path, calls[0].body) == (
        "/update_weight_version",
        {"new_version": "run:8", "abort_all_requests": False},
    )
    assert converse(dialect.perform(e.VerifyWeights(label="run:8"), PAUSED), MODEL)[1].outcome is Outcome.NOT_DONE


@pytest.mark.parametrize(
    ("reply", "outcome", "untouched"),
    [
        (answer({"success": False, "message": "Failed to receive weights: Connection reset"}, 400), "NOT_DONE", True),
        (answer({"message": "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"}, 400), "NOT_DONE", True),  # noqa: E501
        (answer({"success": False, "message": "Failed to get weights iterator: nothing there"}, 400), "NOT_DONE", True),
        (answer({"success": False, "message": "Failed to update parameter online: partially updated"}, 400), "NOT_DONE", False),  # noqa: E501
        (NoReply(kind=Missing.TIMEOUT, sent=False), "NOT_DONE", True),
        (REFUSED, "NOT_DONE", False),
        (LATE, "UNKNOWN", False),
        (CUT, "UNKNOWN", False),
    ],
)  # fmt: skip
def test_a_failed_transfer_says_whether_weights_were_touched(reply: Reply, outcome: str, untouched: bool) -> None:
    """Only answers that are given before the first weight is written prove that none was."""
    request = e.TransferWeights(bucket=BUCKET, channel=CHANNEL, label="run:8")
    _, ack = converse(SGLang().perform(request, PAUSED), reply)
    assert (ack.outcome.name, ack.untouched) == (outcome, untouched)


@pytest.mark.parametrize("reply", [TAKEN, NO_SESSION])
@pytest.mark.parametrize("touched", [False, True])
def test_abandoning_closes_the_session_whether_or_not_one_is_open(reply: Reply, touched: bool) -> None:
    """A closed session is what was asked for; the weights are the old ones only if none was sent."""
    facts = evolve(PAUSED, touched=touched)
    calls, ack = converse(SGLang().perform(e.AbandonUpdate(kind="broadcast"), facts), reply)
    assert [c.path for c in calls] == ["/end_weight_update"]
    assert (ack.outcome, ack.untouched) == (Outcome.DONE, not touched)


def test_an_abandon_without_answer_proves_nothing() -> None:
    """A lost reply leaves the session, and the weights, unknown."""
    _, ack = converse(SGLang().perform(e.AbandonUpdate(kind="broadcast"), PAUSED), LATE)
    assert (ack.outcome, ack.untouched) == (Outcome.UNKNOWN, False)


def test_verification_compares_labels() -> None:
    """Another label is a refusal that names both."""
    assert converse(SGLang().perform(e.VerifyWeights(label="run:7"), PAUSED), MODEL)[1].done
    _, ack = converse(SGLang().perform(e.VerifyWeights(label="run:8"), PAUSED), MODEL)
    assert (ack.outcome, ack.detail) == (Outcome.NOT_DONE, "the engine is labelled 'run:7', not 'run:8'")


def test_a_right_label_is_not_written_again() -> None:
    """Labelling asks first, since writing a label splits the spans of kept requests."""
    calls, ack = converse(SGLang().perform(e.LabelVersion(label="run:7"), PAUSED), MODEL)
    assert (lines(calls), ack.done) == (["GET /model_info"], True)
    assert len(converse(SGLang().perform(e.LabelVersion(label="run:8"), PAUSED), MODEL, TAKEN)[0]) == 2


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (words("Cache flushed.\nPlease check backend logs"), Outcome.DONE),
        (words("Flush cache failed.\n", 400), Outcome.NOT_DONE),
        (words("Another flush_cache is already in progress.", 400), Outcome.NOT_DONE),
    ],
)
def test_a_flush_answers_in_text(reply: Reply, outcome: Outcome) -> None:
    """A flush is answered in plain text, and refused while requests stand in place."""
    calls, ack = converse(SGLang().perform(e.FlushCache(mode=PauseMode.IN_PLACE), PAUSED), reply)
    assert (calls[0].path, calls[0].body, ack.outcome) == ("/flush_cache", {}, outcome)


def test_closing_an_unknown_group_is_done() -> None:
    """A group that is not there is closed."""
    missing = answer({"success": False, "message": "The group to be destroyed does not exist."}, 400)
    for reply in (TAKEN, missing):
        calls, ack = converse(SGLang().perform(e.CloseTransfer(channel=CHANNEL), CLEAN), reply)
        assert (calls[0].body, ack.done) == ({"group_name": "group-1"}, True)


def test_other_requests_are_programming_errors() -> None:
    """A request that the lifecycle performs itself never reaches a dialect."""
    with pytest.raises(TypeError, match="HoldGeneration is not a request to an engine"):
        SGLang().perform(e.HoldGeneration(), CLEAN)
