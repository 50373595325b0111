"""vLLM's generation routes, its pauses, aborts and sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from .client import PROMPT, Client, greedy, until

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from adapters.engines.embedded import CausalLM

    from .conftest import Serve

SLOW = {"forward_sleep_seconds": 0.005}
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


def body(count: int = 60, **more: Any) -> dict[str, Any]:
    """A greedy request to /v1/completions."""
    return {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "return_token_ids": True, **more}


def inference(count: int = 60, **more: Any) -> dict[str, Any]:
    """A greedy request to /inference/v1/generate."""
    params = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return {"token_ids": PROMPT, "sampling_params": params, **more}


def in_flight(
    client: Client, request: Any = None, request_id: str = "me", path: str = COMPLETIONS
) -> Future[httpx.Response]:
    """Start a request and return once it has made a token; it takes a while from there."""
    answer = client.later(path, body() if request is None else request, {"X-Request-Id": request_id})
    wait_for_load(client, 1)
    # Whoever comes later is served no sooner.
    client.ok(COMPLETIONS, body(1))
    assert not answer.done()
    return answer


def wait_for_load(client: Client, count: int) -> None:
    """Return once the server has taken in that many requests."""
    until(lambda: client.get("/load").json()["server_load"] == count)


def choice(answer: Future[httpx.Response]) -> Any:
    """Wait for an answer of 200 and return its only choice."""
    response = answer.result(20)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def paused(client: Client) -> Any:
    """What /is_paused says."""
    return client.get("/is_paused").json()["is_paused"]


def test_a_completion_has_tokens_logprobs_and_usage(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """A whole answer holds what a real server's holds; token ids come when asked for."""
    client = serve("vllm", old)
    expected = greedy(old_model, PROMPT, 4)
    answer = client.ok(COMPLETIONS, body(4, logprobs=1))
    (only,) = answer["choices"]
    assert only["token_ids"] == expected
    assert only["prompt_token_ids"] == PROMPT
    assert only["text"] == " ".join(f"<t{token}>" for token in expected)
    assert (only["finish_reason"], only["stop_reason"]) == ("length", None)
    assert only["logprobs"]["tokens"] == [f"<t{token}>" for token in expected]
    assert len(only["logprobs"]["token_logprobs"]) == 4
    assert answer["usage"]["total_tokens"] == 8
    assert (
        client.ok(COMPLETIONS, {"prompt": "<t5> <t6> <t7> <t8>", "temperature": 0})["choices"][0]["token_ids"] is None
    )


