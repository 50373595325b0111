"""SGLang's /generate, its pauses and its aborts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .client import PROMPT, Client, greedy, until

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    import httpx

    from adapters.engines.embedded import CausalLM

    from .conftest import Serve

SLOW = {"forward_sleep_seconds": 0.005}


def body(count: int = 60, **more: Any) -> dict[str, Any]:
    """A greedy request."""
    return {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": count}, **more}


def in_flight(client: Client, count: int = 60, **more: Any) -> Future[httpx.Response]:
    """Start a request and return once it runs; it takes a while from there."""
    answer = client.later("/generate", body(count, **more))
    while running(client) != 1:
        assert not answer.done()
    return answer


def running(client: Client) -> int:
    """How many requests the scheduler runs."""
    return int(client.get("/v1/loads").json()["loads"][0]["num_running_reqs"])


def finish(answer: Future[httpx.Response]) -> Any:
    """Wait for an answer of 200 and return its content."""
    response = answer.result(20)
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_has_tokens_logprobs_and_versions(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """A whole answer holds what a real server's holds, with one log-probability and one version per token."""
    answer = serve("sglang", old).ok("/generate", body(4, return_logprob=True, rid="me"))
    meta = answer["meta_info"]
    assert answer["output_ids"] == greedy(old_model, PROMPT, 4)
    assert answer["text"] == " ".join(f"<t{token}>" for token in answer["output_ids"])
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert (meta["id"], meta["weight_version"], meta["num_retractions"]) == ("me", "default", 0)
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 4)


