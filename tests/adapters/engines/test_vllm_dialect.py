"""vLLM's dialect, call by call, against what a real server answers."""

from typing import Any

import pytest
from attrs import evolve

from adapters.engines.dialect import Lane, Missing, NoReply, Reply
from adapters.engines.vllm import VLLM
from lifecycle import errors
from lifecycle import events as e
from lifecycle.generation import GenerationRequest, Segment, VersionSpan
from lifecycle.ports import Acknowledgement, EngineReport
from lifecycle.states import Outcome, PauseMode

from .dialogue import BUCKET, CHANNEL, CLEAN, CUT, DISK, LATE, ON_DISK, REFUSED, answer, converse, lines, words

PAUSED = evolve(CLEAN, paused=True)
VERSION, LABEL, WORLD = answer({"version": "0.32.0"}), answer({"weight_version": "run:7"}), answer({"world_size": 2})
RUNS, IS_PAUSED = answer({"is_paused": False}), answer({"is_paused": True})
AWAKE, SLEEPS = answer({"is_sleeping": False}), answer({"is_sleeping": True})
OFFERED = answer({"error": {"message": "1 validation error", "code": 400}}, 400)
FORBIDDEN = answer({"error": {"message": "not allowed", "type": "PermissionDeniedError"}}, 403)
NOT_FOUND = answer({"detail": "Not Found"}, 404)
METRICS = words("# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.74e+09\nvllm:x 1\n")
_NEEDED = ("/resume", "/abort_requests", "/reset_prefix_cache", "/weight_info", "/update_weight_version")
_MODED = {"post": {"parameters": [{"name": "mode", "in": "query"}]}}
ROUTES = answer({"paths": {"/pause": _MODED, **{path: {} for path in _NEEDED}}})
PAUSE_TAKEN = answer({"status": "paused"})
TAKEN = answer({"message": "Weights updated"})
LABELLED = answer({"success": True, "new_version": "run:8"})


def raised(text: str) -> Reply:
    """Return the 500 that quotes an exception of the engine's."""
    return answer({"error": {"message": text, "type": "InternalServerError", "code": 500}}, 500)


def worker_raised(text: str) -> Reply:
    """Return the 500 that quotes an exception of a worker's."""
    return raised(f"Call to collective_rpc method failed: Worker failed with error '{text}', please check the stack")


NO_START = worker_raised("finish_weight_update called without a matching start_weight_update.")
ACTIVE = worker_raised("start_weight_update called while a weight update is already active. Call finish first.")
UNCONFIGURED = worker_raised("Weight transfer not configured. Please set weight_transfer_config")


def probed(
    paused: Reply = RUNS, sleeping: Reply = AWAKE, tokens: Reply = OFFERED, metrics: Reply = METRICS
) -> tuple[VLLM, Acknowledgement]:
    """Return a dialect and what it learnt by its first probe."""
    dialect = VLLM()
    replies = [VERSION, paused, metrics, ROUTES, tokens, LABEL, WORLD, sleeping]
    return dialect, converse(dialect.perform(e.ProbeEngine(), CLEAN), *replies)[1]


# ------------------------------------------------------------------------------------------------------------- probing


def test_a_probe_tells_version_pause_label_ranks_and_process() -> None:
    """A probe asks questions only: the one POST is refused for its empty body before anything is generated."""
    dialect = VLLM()
    calls, ack = converse(dialect.probe(), VERSION, RUNS, METRICS, ROUTES, OFFERED, LABEL, WORLD, AWAKE)
    assert lines(calls) == [
        "GET /version",
        "GET /is_paused",
        "GET /metrics",
        "GET /openapi.json",
        "POST /inference/v1/generate",
        "GET /weight_info",
        "GET /get_world_size",
        "GET /is_sleeping",
    ]
    assert calls[4].body == {}
    assert ack.report == EngineReport(
        kind="vllm", server_version="0.32.0", incarnation="started 1.74e+09", paused=False, label="run:7", world_size=2
    )
    assert dialect.capabilities.reports_versions