def test_several_prompts_and_choices_are_numbered(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """Choices come prompt by prompt, `n` of each, with their index."""
    answer = serve("vllm", old).ok(COMPLETIONS, body(3, prompt=[[1, 2], [3]], n=2))
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
    expected = [greedy(old_model, prompt, 3) for prompt in ([1, 2], [1, 2], [3], [3])]
    assert [one["token_ids"] for one in answer["choices"]] == expected


def test_token_in_token_out_reports_versions(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """/inference/v1/generate gives tokens, log-probabilities and the exact spans of weight versions."""
    answer = serve("vllm", old).ok(GENERATE, inference(4, request_id="mine"))
    (only,) = answer["choices"]
    assert answer["request_id"] == "generate-tokens-mine"
    assert only["token_ids"] == greedy(old_model, PROMPT, 4)
    assert len(only["logprobs"]["content"]) == 4
    assert only["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_a_stream_adds_up_to_the_whole_answer(serve: Serve, old: Path, old_model: CausalLM, path: str) -> None:
    """Each event holds the new tokens only; the last says why it ended, and [DONE] follows."""
    request = body(6) if path == COMPLETIONS else inference(6)
    with serve("vllm", old, **SLOW).stream(path, request) as events:
        seen = list(events)
    assert seen[-1] == "[DONE]"
    choices = [event["choices"][0] for event in seen[:-1]]
    assert [token for one in choices for token in one["token_ids"]] == greedy(old_model, PROMPT, 6)
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["length"]
    if path == GENERATE:
        assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]


def test_a_stop_token_is_named(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """Generation ends with the stop token."""
    expected = greedy(old_model, PROMPT, 12)
    only = serve("vllm", old).ok(COMPLETIONS, body(12, stop_token_ids=[expected[5]]))["choices"][0]
    assert only["token_ids"] == expected[: expected.index(expected[5]) + 1]
    assert (only["finish_reason"], only["stop_reason"]) == ("stop", expected[5])


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ({"prompt": [64]}, 400),
        ({"prompt": []}, 400),
        ({"prompt": [1], "max_tokens": 4000}, 400),
        ({"prompt": [1], "top_p": 2}, 400),
        ({}, 400),
        ({"prompt": [1], "model": "other"}, 404),
    ],
)
def test_a_bad_request_is_refused(serve: Serve, old: Path, bad: dict[str, Any], status: int) -> None:
    """The error has vLLM's shape, and the server goes on."""
    client = serve("vllm", old)
    response = client.post(COMPLETIONS, bad)
    assert (response.status_code, response.json()["error"]["code"]) == (status, status)
    assert client.post(COMPLETIONS, body(1)).status_code == 200


def test_pause_reads_its_query_and_not_its_body(serve: Serve, old: Path) -> None:
    """A mode in a JSON body is silently an abort; an unknown mode gets 400, GET gets 405."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    assert client.ok("/pause", {"mode": "keep"}) == {"status": "paused"}
    assert choice(answer)["finish_reason"] == "abort"
    client.ok("/resume")
    response = client.post("/pause", mode="bogus")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "query.mode")
    assert client.get("/pause").status_code == 405
    assert paused(client) is False


def test_an_abort_pause_ends_running_and_queued_requests(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """In flight: 200, "abort" and the tokens so far. Sent during an earlier pause: the same, with no tokens."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client, body(logprobs=1))
    client.ok("/pause", mode="abort")
    aborted = choice(answer)
    made = len(aborted["token_ids"])
    assert 0 < made < 60
    assert aborted["token_ids"] == greedy(old_model, PROMPT, made)
    assert len(aborted["logprobs"]["token_logprobs"]) == made
    assert aborted["finish_reason"] == "abort"
    queued = client.later(COMPLETIONS, body())
    wait_for_load(client, 1)
    client.ok("/pause", mode="abort")
    assert (choice(queued)["finish_reason"], choice(queued)["token_ids"]) == ("abort", [])


def test_a_wait_pause_returns_when_nothing_runs(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """The request in flight ends by itself, before the pause is answered; `is_paused` is true long before that."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    pausing = client.later("/pause", mode="wait")
    while not paused(client):
        assert not pausing.done()
    assert not answer.done()
    queued = client.later(COMPLETIONS, body(1))
    assert pausing.result(10).json() == {"status": "paused"}
    done = choice(answer)
    assert (done["finish_reason"], done["token_ids"]) == ("length", greedy(old_model, PROMPT, 60))
    assert not queued.done()
    client.ok("/resume")
    assert choice(queued)["finish_reason"] == "length"


@pytest.mark.parametrize("clear_cache", ["true", "false"])
def test_a_kept_request_finishes_after_resume(serve: Serve, old: Path, old_model: CausalLM, clear_cache: str) -> None:
    """It hangs through any number of pauses; one resume, and it has the tokens of an undisturbed run."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    client.ok("/pause", mode="keep", clear_cache=clear_cache)
    client.ok("/pause", mode="keep", clear_cache=clear_cache)
    assert client.ok("/reset_prefix_cache") == {"success": clear_cache == "true"}
    assert client.get("/health").status_code == 200
    assert client.get("/load").json() == {"server_load": 1}
    assert not answer.done()
    client.ok("/resume")
    assert choice(answer)["token_ids"] == greedy(old_model, PROMPT, 60)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_requests_sent_while_paused_hang_until_resume(serve: Serve, old: Path, mode: str) -> None:
    """Whatever the mode, nothing rejects them; a paused engine also says that it sleeps."""
    client = serve("vllm", old)
    client.ok("/pause", mode=mode)
    answer = client.later(COMPLETIONS, body(2))
    wait_for_load(client, 1)
    assert paused(client) is True
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert not answer.done()
    client.ok("/resume")
    assert choice(answer)["finish_reason"] == "length"
    assert client.ok("/resume") == {"status": "resumed"}


def test_a_stream_sent_while_paused_opens_and_stays_silent(serve: Serve, old: Path) -> None:
    """Its headers come at once, its first token after resume."""
    client = serve("vllm", old)
    client.ok("/pause")
    with client.stream(COMPLETIONS, body(2)) as events:
        client.ok("/resume")
        assert next(events)["choices"][0]["token_ids"]


def test_wait_does_not_count_requests_that_were_kept_without_their_cache(serve: Serve, old: Path) -> None:
    """After keep, a wait-pause returns at once with the kept request unfinished, which goes on at resume."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    client.ok("/pause", mode="keep")
    client.ok("/pause", mode="wait")
    assert not answer.done()
    client.ok("/resume")
    assert choice(answer)["finish_reason"] == "length"


def test_wait_drains_requests_that_were_kept_with_their_cache(serve: Serve, old: Path) -> None:
    """After keep without clearing the cache, a wait-pause lets the kept request finish."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    client.ok("/pause", mode="keep", clear_cache="false")
    client.ok("/pause", mode="wait")
    assert choice(answer)["finish_reason"] == "length"


def test_resume_during_a_wait_pause_leaves_a_late_answer_that_lies(serve: Serve, old: Path) -> None:
    """The pause call later says "paused" although the engine runs."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    pausing = client.later("/pause", mode="wait")
    while not paused(client):
        pass
    client.ok("/resume")
    assert paused(client) is False
    assert not pausing.done()
    assert choice(answer)["finish_reason"] == "length"
    assert pausing.result(10).json() == {"status": "paused"}
    assert paused(client) is False


def test_another_pause_ends_a_pending_wait(serve: Serve, old: Path) -> None:
    """A keep-pause answers both calls, and the request stays."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    pausing = client.later("/pause", mode="wait")
    while not paused(client):
        pass
    client.ok("/pause", mode="keep", clear_cache="false")
    assert pausing.result(10).status_code == 200
    assert not answer.done()
    client.ok("/resume")
    assert choice(answer)["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        (COMPLETIONS, "cmpl-me-0", ["me", "cmpl-me", "cmpl-me-1", "generate-tokens-me"]),
        (GENERATE, "generate-tokens-me", ["me", "cmpl-me-0"]),
    ],
)
def test_an_abort_needs_the_internal_id(serve: Serve, old: Path, path: str, right: str, wrong: list[str]) -> None:
    """Wrong ids are counted and do nothing; the right one ends the request at once."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client, body(500) if path == COMPLETIONS else inference(500), path=path)
    assert client.ok("/abort_requests", {"request_ids": wrong}) == {"status": "aborted", "aborted": len(wrong)}
    client.ok(COMPLETIONS, body(1))
    assert not answer.done()
    assert client.ok("/abort_requests", {"request_ids": [right]}) == {"status": "aborted", "aborted": 1}
    assert choice(answer)["finish_reason"] == "abort"


def test_an_abort_of_everything_works_while_paused(serve: Serve, old: Path) -> None:
    """Kept and queued requests end at once, and the engine stays paused."""
    client = serve("vllm", old, **SLOW)
    kept = in_flight(client)
    client.ok("/pause", mode="keep")
    queued = client.later(COMPLETIONS, body())
    wait_for_load(client, 2)
    assert client.ok("/abort_requests", {}) == {"status": "aborted", "aborted": 2}
    assert len(choice(kept)["token_ids"]) > 0
    assert (choice(kept)["finish_reason"], choice(queued)["finish_reason"]) == ("abort", "abort")
    assert paused(client) is True


def test_bad_aborts_are_answered_as_the_real_server_does(serve: Serve, old: Path) -> None:
    """No body and no object get 400, a number 500; a string counts its letters."""
    client = serve("vllm", old)
    assert client.post("/abort_requests").status_code == 400
    assert client.post("/abort_requests", []).status_code == 400
    assert client.post("/abort_requests", {"request_ids": 123}).status_code == 500
    assert client.ok("/abort_requests", {"request_ids": "cmpl-my-req-3"})["aborted"] == 13


def test_a_client_that_goes_away_stops_its_request(serve: Serve, old: Path) -> None:
    """A whole answer or a stream, running or kept while the engine is paused."""
    client = serve("vllm", old, forward_sleep_seconds=0.05)
    client.give_up(COMPLETIONS, body(1500))
    wait_for_load(client, 0)
    client.ok("/pause", mode="wait")
    client.ok("/resume")
    with client.stream(COMPLETIONS, body(1500)) as events:
        next(events)
        client.ok("/pause", mode="keep", clear_cache="false")
        assert client.ok("/reset_prefix_cache") == {"success": False}
    wait_for_load(client, 0)
    assert client.ok("/reset_prefix_cache") == {"success": True}


def test_a_client_that_gives_up_on_a_pause_does_not_undo_it(serve: Serve, old: Path) -> None:
    """The wait-pause goes on without its caller, and the engine stays paused."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{client.url}/pause?mode=wait", timeout=0.05)
    assert choice(answer)["finish_reason"] == "length"
    assert paused(client) is True