def test_an_end_token_stops_unless_it_is_ignored(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """The engine's end token ends a generation and is named; `ignore_eos` makes it an ordinary token."""
    expected = greedy(old_model, PROMPT, 12)
    client = serve("sglang", old, eos_token_id=[expected[5]])
    stopped = client.ok("/generate", body(12))
    assert stopped["output_ids"] == expected[: expected.index(expected[5]) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[5]}
    ignoring = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    assert client.ok("/generate", {"input_ids": PROMPT, "sampling_params": ignoring})["output_ids"] == expected


def test_many_prompts_get_as_many_answers_in_order(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """A list of prompts is answered by a list, and `n` copies of one prompt too."""
    client = serve("sglang", old)
    prompts = [[1, 2], [3], [4, 5, 6]]
    answers = client.ok("/generate", {"input_ids": prompts, "sampling_params": {"temperature": 0, "max_new_tokens": 3}})
    assert [answer["output_ids"] for answer in answers] == [greedy(old_model, prompt, 3) for prompt in prompts]
    copies = client.ok("/generate", {"input_ids": [1], "sampling_params": {"n": 3, "max_new_tokens": 2}})
    assert [len(answer["output_ids"]) for answer in copies] == [2, 2, 2]


def test_a_stream_grows_to_the_whole_answer(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """Each event holds all tokens so far; the last one says why it ended, and [DONE] follows."""
    with serve("sglang", old, **SLOW).stream("/generate", body(6, return_logprob=True)) as events:
        seen = list(events)
    assert seen[-1] == "[DONE]"
    lengths = [len(event["output_ids"]) for event in seen[:-1]]
    assert lengths == sorted(set(lengths))
    assert [event["meta_info"]["finish_reason"] is None for event in seen[:-1]] == [True] * (len(lengths) - 1) + [False]
    assert seen[-2]["output_ids"] == greedy(old_model, PROMPT, 6)
    assert len(seen[-2]["meta_info"]["output_token_logprobs"]) == 6


@pytest.mark.parametrize(
    "bad",
    [
        {"input_ids": [64]},
        {"input_ids": []},
        {"input_ids": "words"},
        {},
        {"input_ids": [1], "sampling_params": {"temperature": -1}},
        {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
        {"input_ids": [1], "sampling_params": {"top_p": 0}},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 9999}},
        {"input_ids": list(range(60)) * 40},
    ],
)
def test_a_bad_request_is_refused(serve: Serve, old: Path, bad: dict[str, Any]) -> None:
    """Tokens outside the vocabulary, wrong types and too long texts get 400, and the server goes on."""
    client = serve("sglang", old)
    assert client.post("/generate", bad).status_code == 400
    assert client.ok("/generate", body(1))["meta_info"]["completion_tokens"] == 1


def test_control_calls_need_a_body(serve: Serve, old: Path) -> None:
    """An empty body gets 400 and does nothing; a wrong method gets 405."""
    client = serve("sglang", old)
    for path in ("/pause_generation", "/continue_generation", "/abort_request", "/begin_weight_update"):
        assert client.post(path).status_code == 400
    assert client.post("/pause_generation", {"mode": "bogus"}).status_code == 400
    assert client.get("/ready").status_code == 200
    response = client.get("/pause_generation")
    assert (response.status_code, response.json()) == (405, {"detail": "Method Not Allowed"})


def test_an_abort_pause_ends_requests_with_what_they_have(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """Aborted requests get 200, their tokens so far, and the reason."""
    client = serve("sglang", old, **SLOW)
    answer = in_flight(client, return_logprob=True)
    client.ok("/pause_generation", {"mode": "abort"})
    aborted = finish(answer)
    made = len(aborted["output_ids"])
    assert 0 < made < 60
    assert aborted["output_ids"] == greedy(old_model, PROMPT, made)
    assert len(aborted["meta_info"]["output_token_logprobs"]) == made
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert aborted["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert client.ok("/flush_cache", {}).startswith("Cache flushed.")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_kept_request_finishes_after_continue(serve: Serve, old: Path, old_model: CausalLM, mode: str) -> None:
    """A request in flight hangs through the pause, and then has the tokens of an undisturbed run."""
    client = serve("sglang", old, **SLOW)
    answer = in_flight(client)
    client.ok("/pause_generation", {"mode": mode})
    client.ok("/pause_generation", {"mode": mode})
    # An answered control call proves that the scheduler has stopped; only in_place still holds a cache.
    assert client.post("/flush_cache", {}).status_code == (400 if mode == "in_place" else 200)
    assert running(client) == (1 if mode == "in_place" else 0)
    assert not answer.done()
    client.ok("/continue_generation", {})
    done = finish(answer)
    assert done["output_ids"] == greedy(old_model, PROMPT, 60)
    assert done["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    assert done["meta_info"]["num_retractions"] == (0 if mode == "in_place" else 1)


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_requests_sent_while_paused_hang_until_continue(serve: Serve, old: Path, mode: str) -> None:
    """Any number of pauses is undone by one continue; /ready says 503 meanwhile, and other routes answer."""
    client = serve("sglang", old)
    client.ok("/pause_generation", {"mode": mode})
    client.ok("/pause_generation", {"mode": mode})
    answer = client.later("/generate", body(2))
    assert client.get("/ready").status_code == 503
    assert client.get("/model_info").status_code == 200
    client.ok("/abort_request", {"abort_all": True})
    assert running(client) == 0
    assert not answer.done()
    client.ok("/continue_generation", {})
    assert finish(answer)["meta_info"]["finish_reason"]["type"] == "length"
    assert client.get("/ready").status_code == 200


def test_continue_without_a_pause_does_nothing(serve: Serve, old: Path) -> None:
    """It answers 200, and generation works."""
    client = serve("sglang", old)
    client.ok("/continue_generation", {})
    assert client.ok("/generate", body(1))["meta_info"]["completion_tokens"] == 1


def test_abort_after_in_place_hangs_until_the_client_goes(serve: Serve, old: Path) -> None:
    """The real server's deadlock: the pause waits for a request that cannot move, and continue waits for the pause."""
    client = serve("sglang", old, **SLOW)
    with client.stream("/generate", body(500)) as events:
        next(events)
        client.ok("/pause_generation", {"mode": "in_place"})
        stuck = client.later("/pause_generation", {"mode": "abort"})
        # The abort has reached the scheduler when a later call has been answered, many polls of the pause later.
        for _ in range(20):
            client.get("/server_info")
        cured = client.later("/continue_generation", {})
        client.ok("/abort_request", {"abort_all": True})
        assert client.get("/ready").status_code == 503
        assert not stuck.done()
        assert not cured.done()
    assert stuck.result(10).status_code == 200
    assert cured.result(10).status_code == 200
    assert client.ok("/generate", body(1))["meta_info"]["completion_tokens"] == 1


def test_an_abort_by_id_ends_the_requests_whose_ids_begin_so(serve: Serve, old: Path) -> None:
    """A running request ends with partial output; unknown ids and an empty body are ignored with 200."""
    client = serve("sglang", old, **SLOW)
    answer = in_flight(client, rid="step-3-a")
    for request in ({}, {"rid": "step-4"}, {"rid": "3-a"}):
        client.ok("/abort_request", request)
    assert running(client) == 1
    client.ok("/abort_request", {"rid": "step-3"})
    assert finish(answer)["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_abort_waits_for_continue_where_a_pause_is_in_place(serve: Serve, old: Path) -> None:
    """Nothing happens while the scheduler stands still; after continue the request ends with one more token at most."""
    client = serve("sglang", old, **SLOW)
    with client.stream("/generate", body(500)) as events:
        next(events)
        client.ok("/pause_generation", {"mode": "in_place"})
        client.ok("/abort_request", {"abort_all": True})
        assert running(client) == 1
        client.ok("/continue_generation", {})
        last = list(events)[-2]
    assert last["meta_info"]["finish_reason"]["message"] == "Aborted"


def test_an_abort_of_a_retracted_request_loses_its_tokens(serve: Serve, old: Path) -> None:
    """The real server answers at once from its waiting queue, without the tokens that had been made."""
    client = serve("sglang", old, **SLOW)
    answer = in_flight(client, return_logprob=True)
    client.ok("/pause_generation", {"mode": "retract"})
    client.ok("/abort_request", {"abort_all": True})
    aborted = finish(answer)
    assert aborted["output_ids"] == []
    assert aborted["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
    assert aborted["meta_info"]["output_token_logprobs"] == []
    assert aborted["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]
    assert "prompt_tokens" not in aborted["meta_info"]


def test_a_client_that_goes_away_stops_its_request(serve: Serve, old: Path) -> None:
    """Neither a stream nor a whole answer keeps its place in the batch when its client has gone."""
    client = serve("sglang", old, forward_sleep_seconds=0.05)
    client.give_up("/generate", body(1500))
    until(lambda: running(client) == 0)
    with client.stream("/generate", body(1500)) as events:
        next(events)
        assert running(client) == 1
    until(lambda: running(client) == 0)
    assert client.ok("/flush_cache", {}).startswith("Cache flushed.")


def test_flush_waits_for_idle_only_when_asked(serve: Serve, old: Path) -> None:
    """With a request running, flush fails at once without a timeout and succeeds with one."""
    client = serve("sglang", old, **SLOW)
    answer = in_flight(client)
    assert client.post("/flush_cache", {}).text == "Flush cache failed.\n"
    assert client.post("/flush_cache", {}, timeout="0.01").text == "Timed out waiting for idle state.\n"
    assert client.post("/flush_cache", {}, timeout="20").status_code == 200
    assert finish(answer)["meta_info"]["completion_tokens"] == 60


def test_health_fails_while_paused_and_taints_ready(serve: Serve, old: Path) -> None:
    """A paused server fails its health check, and stays unready after continue until a health check succeeds."""
    client = serve("sglang", old, health_timeout_seconds=0.05)
    assert client.get("/health").status_code == 200
    client.ok("/pause_generation", {"mode": "retract"})
    assert client.get("/health").status_code == 503
    client.ok("/continue_generation", {})
    assert client.get("/ready").status_code == 503
    assert client.get("/health_generate").status_code == 200
    assert client.get("/ready").status_code == 200


def test_slow_down_can_be_turned_on_and_off(serve: Serve, old: Path) -> None:
    """The sleep of every forward pass is set, shown and removed, with `null` for an answer."""
    client = serve("sglang", old)
    assert client.ok("/slow_down", {"forward_sleep_time": 0.25}) is None
    assert client.get("/server_info").json()["internal_states"][0]["forward_sleep_time"] == 0.25
    assert client.ok("/slow_down", {"forward_sleep_time": None}) is None
    assert client.get("/server_info").json()["internal_states"][0]["forward_sleep_time"] is None


def test_the_routes_are_listed(serve: Serve, old: Path) -> None:
    """/openapi.json says which server this is and which routes it has."""
    described = serve("sglang", old).get("/openapi.json").json()
    assert "post" in described["paths"]["/begin_weight_update"]
    assert set(described["paths"]["/flush_cache"]) == {"get", "post"}


def test_a_restart_shows_in_the_seed(serve: Serve, old: Path) -> None:
    """Two servers draw two seeds, unless they are given one."""
    drawn = [serve("sglang", old).get("/server_info").json()["random_seed"] for _ in range(2)]
    assert drawn[0] != drawn[1]
    assert serve("sglang", old, seed=7).get("/server_info").json()["random_seed"] == 7
