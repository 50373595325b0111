"""SGLang's dialect, call by call, against what a real server answers."""

from typing import Any

import pytest
from attrs import evolve

from adapters.engines.dialect import Lane, Reply
from adapters.engines.sglang import SGLang
from lifecycle import errors
from lifecycle import events as e
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest, Segment, VersionSpan
from lifecycle.ports import EngineReport
from lifecycle.states import Outcome, PauseMode

from .dialogue import BUCKET, CHANNEL, CLEAN, CUT, LATE, REFUSED, answer, converse, lines, words
from .sglang_stage import (
    MODEL,
    NOT_FOUND,
    NOT_READY,
    OK,
    OLD_ROUTES,
    PAUSED,
    READY,
    ROUTES,
    SERVER,
    paused,
    probed,
)

# ------------------------------------------------------------------------------------------------------------- probing


def test_a_probe_tells_kind_version_label_ranks_and_process() -> None:
    """A probe asks for model, server and readiness, and never for /health."""
    dialect = SGLang()
    calls, ack = converse(dialect.perform(e.ProbeEngine(), CLEAN), MODEL, SERVER, READY, ROUTES)
    assert lines(calls) == ["GET /model_info", "GET /server_info", "GET /ready", "GET /openapi.json"]
    assert ack.report == EngineReport(
        kind="sglang", server_version="0.5.23", incarnation="seed 41", paused=False, label="run:7", world_size=2
    )


def test_a_second_probe_of_the_same_process_asks_no_routes() -> None:
    """The list of routes is fetched once a process."""
    dialect, _ = probed(MODEL, SERVER, READY, ROUTES)
    calls, _ = converse(dialect.probe(), MODEL, SERVER, READY)
    assert len(calls) == 3
    again = answer({"version": "0.5.23", "random_seed": 42})
    assert len(converse(dialect.probe(), MODEL, again, READY, ROUTES)[0]) == 4


def test_older_servers_are_asked_where_they_answer() -> None:
    """Servers without the newer routes are probed too; what they do not say is `None`."""
    _, ack = probed(NOT_FOUND, MODEL, NOT_FOUND, answer({"tp_size": 4}), NOT_FOUND, OLD_ROUTES)
    assert ack.report == EngineReport(kind="sglang", paused=None, label="run:7", world_size=4)


def test_an_older_server_is_refused_before_anything_changes() -> None:
    """The probe says what is missing."""
    calls, ack = converse(SGLang().probe(), MODEL, SERVER, READY, answer({"paths": {"/pause_generation": {}}}))
    assert ({call.method for call in calls}, ack.outcome, ack.report) == ({"GET"}, Outcome.NOT_DONE, None)
    assert ack.detail.startswith("SGLang 0.5.23 has no /continue_generation, /abort_request")


@pytest.mark.parametrize(
    ("properties", "modes"),
    [
        ({}, {PauseMode.ABORT}),
        ({"mode": {"enum": ["abort", "retract"]}}, {PauseMode.ABORT, PauseMode.RETRACT}),
        ({"mode": {"enum": ["abort", "retract", "in_place", "other"]}}, {*SGLang().capabilities.pause_modes}),
        ({"mode": {"type": "string"}}, {*SGLang().capabilities.pause_modes}),
    ],
)
@pytest.mark.parametrize("by_reference", [False, True])
def test_pause_modes_are_those_that_the_server_names(
    properties: dict[str, Any], modes: set[PauseMode], by_reference: bool
) -> None:
    """An older server ignores the mode, and aborts: what it cannot name is refused without a call."""
    schema: dict[str, Any] = {"properties": properties}
    where = {"$ref": "#/components/schemas/Pause"} if by_reference else schema
    posted = {"post": {"requestBody": {"content": {"application/json": {"schema": where}}}}}
    described = {"paths": {**ROUTES.data["paths"], "/pause_generation": posted}}
    dialect, _ = probed(MODEL, SERVER, READY, answer({**described, "components": {"schemas": {"Pause": schema}}}))
    assert dialect.capabilities.pause_modes == modes
    for mode in set(PauseMode) - modes:
        calls, ack = converse(dialect.perform(e.PauseGeneration(mode=mode), CLEAN))
        assert (calls, ack.outcome) == ([], Outcome.NOT_DONE)


def test_a_pause_without_a_body_is_an_abort() -> None:
    """So it was before pauses had modes: the route takes nothing, and describes no body."""
    dialect, ack = probed(MODEL, SERVER, READY, OLD_ROUTES)
    assert ack.done
    assert dialect.capabilities.pause_modes == {PauseMode.ABORT}