def test_a_process_is_asked_once_what_it_offers() -> None:
    """A second probe asks how the engine stands; a new process is asked everything again."""
    dialect, _ = probed()
    assert len(converse(dialect.probe(), VERSION, RUNS, METRICS, LABEL, WORLD, AWAKE)[0]) == 6
    anew = words("process_start_time_seconds 1.75e+09\n")
    calls, _ = converse(dialect.probe(), VERSION, RUNS, anew, ROUTES, FORBIDDEN, LABEL, WORLD, AWAKE)
    assert (len(calls), dialect.capabilities.reports_versions) == (8, False)


def test_a_server_that_does_not_describe_itself_is_taken_at_its_word() -> None:
    """Where /openapi.json is switched off, the routes are believed to be there."""
    _, ack = converse(VLLM().probe(), VERSION, RUNS, METRICS, NOT_FOUND, OFFERED, LABEL, WORLD, AWAKE)
    assert ack.done


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"/pause": {"post": {}}, "/resume": {}}, "has no /abort_requests, /reset_prefix_cache, /weight_info, /update"),
        (ROUTES.data["paths"] | {"/pause": {"post": {"parameters": []}}}, "pauses without a mode"),
    ],
)
def test_an_older_server_is_refused_before_anything_changes(described: Any, reason: str) -> None:
    """Without labels nobody can tell what an engine holds; without modes every pause is another than was asked for."""
    calls, ack = converse(VLLM().probe(), VERSION, RUNS, METRICS, answer({"paths": described}))
    assert ({call.method for call in calls}, ack.outcome, ack.report) == ({"GET"}, Outcome.NOT_DONE, None)
    assert ack.detail.startswith("vLLM 0.32.0 ")
    assert reason in ack.detail


def test_capabilities_are_refined_by_a_probe() -> None:
    """Without --enable-scale-out no reply says which version made a token."""
    dialect, _ = probed(tokens=FORBIDDEN)
    assert not dialect.capabilities.reports_versions
    assert dialect.capabilities.at_risk_from_begin == {"broadcast"}
    assert dialect.capabilities.pause_modes == {PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP}


@pytest.mark.parametrize(
    ("paused", "sleeping", "asleep"),
    [(RUNS, AWAKE, False), (IS_PAUSED, SLEEPS, False), (RUNS, SLEEPS, True), (RUNS, NOT_FOUND, False)],
)
def test_a_paused_engine_is_not_believed_to_sleep(paused: Reply, sleeping: Reply, asleep: bool) -> None:
    """is_sleeping is true whenever an engine is merely paused."""
    _, ack = probed(paused=paused, sleeping=sleeping)
    assert ack.report is not None
    assert ack.report.asleep is asleep


def test_a_server_without_metrics_has_no_incarnation() -> None:
    """Where the server does not say when it started, the probe does not guess."""
    _, ack = probed(metrics=NOT_FOUND)
    assert ack.report is not None
    assert ack.report.incarnation is None


def test_a_server_without_control_routes_is_told_apart_before_anything_changes() -> None:
    """The probe says how vLLM must be started."""
    calls, ack = converse(VLLM().probe(), VERSION, NOT_FOUND)
    assert (len(calls), ack.outcome, ack.report) == (2, Outcome.NOT_DONE, None)
    assert "VLLM_SERVER_DEV_MODE=1" in ack.detail


def test_a_wrong_api_key_is_told_before_anything_changes() -> None:
    """Control routes take no key, so the probe asks one that does."""
    _, ack = converse(VLLM().probe(), VERSION, RUNS, METRICS, ROUTES, answer({"error": "Unauthorized"}, 401))
    assert (ack.outcome, ack.detail) == (Outcome.NOT_DONE, "the server refused the API key: HTTP 401: Unauthorized")