def test_sleep_pauses_and_outlives_resume(serve: Serve, old: Path) -> None:
    """A sleeping engine is paused; resume wakes generation but not the flag; waking by tags ends with the last one."""
    client = serve("vllm", old)
    assert client.ok("/sleep", level="1") == {"status": "sleeping", "level": 1}
    assert paused(client) is True
    client.ok("/resume")
    assert paused(client) is False
    assert client.get("/is_sleeping").json() == {"is_sleeping": True}
    client.ok("/sleep", level="2")
    assert client.ok("/wake_up", tags="weights") == {"status": "sleeping", "tags": ["weights"]}
    assert paused(client) is True
    assert client.ok("/wake_up", tags="kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
    assert paused(client) is False
    assert client.post("/sleep", level="3").status_code == 400


def test_waking_a_merely_paused_engine_resumes_it(serve: Serve, old: Path) -> None:
    """/wake_up is as good as /resume there."""
    client = serve("vllm", old)
    client.ok("/pause")
    assert client.ok("/wake_up") == {"status": "awake", "tags": None}
    assert paused(client) is False


def test_information_routes_tell_what_is_served(serve: Serve, old: Path) -> None:
    """Model, version, world size, transfer backend and routes can be asked for."""
    client = serve("vllm", old, served_model_name="policy")
    assert client.get("/v1/models").json()["data"][0]["id"] == "policy"
    assert client.get("/version").json() == {"version": "0.32.0"}
    assert client.get("/get_world_size").json() == {"world_size": 1}
    config = client.get("/server_info", config_format="json").json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "gloo"}
    assert "/start_weight_update" in client.get("/openapi.json").json()["paths"]
    assert client.get("/nowhere").json()["error"]["code"] == 404


def test_metrics_stand_still_while_paused(serve: Serve, old: Path) -> None:
    """The gauge of running requests keeps counting a kept request whose cache is gone, and the start time is told."""
    client = serve("vllm", old, **SLOW)
    answer = in_flight(client)
    client.ok("/pause", mode="keep")
    metrics = client.get("/metrics").text
    assert f'vllm:num_requests_running{{engine="0",model_name="{old}"}} 1' in metrics
    assert "\nprocess_start_time_seconds " in metrics
    client.ok("/resume")
    assert choice(answer)["finish_reason"] == "length"