@pytest.mark.parametrize("reply", [LATE, CUT, answer({"error": "bad gateway"}, 502)])
def test_a_description_that_did_not_come_is_asked_for_again(reply: Reply) -> None:
    """What a server offers is not guessed from its silence: that is no report."""
    dialect, ack = probed(MODEL, SERVER, READY, reply)
    assert (ack.outcome, ack.report) == (Outcome.UNKNOWN, None)
    assert len(converse(dialect.probe(), MODEL, SERVER, READY, ROUTES)[0]) == 4


def test_a_paused_server_reports_paused() -> None:
    """503 from /ready is a paused server, or an unhealthy one."""
    _, ack = probed(MODEL, SERVER, NOT_READY, ROUTES)
    assert ack.report is not None
    assert (ack.report.paused, ack.report.ready, ack.report.detail) == (True, True, "paused, or unhealthy")


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({"tp_size": 4, "dp_size": 2}, 8),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 4),
        ({"tp_size": 2, "pp_size": 2}, 4),
        ({}, 1),
    ],
)
def test_ranks_are_those_that_join_a_broadcast(sizes: dict[str, Any], world: int) -> None:
    """Attention data parallelism shares the tensor-parallel ranks; plain data parallelism multiplies them."""
    _, ack = probed(MODEL, answer(sizes), READY, ROUTES)
    assert ack.report is not None
    assert ack.report.world_size == world


@pytest.mark.parametrize(
    ("replies", "outcome", "unreachable"),
    [
        ([REFUSED], Outcome.NOT_DONE, True),
        ([MODEL, LATE], Outcome.UNKNOWN, False),
        ([MODEL, SERVER, CUT], Outcome.UNKNOWN, False),
        ([answer({"error": "Unauthorized"}, 401)], Outcome.NOT_DONE, False),
    ],
)
def test_a_probe_that_gets_no_answer_reports_nothing(replies: list[Reply], outcome: Outcome, unreachable: bool) -> None:
    """A server whose scheduler is blocked answers /model_info only: that is no report."""
    _, ack = probed(*replies)
    assert (ack.outcome, ack.unreachable, ack.report) == (outcome, unreachable, None)


# ------------------------------------------------------------------------------------------------------------- pausing


def test_an_abort_pause_proves_that_no_request_is_left() -> None:
    """The 200 of an abort pause comes when the last request has ended."""
    calls, ack = converse(SGLang().perform(e.PauseGeneration(mode=PauseMode.ABORT), CLEAN), OK)
    assert (calls[0].path, calls[0].body, calls[0].idempotent) == ("/pause_generation", {"mode": "abort"}, True)
    assert (ack.outcome, ack.stopped, ack.idle) == (Outcome.DONE, True, True)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_keeping_pause_is_proven_by_a_later_answer(mode: PauseMode) -> None:
    """The scheduler's channel is ordered: an answer through it proves that it has stopped."""
    calls, ack = converse(SGLang().perform(e.PauseGeneration(mode=mode), CLEAN), OK, SERVER)
    assert lines(calls) == ["POST /pause_generation", "GET /server_info"]
    assert calls[0].body == {"mode": mode.value}
    assert (ack.outcome, ack.stopped, ack.idle) == (Outcome.DONE, True, None)


def test_a_keeping_pause_without_the_later_answer_is_done_but_not_proven() -> None:
    """A pause that was acknowledged is a debt, whether or not the scheduler has answered since."""
    _, ack = converse(SGLang().perform(e.PauseGeneration(mode=PauseMode.IN_PLACE), CLEAN), OK, LATE)
    assert (ack.outcome, ack.stopped) == (Outcome.DONE, None)


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.KEEP])
def test_modes_of_other_servers_are_refused_without_a_call(mode: PauseMode) -> None:
    """What SGLang does not have is refused before anything is sent."""
    calls, ack = converse(SGLang().perform(e.PauseGeneration(mode=mode), CLEAN))
    assert (calls, ack.outcome) == ([], Outcome.NOT_DONE)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [(LATE, Outcome.UNKNOWN), (CUT, Outcome.UNKNOWN), (REFUSED, Outcome.NOT_DONE), (words("", 503), Outcome.UNKNOWN)],
)
def test_a_pause_has_three_outcomes(reply: Reply, outcome: Outcome) -> None:
    """A lost reply to a pause is unknown, never taken for a refusal."""
    _, ack = converse(SGLang().perform(e.PauseGeneration(mode=PauseMode.ABORT), CLEAN), reply)
    assert (ack.outcome, ack.idle, ack.stopped) == (outcome, None, None)


