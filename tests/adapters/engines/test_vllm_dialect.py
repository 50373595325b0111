"""vLLM's dialect, call by call, against what a real server answers."""

from typing import Any

import pytest
from attrs import evolve

from adapters.engines.dialect import Lane, Reply
from adapters.engines.vllm import VLLM
from lifecycle import errors
from lifecycle import events as e
from lifecycle.generation import GenerationRequest, Segment, VersionSpan
from lifecycle.ports import EngineReport
from lifecycle.states import Outcome, PauseMode

from .dialogue import CLEAN, CUT, LATE, REFUSED, answer, converse, lines, words
from .vllm_stage import (
    AWAKE,
    FORBIDDEN,
    IS_PAUSED,
    LABEL,
    METRICS,
    NOT_FOUND,
    OFFERED,
    PAUSE_TAKEN,
    PAUSED,
    ROUTES,
    RUNS,
    SLEEPS,
    VERSION,
    WORLD,
    probed,
    raised,
)

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