@pytest.mark.parametrize(
    ("replies", "outcome", "unreachable"),
    [
        ([REFUSED], Outcome.NOT_DONE, True),
        ([VERSION, LATE], Outcome.UNKNOWN, False),
        ([VERSION, RUNS, METRICS, ROUTES, OFFERED, LATE, WORLD], Outcome.UNKNOWN, False),
        (
            [VERSION, raised("EngineCore encountered an issue. See stack trace (above) for the root cause.")],
            Outcome.NOT_DONE,
            True,
        ),
    ],
)
def test_a_probe_that_gets_no_answer_reports_nothing(replies: list[Reply], outcome: Outcome, unreachable: bool) -> None:
    """While the core is blocked, /version answers and the rest does not: that is no report."""
    _, ack = converse(VLLM().probe(), *replies)
    assert (ack.outcome, ack.unreachable, ack.report) == (outcome, unreachable, None)


# ------------------------------------------------------------------------------------------------------------- pausing


@pytest.mark.parametrize(("mode", "idle"), [(PauseMode.ABORT, True), (PauseMode.WAIT, True), (PauseMode.KEEP, None)])
def test_a_pause_goes_by_query_and_is_read_back(mode: PauseMode, idle: bool | None) -> None:
    """A mode in a body would be ignored and abort; the cache is always cleared, so that kept requests recompute."""
    calls, ack = converse(VLLM().perform(e.PauseGeneration(mode=mode), CLEAN), PAUSE_TAKEN, IS_PAUSED)
    assert lines(calls) == ["POST /pause", "GET /is_paused"]
    assert (calls[0].body, calls[0].query) == (None, {"mode": mode.value, "clear_cache": "true"})
    assert (ack.outcome, ack.stopped, ack.idle) == (Outcome.DONE, True, idle)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_modes_of_other_servers_are_refused_without_a_call(mode: PauseMode) -> None:
    """What vLLM does not have is refused before anything is sent: it would be taken for an abort."""
    calls, ack = converse(VLLM().perform(e.PauseGeneration(mode=mode), CLEAN))
    assert (calls, ack.outcome) == ([], Outcome.NOT_DONE)


@pytest.mark.parametrize(
    ("reply", "outcome"), [(LATE, Outcome.UNKNOWN), (CUT, Outcome.UNKNOWN), (REFUSED, Outcome.NOT_DONE)]
)
def test_a_pause_has_three_outcomes(reply: Reply, outcome: Outcome) -> None:
    """Giving up on a wait pause does not cancel it: it is unknown."""
    _, ack = converse(VLLM().perform(e.PauseGeneration(mode=PauseMode.WAIT), CLEAN), reply)
    assert (ack.outcome, ack.idle, ack.stopped) == (outcome, None, None)


def test_a_pause_that_was_undone_meanwhile_is_not_stopped() -> None:
    """A wait pause is answered "paused" even if somebody continued the engine while it was pending."""
    _, ack = converse(VLLM().perform(e.PauseGeneration(mode=PauseMode.WAIT), CLEAN), PAUSE_TAKEN, RUNS)
    assert (ack.outcome, ack.stopped, ack.idle) == (Outcome.DONE, False, False)


def test_a_pause_that_is_not_read_back_is_done_but_not_proven() -> None:
    """An acknowledged pause is a debt; without is_paused it is not a proof."""
    _, ack = converse(VLLM().perform(e.PauseGeneration(mode=PauseMode.KEEP), CLEAN), PAUSE_TAKEN, LATE)
    assert (ack.outcome, ack.stopped) == (Outcome.DONE, None)


