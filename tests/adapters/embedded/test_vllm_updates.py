"""vLLM's weight updates: the gloo session and its order, reload from disk, versions, and what a failure leaves."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from .client import PROMPT, Client, describe, greedy, trainer_group
from .test_vllm_generation import COMPLETIONS, GENERATE, SLOW, body, choice, in_flight, inference, paused

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from adapters.engines.embedded import CausalLM
    from adapters.transfers.process_group import Group

    from .conftest import Serve


def tokens(client: Client, count: int = 20) -> Any:
    """Greedy tokens of the weights that are served."""
    return client.ok(COMPLETIONS, body(count))["choices"][0]["token_ids"]


def version(client: Client) -> Any:
    """What the server calls its weights."""
    return client.get("/weight_info").json()["weight_version"]


def joined(client: Client, **more: Any) -> Any:
    """A gloo group of this process and the engine."""
    return trainer_group(
        lambda port: client.later(
            "/init_weight_transfer_engine",
            {
                "init_info": {
                    "master_address": "127.0.0.1",
                    "master_port": port,
                    "rank_offset": 1,
                    "world_size": 2,
                    "group_name": "g",
                    **more,
                }
            },
        )
    )


def announce(model: CausalLM, part: slice = slice(None)) -> dict[str, Any]:
    """The body that says which tensors follow."""
    names, dtypes, shapes = describe(model)
    return {"update_info": {"names": names[part], "dtype_names": dtypes[part], "shapes": shapes[part]}}


def send(group: Group, tensors: Iterable[Tensor]) -> None:
    """Broadcast tensors one by one."""
    for tensor in tensors:
        group.broadcast(tensor, timeout=10.0)


def update(client: Client, group: Group, model: CausalLM, part: slice = slice(None)) -> None:
    """Announce tensors and send them."""
    answer = client.later("/update_weights", announce(model, part))
    send(group, [tensor for _, tensor in model.tensors()][part])
    assert answer.result(10).json() == {"message": "Weights updated"}


def worker_said(response: httpx.Response) -> str:
    """The worker's words inside a 500."""
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "InternalServerError"
    assert error["message"].startswith("Call to collective_rpc method failed: Worker failed with error '")
    return str(error["message"]).split("'", 1)[1].rsplit("', please", 1)[0]


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_gloo_update_gives_the_tokens_of_a_fresh_engine(
    serve: Serve, old: Path, new: Path, new_model: CausalLM, chunks: int
) -> None:
    """start, update in one chunk or several, finish: the new weights serve under the new version."""
    client, fresh = serve("vllm", old), serve("vllm", new)
    with joined(client) as group:
        client.ok("/pause")
        assert client.ok("/start_weight_update") == {"message": "Weight update started"}
        size = -(-len(list(new_model.tensors())) // chunks)
        for at in range(chunks):
            update(client, group, new_model, slice(at * size, (at + 1) * size))
        assert client.ok("/finish_weight_update", {"weight_version": "step-2"}) == {"message": "Weight update finished"}
        client.ok("/resume")
        assert client.ok("/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}
    assert tokens(client) == tokens(fresh)
    assert version(client) == "step-2"


def test_packed_buffers_end_when_they_exceed_their_size(serve: Serve, old: Path, new_model: CausalLM) -> None:
    """A sender that flushes when the running total exceeds the agreed size is understood."""
    client = serve("vllm", old)
    limit = 5000
    with joined(client, packed=True, packed_buffer_size_bytes=limit) as group:
        client.ok("/pause")
        client.ok("/start_weight_update")
        answer = client.later("/update_weights", announce(new_model))
        buffer: list[Tensor] = []
        for _, tensor in new_model.tensors():
            buffer.append(tensor.contiguous().flatten().view(torch.uint8))
            if sum(map(len, buffer)) > limit:
                send(group, [torch.cat(buffer)])
                buffer = []
        if buffer:
            send(group, [torch.cat(buffer)])
        assert answer.result(10).status_code == 200
        client.ok("/finish_weight_update")
        client.ok("/resume")
    assert tokens(client) == greedy(new_model, PROMPT, 20)
    assert version(client) == "default"


@pytest.mark.parametrize("clear_cache", ["true", "false"])
def test_a_kept_request_continues_as_the_new_model_only_without_its_cache(
    serve: Serve, old: Path, old_model: CausalLM, new_model: CausalLM, clear_cache: str
) -> None:
    """Spans mark where the version changed; a stale cache makes other tokens than the new model would."""
    client = serve("vllm", old, **SLOW)
    with joined(client) as group:
        answer = in_flight(client, inference(), path=GENERATE)
        client.ok("/pause", mode="keep", clear_cache=clear_cache)
        client.ok("/start_weight_update")
        update(client, group, new_model)
        client.ok("/finish_weight_update", {"weight_version": "step-2"})
        client.ok("/resume")
        done = choice(answer)
    made = done["weight_versions"][0]["end"]
    assert done["weight_versions"] == [
        {"version": "default", "start": 0, "end": made},
        {"version": "step-2", "start": made, "end": 60},
    ]
    before = greedy(old_model, PROMPT, made)
    assert done["token_ids"][:made] == before
    as_new = done["token_ids"][made:] == greedy(new_model, PROMPT + before, 60 - made)
    assert as_new is (clear_cache == "true")


def test_each_step_out_of_order_is_named(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """Update or finish before start, start twice, and shutdown inside a session get 500 and say so."""
    client = serve("vllm", old)
    said = worker_said(client.post("/update_weights", announce(old_model)))
    assert said == "start_weight_update must be called before update_weights."
    unmatched = "finish_weight_update called without a matching start_weight_update."
    assert worker_said(client.post("/finish_weight_update", {"weight_version": "lost"})) == unmatched
    assert version(client) == "default"
    client.ok("/start_weight_update")
    assert "already active" in worker_said(client.post("/start_weight_update"))
    shutdown = worker_said(client.post("/shutdown_weight_transfer_engine"))
    assert shutdown == "Cannot release a trainer connection during a weight update"
    client.ok("/finish_weight_update")
    assert worker_said(client.post("/finish_weight_update")) == unmatched
    assert client.post("/update_weights", {}).status_code == 400
    assert tokens(client) == greedy(old_model, PROMPT, 20)


def test_a_session_with_nothing_in_it_takes_the_version(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """Start and finish alone leave the weights and change what they are called."""
    client = serve("vllm", old)
    client.ok("/start_weight_update")
    client.ok("/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}})
    client.ok("/finish_weight_update", {"weight_version": "lie"})
    assert version(client) == "lie"
    assert tokens(client) == greedy(old_model, PROMPT, 20)


def test_wrong_payloads_are_refused_by_the_worker(serve: Serve, old: Path) -> None:
    """Unknown fields and lists of unequal lengths get 500; a missing outer key gets 400; no backend, 500."""
    client = serve("vllm", old)
    said = worker_said(client.post("/init_weight_transfer_engine", {"init_info": {"foo": 1}}))
    assert said.startswith("Invalid init_info for GlooWeightTransferEngine:")
    assert client.post("/init_weight_transfer_engine", {}).status_code == 400
    client.ok("/start_weight_update")
    uneven = {"update_info": {"names": ["a"], "dtype_names": [], "shapes": []}}
    assert worker_said(client.post("/update_weights", uneven)).startswith("Invalid update_info")
    bare = serve("vllm", old, weight_transfer_backend=None)
    assert worker_said(bare.post("/start_weight_update")).startswith("Weight transfer not configured")
    assert bare.get("/server_info").json()["vllm_config"]["weight_transfer_config"] is None


def test_a_partial_set_of_names_mixes_silently(serve: Serve, old: Path, new_model: CausalLM) -> None:
    """200 all the way, and neither the old tokens nor the new ones."""
    client = serve("vllm", old)
    with joined(client) as group:
        client.ok("/start_weight_update")
        update(client, group, new_model, slice(0, 10))
        client.ok("/finish_weight_update", {"weight_version": "half"})
    assert tokens(client) != greedy(new_model, PROMPT, 20)
    assert version(client) == "half"


@pytest.mark.parametrize("how", ["again", "empty session", "reload"])
def test_a_failed_update_can_be_repaired_while_paused(
    serve: Serve, old: Path, new: Path, new_model: CausalLM, how: str
) -> None:
    """The failure closes the session; a whole new one, an empty one or a reload from disk makes resume safe."""
    client = serve("vllm", old)
    before = tokens(client)
    with joined(client) as group:
        client.ok("/pause")
        client.ok("/start_weight_update")
        stranger = {"update_info": {"names": ["nope"], "dtype_names": ["float32"], "shapes": [[2]]}}
        answer = client.later("/update_weights", stranger)
        send(group, [torch.zeros(2)])
        assert "There is no module or parameter named 'nope'" in worker_said(answer.result(10))
        assert "without a matching start" in worker_said(client.post("/finish_weight_update"))
        assert client.get("/health").status_code == 200
        assert paused(client) is True
        if how == "reload":
            client.ok("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(new)}})
        else:
            client.ok("/start_weight_update")
            if how == "again":
                update(client, group, new_model)
            client.ok("/finish_weight_update")
        client.ok("/resume")
    assert tokens(client) == (before if how == "empty session" else greedy(new_model, PROMPT, 20))


def test_a_tensor_that_comes_twice_is_refused(serve: Serve, old: Path, new_model: CausalLM) -> None:
    """Within one session the CPU worker takes each parameter once."""
    client = serve("vllm", old)
    with joined(client) as group:
        client.ok("/start_weight_update")
        update(client, group, new_model, slice(0, 1))
        answer = client.later("/update_weights", announce(new_model, slice(0, 1)))
        send(group, [next(iter(new_model.tensors()))[1]])
        assert "Attempted to load weight" in worker_said(answer.result(10))


def test_a_blocked_update_leaves_only_aborts_and_health(serve: Serve, old: Path, new_model: CausalLM) -> None:
    """While the trainer is awaited, /health and /version answer and aborts work; /is_paused waits its turn."""
    client = serve("vllm", old, **SLOW)
    with joined(client) as group:
        kept = in_flight(client)
        client.ok("/pause", mode="keep")
        client.ok("/start_weight_update")
        blocked = client.later("/update_weights", announce(new_model))
        first, *rest = [tensor for _, tensor in new_model.tensors()]
        send(group, [first])
        waiting = client.run(lambda: paused(client))
        assert client.get("/health").status_code == 200
        assert client.get("/version").status_code == 200
        client.ok("/abort_requests", {})
        assert choice(kept)["finish_reason"] == "abort"
        assert not blocked.done()
        assert not waiting.done()
        send(group, rest)
        assert blocked.result(10).status_code == 200
        assert waiting.result(10) is True


def test_a_client_that_gives_up_does_not_cancel_an_update(serve: Serve, old: Path, new_model: CausalLM) -> None:
    """The trainer that comes after the caller has left still delivers."""
    client = serve("vllm", old)
    with joined(client) as group:
        client.ok("/pause")
        client.ok("/start_weight_update")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{client.url}/update_weights", json=announce(new_model), timeout=0.05)
        send(group, [tensor for _, tensor in new_model.tensors()])
        client.ok("/finish_weight_update")
        client.ok("/resume")
    assert tokens(client) == greedy(new_model, PROMPT, 20)


def test_a_trainer_that_dies_fails_the_update_at_once(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """500 and a closed session; a new group can be joined without a shutdown."""
    client = serve("vllm", old)
    with joined(client) as group:
        client.ok("/pause")
        client.ok("/start_weight_update")
        answer = client.later("/update_weights", announce(old_model))
        group.cut()
        worker_said(answer.result(10))
    with joined(client) as group:
        client.ok("/start_weight_update")
        update(client, group, old_model)
        client.ok("/finish_weight_update")
        client.ok("/resume")
    assert tokens(client) == greedy(old_model, PROMPT, 20)


def test_a_join_that_nobody_answers_ends_at_its_own_deadline(serve: Serve, old: Path) -> None:
    """timeout_s in init_info is the deadline; generation goes on afterwards."""
    client = serve("vllm", old)
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "timeout_s": 0.2}
    worker_said(client.post("/init_weight_transfer_engine", {"init_info": info}))
    assert client.ok(COMPLETIONS, body(1))["choices"][0]["finish_reason"] == "length"


def test_an_unhandled_500_closes_the_connection_without_saying_so(serve: Serve, old: Path) -> None:
    """The answer names no closing, yet the connection is closed after it; a 400 leaves it open."""
    client = serve("vllm", old)
    url = httpx.URL(client.url)
    kept = http.client.HTTPConnection(url.host, url.port or 0, timeout=10)
    try:
        kept.request("POST", "/update_weights", "{}")
        response = kept.getresponse()
        assert (response.status, response.read() != b"") == (400, True)
        kept.request("POST", "/finish_weight_update")
        response = kept.getresponse()
        assert (response.status, response.getheader("Connection")) == (500, None)
        response.read()
        assert kept.sock.recv(1) == b""
    finally:
        kept.close()


def test_a_reload_from_disk_changes_weights_and_no_version(
    serve: Serve, old: Path, new_model: CausalLM, new: Path
) -> None:
    """No session is needed; the path sticks; the version has to be set by hand."""
    client = serve("vllm", old)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
    assert client.ok("/collective_rpc", reload) == {"results": [None]}
    assert client.ok("/collective_rpc", {"method": "reload_weights"}) == {"results": [None]}
    assert tokens(client) == greedy(new_model, PROMPT, 20)
    assert version(client) == "default"
    assert client.ok("/update_weight_version", {"new_version": "v7"}) == {"success": True, "new_version": "v7"}
    assert version(client) == "v7"
    assert client.post("/update_weight_version", {"new_version": 7}).status_code == 400
    assert client.get("/v1/models").json()["data"][0]["id"] == str(old)


def test_a_pause_that_leaves_the_cache_leaves_it_stale(serve: Serve, old: Path, new: Path, new_model: CausalLM) -> None:
    """After an update in it, a long prompt seen before gives other tokens than the new model, until a reset."""
    client = serve("vllm", old)
    prompt = PROMPT * 5
    client.ok(COMPLETIONS, body(20, prompt=prompt))
    client.ok("/pause", clear_cache="false")
    client.ok("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(new)}})
    client.ok("/resume")
    expected = greedy(new_model, prompt, 20)
    assert client.ok(COMPLETIONS, body(20, prompt=prompt))["choices"][0]["token_ids"] != expected
    assert client.ok("/reset_prefix_cache") == {"success": True}
    assert client.ok(COMPLETIONS, body(20, prompt=prompt))["choices"][0]["token_ids"] == expected


def test_a_bad_path_sticks_and_costs_the_weights(
    serve: Serve, old: Path, new_model: CausalLM, new: Path, tmp_path: Path
) -> None:
    """After a bad path the next reload without one fails too, and nothing can be generated until a good one."""
    client = serve("vllm", old, lethal_traps=False)
    bad = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    worker_said(client.post("/collective_rpc", bad))
    worker_said(client.post("/collective_rpc", {"method": "reload_weights"}))
    assert client.post(COMPLETIONS, body(2)).status_code == 500
    bad["kwargs"] = {"weights_path": str(new)}
    client.ok("/collective_rpc", bad)
    assert tokens(client) == greedy(new_model, PROMPT, 20)


def test_other_remote_calls_are_refused(serve: Serve, old: Path) -> None:
    """An unknown method gets 500 and its name, a missing one 400."""
    client = serve("vllm", old)
    said = worker_said(client.post("/collective_rpc", {"method": "nope"}))
    assert said == "'CPUWorker' object has no attribute 'nope'"
    assert client.post("/collective_rpc", {}).status_code == 400


def test_lost_weights_answer_500_where_traps_are_not_lethal(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """With `lethal_traps` off, generation over missing weights fails, and a finished session cures it."""
    client = serve("vllm", old, lethal_traps=False)
    client.ok("/start_weight_update")
    assert client.post(COMPLETIONS, body(2)).status_code == 500
    client.ok("/finish_weight_update")
    assert tokens(client) == greedy(old_model, PROMPT, 20)