def test_an_abort_never_meets_requests_that_stand_in_place() -> None:
    """Abort on top of in_place deadlocks a server for good: the requests are retracted first."""
    dialect = paused(PauseMode.IN_PLACE)
    calls, ack = converse(dialect.perform(e.PauseGeneration(mode=PauseMode.ABORT), PAUSED), OK, OK)
    assert [call.body["mode"] for call in calls] == ["retract", "abort"]
    assert (ack.outcome, ack.idle) == (Outcome.DONE, True)


def test_an_abort_never_meets_a_pause_that_may_have_landed() -> None:
    """An in_place pause whose reply was lost counts as one that stands."""
    dialect = SGLang()
    converse(dialect.perform(e.PauseGeneration(mode=PauseMode.IN_PLACE), CLEAN), LATE)
    calls, _ = converse(dialect.perform(e.PauseGeneration(mode=PauseMode.ABORT), CLEAN), OK, OK)
    assert [call.body["mode"] for call in calls] == ["retract", "abort"]


def test_an_abort_never_meets_a_foreign_pause() -> None:
    """An engine found paused may stand in place, by somebody before us. While a pause is sent, nothing is known."""
    dialect, _ = probed(MODEL, SERVER, NOT_READY, ROUTES)
    facts = evolve(CLEAN, paused=None)
    calls, _ = converse(dialect.perform(e.PauseGeneration(mode=PauseMode.ABORT), facts), OK, OK)
    assert [call.body["mode"] for call in calls] == ["retract", "abort"]


def test_an_abort_after_a_continue_or_an_abort_is_sent_as_it_is() -> None:
    """Once continued, or paused by abort, nothing stands in place."""
    dialect = paused(PauseMode.IN_PLACE)
    converse(dialect.perform(e.ContinueGeneration(), PAUSED), OK)
    assert len(converse(dialect.perform(e.PauseGeneration(mode=PauseMode.ABORT), CLEAN), OK)[0]) == 1
    assert len(converse(dialect.perform(e.PauseGeneration(mode=PauseMode.ABORT), PAUSED), OK)[0]) == 1


def test_an_abort_that_fails_after_the_retract_leaves_a_pause() -> None:
    """When only the second of the two pauses is refused, the engine is paused all the same."""
    dialect = paused(PauseMode.IN_PLACE)
    steps = dialect.perform(e.PauseGeneration(mode=PauseMode.ABORT), PAUSED)
    assert converse(steps, OK, answer({"message": "no"}, 400))[1].outcome is Outcome.UNKNOWN


def test_a_continue_is_sent_with_a_body() -> None:
    """Without a body SGLang answers 400."""
    calls, ack = converse(SGLang().perform(e.ContinueGeneration(), PAUSED), OK)
    assert (calls[0].path, calls[0].body) == ("/continue_generation", {"torch_empty_cache": False})
    assert ack.done


def test_abort_generation_aborts_all_and_takes_an_empty_reply() -> None:
    """An abort without a request id must say that it means all; the answer is an empty body."""
    calls, ack = converse(SGLang().perform(e.AbortGeneration(), CLEAN), words(""))
    assert (calls[0].path, calls[0].body) == ("/abort_request", {"rid": "", "abort_all": True})
    assert ack.done


def test_paused_by_abort_is_proven_by_a_repeated_pause() -> None:
    """/ready says paused also while requests still run; a repeated abort pause is answered when none does."""
    dialect = paused(PauseMode.ABORT)
    calls, ack = converse(dialect.perform(e.ProvePaused(mode=PauseMode.ABORT), PAUSED), NOT_READY, OK)
    assert lines(calls) == ["GET /ready", "POST /pause_generation"]
    assert (ack.outcome, ack.stopped, ack.idle) == (Outcome.DONE, True, True)


def test_a_kept_pause_is_proven_by_the_scheduler() -> None:
    """A mode that keeps requests is proven without sending anything that acts."""
    dialect = paused(PauseMode.RETRACT)
    calls, ack = converse(dialect.perform(e.ProvePaused(mode=PauseMode.RETRACT), PAUSED), NOT_READY, SERVER)
    assert lines(calls) == ["GET /ready", "GET /server_info"]
    assert (ack.outcome, ack.stopped, ack.idle) == (Outcome.DONE, True, None)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.IN_PLACE])
def test_a_running_engine_is_not_proven_paused(mode: PauseMode) -> None:
    """An engine that is ready for requests is not paused, whatever is remembered; nothing is sent to it."""
    calls, ack = converse(paused(mode).perform(e.ProvePaused(mode=mode), PAUSED), READY)
    assert (len(calls), ack.outcome, ack.stopped, ack.idle) == (1, Outcome.DONE, False, False)