def test_a_wait_after_a_keep_does_not_prove_idle() -> None:
    """A wait pause does not count requests that an earlier keep has preempted; a continue or an abort ends them."""
    dialect = VLLM()
    wait = e.PauseGeneration(mode=PauseMode.WAIT)
    converse(dialect.perform(e.PauseGeneration(mode=PauseMode.KEEP), CLEAN), PAUSE_TAKEN, IS_PAUSED)
    assert converse(dialect.perform(wait, PAUSED), PAUSE_TAKEN, IS_PAUSED)[1].idle is None
    converse(dialect.perform(e.PauseGeneration(mode=PauseMode.ABORT), PAUSED), PAUSE_TAKEN, IS_PAUSED)
    assert converse(dialect.perform(wait, PAUSED), PAUSE_TAKEN, IS_PAUSED)[1].idle is True
    converse(dialect.perform(e.PauseGeneration(mode=PauseMode.KEEP), CLEAN), LATE)
    assert converse(dialect.perform(wait, PAUSED), PAUSE_TAKEN, IS_PAUSED)[1].idle is None
    converse(dialect.perform(e.ContinueGeneration(), PAUSED), answer({"status": "resumed"}))
    assert converse(dialect.perform(wait, PAUSED), PAUSE_TAKEN, IS_PAUSED)[1].idle is True


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.WAIT])
def test_idle_is_proven_by_a_repeated_pause(mode: PauseMode) -> None:
    """is_paused is true while a pause is pending and requests run; a repeated pause is answered when none does."""
    calls, ack = converse(VLLM().perform(e.ProvePaused(mode=mode), PAUSED), IS_PAUSED, PAUSE_TAKEN)
    assert lines(calls) == ["GET /is_paused", "POST /pause"]
    assert calls[1].query["mode"] == mode.value
    assert (ack.outcome, ack.stopped, ack.idle) == (Outcome.DONE, True, True)


def test_a_kept_pause_is_proven_by_asking() -> None:
    """For a mode that keeps requests, stopped is all there is to prove."""
    calls, ack = converse(VLLM().perform(e.ProvePaused(mode=PauseMode.KEEP), PAUSED), IS_PAUSED)
    assert (len(calls), ack.outcome, ack.stopped, ack.idle) == (1, Outcome.DONE, True, None)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.KEEP])
def test_a_running_engine_is_not_proven_paused(mode: PauseMode) -> None:
    """Whatever is remembered, an engine that says it runs is not paused, and nothing is sent to it."""
    calls, ack = converse(VLLM().perform(e.ProvePaused(mode=mode), PAUSED), RUNS)
    assert (len(calls), ack.outcome, ack.stopped, ack.idle) == (1, Outcome.DONE, False, False)


def test_continue_and_abort_are_sent_as_the_server_wants_them() -> None:
    """A continue has no body; an abort of everything has an empty object."""
    calls, ack = converse(VLLM().perform(e.ContinueGeneration(), PAUSED), answer({"status": "resumed"}))
    assert (lines(calls), calls[0].body, ack.done) == (["POST /resume"], None, True)
    calls, ack = converse(VLLM().perform(e.AbortGeneration(), CLEAN), answer({"status": "aborted", "aborted": 0}))
    assert (lines(calls), calls[0].body, ack.done) == (["POST /abort_requests"], {}, True)


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


# ---------------------------------------------------------------------------------------------------------- generation

CONTENT = {"content": [{"token_id": 9, "logprob": -1.5}, {"token_id": 8, "logprob": -0.5}]}
SPANS = [{"version": "run:7", "start": 0, "end": 1}, {"version": "run:8", "start": 1, "end": 2}]
CHOICE = {"index": 0, "finish_reason": "length", "token_ids": [9, 8], "logprobs": CONTENT, "weight_versions": SPANS}
REQUEST = GenerationRequest(input_ids=[5, 6], max_new_tokens=2, temperature=0.5, request_id="r1", extra={"seed": 3})


def test_a_generation_goes_by_tokens_and_gives_exact_spans() -> None:
    """Where it is offered, the token route is used: it says which version made which token."""
    dialect, _ = probed()
    calls, segment = converse(dialect.generate(REQUEST, engine="E1"), answer({"request_id": "r1", "choices": [CHOICE]}))
    assert (calls[0].path, calls[0].lane) == ("/inference/v1/generate", Lane.GENERATION)
    assert calls[0].body == {
        "token_ids": [5, 6],
        "sampling_params": {
            "max_tokens": 2,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": 0,
            "stop": [],
            "stop_token_ids": [],
            "ignore_eos": False,
            "logprobs": 0,
            "seed": 3,
        },
        "stream": False,
        "request_id": "r1",
    }
    assert segment == Segment(
        output_ids=(9, 8),
        logprobs=(-1.5, -0.5),
        finish_reason="length",
        spans=(VersionSpan(label="run:7", start=0, end=1), VersionSpan(label="run:8", start=1, end=2)),
        engine="E1",
    )


def test_without_the_token_route_completions_are_asked_for_token_ids() -> None:
    """The OpenAI route takes and returns ids too, but tells no versions."""
    dialect, _ = probed(tokens=FORBIDDEN)
    choice = {"text": "", "finish_reason": "stop", "token_ids": [9], "logprobs": {"token_logprobs": [-1.5]}}
    calls, segment = converse(dialect.generate(REQUEST, engine="E1"), answer({"choices": [choice]}))
    assert calls[0].path == "/v1/completions"
    assert (calls[0].body["prompt"], calls[0].body["return_token_ids"], calls[0].body["logprobs"]) == ([5, 6], True, 0)
    assert (segment.output_ids, segment.logprobs, segment.spans) == ((9,), (-1.5,), None)


def test_an_engine_that_was_never_probed_is_tried_once() -> None:
    """The first generation finds out which route there is."""
    dialect = VLLM()
    choice = {"finish_reason": "stop", "token_ids": [9], "logprobs": {"token_logprobs": [-1.5]}}
    calls, _ = converse(dialect.generate(REQUEST, engine="E1"), FORBIDDEN, answer({"choices": [choice]}))
    assert [c.path for c in calls] == ["/inference/v1/generate", "/v1/completions"]
    assert len(converse(dialect.generate(REQUEST, engine="E1"), answer({"choices": [choice]}))[0]) == 1


@pytest.mark.parametrize(
    ("change", "reason", "ids"),
    [
        ({"finish_reason": "abort"}, "abort", (9, 8)),
        ({"finish_reason": "abort", "token_ids": [], "logprobs": None, "weight_versions": None}, "abort", ()),
        ({"finish_reason": "repetition"}, "stop", (9, 8)),
    ],
)
def test_finish_reasons_are_three(change: dict[str, Any], reason: str, ids: tuple[int, ...]) -> None:
    """An aborted request is answered with 200 and what it has; other reasons to end are stops."""
    _, segment = converse(VLLM().generate(REQUEST, engine="E1"), answer({"choices": [CHOICE | change]}))
    assert (segment.finish_reason, segment.output_ids) == (reason, ids)


@pytest.mark.parametrize(
    "body", [{"choices": []}, {"choices": [CHOICE | {"finish_reason": "error"}]}, {"error": {"code": 500}}, {"x": 1}]
)
def test_a_200_without_a_generation_is_no_answer(body: Any) -> None:
    """A dying engine may answer 200 with an error inside."""
    with pytest.raises(errors.EngineUnavailable):
        converse(VLLM().generate(REQUEST, engine="E1"), answer(body))


def test_images_are_refused_rather_than_dropped() -> None:
    """A prompt without its images would be another prompt."""
    with pytest.raises(errors.GenerationRefused, match="images"):
        converse(VLLM().generate(evolve(REQUEST, images=("data:x",)), engine="E1"))


def test_a_canary_wants_a_token() -> None:
    """One greedy token proves that the engine generates again; an answer without one does not."""
    dialect, _ = probed()
    calls, ack = converse(dialect.perform(e.Canary(), CLEAN), answer({"choices": [CHOICE]}))
    assert (calls[0].lane, calls[0].body["sampling_params"]["max_tokens"], ack.done) == (Lane.CONTROL, 1, True)
    _, ack = converse(dialect.perform(e.Canary(), CLEAN), answer({"choices": [CHOICE | {"token_ids": []}]}))
    assert ack.outcome is Outcome.NOT_DONE
    assert converse(dialect.perform(e.Canary(), CLEAN), LATE)[1].outcome is Outcome.UNKNOWN