# ---------------------------------------------------------------------------------------------------------- generation

META = {
    "id": "x",
    "finish_reason": {"type": "length", "length": 2},
    "output_token_logprobs": [[-5.5, 498, None], [-0.25, 7, None]],
    "weight_versions": [{"version": "run:7", "start": 0, "end": 2}],
}


def generated(**meta: Any) -> Segment:
    """Return the segment that a reply with this meta information gives."""
    reply = answer({"text": "", "output_ids": [498, 7], "meta_info": {**META, **meta}})
    return converse(SGLang().generate(GenerationRequest(input_ids=[5, 6], max_new_tokens=2), engine="E1"), reply)[1]


def test_a_generation_goes_by_token_ids() -> None:
    """The request carries ids and every sampling parameter, on the generation lane; nothing is streamed."""
    request = GenerationRequest(
        input_ids=[5, 6], max_new_tokens=9, max_tokens=6, temperature=0.5, stop=["."], request_id="r1", extra={"n": 1}
    )
    reply = answer({"output_ids": [498, 7], "meta_info": META})
    calls, segment = converse(SGLang().generate(request, engine="E1"), reply)
    assert (calls[0].path, calls[0].lane) == ("/generate", Lane.GENERATION)
    assert calls[0].body == {
        "input_ids": [5, 6],
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "stop": ["."],
            "stop_token_ids": [],
            "ignore_eos": False,
            "n": 1,
        },
        "return_logprob": True,
        "stream": False,
        "rid": "r1",
    }
    assert segment == Segment(
        output_ids=(498, 7),
        logprobs=(-5.5, -0.25),
        finish_reason="length",
        spans=(VersionSpan(label="run:7", start=0, end=2),),
        engine="E1",
    )


def test_an_aborted_generation_keeps_its_tokens() -> None:
    """Abort is a finish reason: tokens and log-probabilities made so far are kept."""
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert (generated(finish_reason=reason).finish_reason, generated(finish_reason=reason).output_ids) == (
        "abort",
        (498, 7),
    )


def test_a_generation_aborted_in_the_queue_has_no_tokens() -> None:
    """An abort in the queue answers without tokens or log-probabilities, whatever had been made."""
    meta = {"id": "x", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    steps = SGLang().generate(GenerationRequest(input_ids=[5], max_new_tokens=2), engine="E1")
    _, segment = converse(steps, answer({"output_ids": [], "meta_info": meta}))
    assert (segment.output_ids, segment.finish_reason, segment.spans) == ((), "abort", None)


def test_an_abort_with_a_status_is_an_error() -> None:
    """A bad request that SGLang reports as an abort is refused for good; a server's own trouble is not."""
    bad = {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}
    with pytest.raises(errors.GenerationRefused, match="too long"):
        generated(finish_reason=bad)
    with pytest.raises(errors.EngineUnavailable):
        generated(finish_reason={**bad, "status_code": 503})


def test_a_canary_wants_a_token() -> None:
    """One greedy token proves that the engine generates again; an answer without one does not."""
    calls, ack = converse(SGLang().perform(e.Canary(), CLEAN), answer({"output_ids": [3], "meta_info": META}))
    assert (calls[0].lane, calls[0].body["sampling_params"]["max_new_tokens"], ack.done) == (Lane.CONTROL, 1, True)
    _, ack = converse(SGLang().perform(e.Canary(), CLEAN), answer({"output_ids": [], "meta_info": META}))
    assert ack.outcome is Outcome.NOT_DONE
    assert converse(SGLang().perform(e.Canary(), CLEAN), LATE)[1].outcome is Outcome.UNKNOWN


def test_every_post_has_a_body() -> None:
    """SGLang answers 400 to a POST without a body."""
    facts = EngineFacts(name="E1")
    requests = [
        e.AbortGeneration(), e.PauseGeneration(), e.ContinueGeneration(), e.OpenTransfer(channel=CHANNEL),
        e.BeginUpdate(kind="broadcast"), e.TransferWeights(bucket=BUCKET, channel=CHANNEL), e.Canary(),
        e.FinishUpdate(kind="broadcast"), e.FlushCache(), e.AbandonUpdate(), e.CloseTransfer(channel=CHANNEL),
    ]  # fmt: skip
    first = [next(SGLang().perform(request, facts)) for request in requests]
    assert all(call.method == "POST" and isinstance(call.body, dict) for call in first)
