"""SGLang's weight updates, from disk and over a gloo group, with the versions they leave and the traps they set."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from .client import PROMPT, Client, describe, greedy, trainer_group
from .test_sglang_generation import SLOW, body, finish, in_flight

if TYPE_CHECKING:
    from pathlib import Path

    from adapters.engines.embedded import CausalLM
    from adapters.transfers.process_group import Group

    from .conftest import Serve

SESSION = "/update_weights_from_distributed"


def tokens(client: Client, count: int = 20) -> Any:
    """Greedy tokens of the weights that are served."""
    return client.ok("/generate", body(count))["output_ids"]


def checksum(client: Client) -> Any:
    """What the server says its weights add up to."""
    return client.ok("/weights_checker", {})["per_engine_checksum"]


def joined(client: Client, name: str = "g") -> Any:
    """A gloo group of this process and the engine."""
    return trainer_group(
        lambda port: client.later(
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": port,
                "rank_offset": 1,
                "world_size": 2,
                "group_name": name,
                "backend": "gloo",
            },
        ),
        name,
    )


def announce(model: CausalLM, **more: Any) -> dict[str, Any]:
    """The body that says which tensors follow."""
    names, dtypes, shapes = describe(model)
    return {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": "g", **more}


def send(group: Group, model: CausalLM) -> None:
    """Broadcast every tensor."""
    for _, tensor in model.tensors():
        group.broadcast(tensor, timeout=10.0)


def send_bucket(group: Group, model: CausalLM) -> None:
    """Broadcast all tensors as one of bytes."""
    flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in model.tensors()])
    group.broadcast(flat, timeout=10.0)


def test_a_disk_update_changes_the_tokens_to_those_of_a_fresh_engine(serve: Serve, old: Path, new: Path) -> None:
    """After an update, greedy tokens and checksum equal those of an engine started from the new weights."""
    client, fresh = serve("sglang", old), serve("sglang", new)
    assert tokens(client) != tokens(fresh)
    answer = client.ok("/update_weights_from_disk", {"model_path": str(new), "weight_version": "v1"})
    assert answer == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to v1.",
        "num_paused_requests": 0,
    }
    assert tokens(client) == tokens(fresh)
    assert checksum(client) == checksum(fresh)
    info = client.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(new), "v1")
    assert client.get("/v1/models").json()["data"][0]["id"] == str(new)


def test_an_update_without_a_version_keeps_the_old_name(serve: Serve, old: Path, new: Path) -> None:
    """The weights change and the version does not."""
    client = serve("sglang", old)
    client.ok("/update_weights_from_disk", {"model_path": str(new)})
    assert client.ok("/generate", body(1))["meta_info"]["weight_version"] == "default"


def test_a_wrong_path_is_refused_and_changes_nothing(
    serve: Serve, old: Path, old_model: CausalLM, tmp_path: Path
) -> None:
    """400 with success false; the old weights serve on, and a later update works."""
    client = serve("sglang", old)
    for path in (tmp_path, tmp_path / "nowhere"):
        response = client.post("/update_weights_from_disk", {"model_path": str(path)})
        assert response.status_code == 400
        assert response.json()["success"] is False
        assert response.json()["message"].startswith("Failed to get weights iterator:")
    assert client.post("/update_weights_from_disk", {}).status_code == 400
    assert tokens(client) == greedy(old_model, PROMPT, 20)


def test_a_checkpoint_that_lacks_a_layer_is_mixed_in_silently(
    serve: Serve, old: Path, new: Path, new_model: CausalLM, tmp_path: Path
) -> None:
    """200 and success, though half the weights stayed what they were: only tokens or checksums tell."""
    partial = shutil.copytree(new, tmp_path / "partial")
    tensors = load_file(partial / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".layers.1." not in n}, partial / "model.safetensors")
    client = serve("sglang", old)
    assert client.ok("/update_weights_from_disk", {"model_path": str(partial), "weight_version": "v1"})["success"]
    assert client.get("/model_info").json()["weight_version"] == "v1"
    assert tokens(client) != greedy(new_model, PROMPT, 20)


def test_without_a_pause_an_update_waits_for_requests_and_later_ones_wait_for_it(
    serve: Serve, old: Path, new: Path, old_model: CausalLM, new_model: CausalLM
) -> None:
    """The request in flight ends on the old weights, the one sent meanwhile runs on the new ones."""
    client = serve("sglang", old, **SLOW)
    first = in_flight(client)
    update = client.begin("/update_weights_from_disk", {"model_path": str(new), "weight_version": "v1"})
    second = client.later("/generate", body(10))
    assert finish(first)["output_ids"] == greedy(old_model, PROMPT, 60)
    assert update.result(10) == 200
    assert finish(second)["output_ids"] == greedy(new_model, PROMPT, 10)


def test_a_retracted_request_goes_on_with_the_new_weights(
    serve: Serve, old: Path, new: Path, old_model: CausalLM, new_model: CausalLM
) -> None:
    """Its tokens are marked with the version that made each, and continue exactly as the new model would."""
    client = serve("sglang", old, **SLOW)
    answer = in_flight(client)
    client.ok("/pause_generation", {"mode": "retract"})
    client.ok("/update_weights_from_disk", {"model_path": str(new), "weight_version": "v7"})
    client.ok("/continue_generation", {})
    done = finish(answer)
    spans = done["meta_info"]["weight_versions"]
    made = spans[0]["end"]
    assert spans == [
        {"version": "default", "start": 0, "end": made},
        {"version": "v7", "start": made, "end": 60},
    ]
    assert done["meta_info"]["weight_version"] == "v7"
    before = greedy(old_model, PROMPT, made)
    assert done["output_ids"] == before + greedy(new_model, PROMPT + before, 60 - made)


def test_in_place_and_flush_is_refused_although_the_weights_changed(serve: Serve, old: Path, new: Path) -> None:
    """400, the new weights are in, /model_info keeps path and version of the old, and the tokens say otherwise."""
    client = serve("sglang", old, **SLOW)
    answer = in_flight(client)
    client.ok("/pause_generation", {"mode": "in_place"})
    response = client.post("/update_weights_from_disk", {"model_path": str(new), "weight_version": "v1"})
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert response.json()["message"].startswith("Weights were updated, but the cache was not flushed because")
    client.ok("/continue_generation", {})
    spans = finish(answer)["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "v1"]
    info = client.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(old), "default")
    assert client.ok("/generate", body(1))["meta_info"]["weight_version"] == "v1"


def test_in_place_without_flush_mixes_versions_on_a_stale_cache(
    serve: Serve, old: Path, new: Path, new_model: CausalLM
) -> None:
    """200; the request goes on over keys and values of the old weights, so not as the new model would."""
    client = serve("sglang", old, **SLOW)
    answer = in_flight(client)
    client.ok("/pause_generation", {"mode": "in_place"})
    update = {"model_path": str(new), "weight_version": "v1", "flush_cache": False}
    client.ok("/update_weights_from_disk", update)
    client.ok("/continue_generation", {})
    done = finish(answer)
    made = done["meta_info"]["weight_versions"][0]["end"]
    before, after = done["output_ids"][:made], done["output_ids"][made:]
    assert after != greedy(new_model, PROMPT + before, 60 - made)
    assert client.get("/model_info").json()["weight_version"] == "v1"


def test_an_update_without_a_flush_leaves_a_stale_prefix_cache(
    serve: Serve, old: Path, new: Path, new_model: CausalLM
) -> None:
    """A prompt that was seen before gives the tokens of neither model, silently, until the cache is flushed."""
    client = serve("sglang", old)
    before = tokens(client)
    again = client.ok("/generate", body(20))
    assert (again["output_ids"], again["meta_info"]["cached_tokens"]) == (before, 3)
    client.ok("/update_weights_from_disk", {"model_path": str(new), "flush_cache": False})
    assert tokens(client) not in (before, greedy(new_model, PROMPT, 20))
    client.ok("/flush_cache", {})
    fresh = client.ok("/generate", body(20))
    assert (fresh["output_ids"], fresh["meta_info"]["cached_tokens"]) == (greedy(new_model, PROMPT, 20), 0)


def test_the_version_alone_can_be_changed_and_aborts_by_default(serve: Serve, old: Path) -> None:
    """No weights move; a running request is aborted unless the call says not to, and then has two spans."""
    client = serve("sglang", old, **SLOW)
    assert client.post("/update_weight_version", {"new_version": 3}).status_code == 400
    answer = in_flight(client)
    client.ok("/update_weight_version", {"new_version": "w1", "abort_all_requests": False})
    assert [span["version"] for span in finish(answer)["meta_info"]["weight_versions"]] == ["default", "w1"]
    answer = in_flight(client)
    assert client.ok("/update_weight_version", {"new_version": "w2"}) == {
        "success": True,
        "message": "Weight version updated to w2",
        "new_version": "w2",
    }
    assert finish(answer)["meta_info"]["finish_reason"]["type"] == "abort"
    assert client.get("/model_info").json()["weight_version"] == "w2"


@pytest.mark.parametrize("bucket", [False, True])
def test_a_gloo_update_equals_one_from_disk(
    serve: Serve, old: Path, new: Path, new_model: CausalLM, bucket: bool
) -> None:
    """Tensors from a trainer's group, plain or in one bucket, give the checksum of the saved model."""
    client, fresh = serve("sglang", old), serve("sglang", new)
    with joined(client) as group:
        assert client.ok("/begin_weight_update", {})["success"]
        more = {"load_format": "flattened_bucket"} if bucket else {}
        answer = client.later(SESSION, announce(new_model, weight_version="v1", **more))
        (send_bucket if bucket else send)(group, new_model)
        assert finish(answer)["success"]
        assert client.ok("/end_weight_update", {})["success"]
        assert client.ok("/destroy_weights_update_group", {"group_name": "g"})["success"]
    assert checksum(client) == checksum(fresh)
    assert tokens(client) == greedy(new_model, PROMPT, 20)
    info = client.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(old), "v1")


def test_updates_from_a_group_need_a_session_and_the_group(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """Each step out of order gets 400 with success false and says which step is missing."""
    client = serve("sglang", old)
    told = {
        SESSION: "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()",
        "/end_weight_update": "no weight-update session is open; call begin_weight_update() first",
        "/destroy_weights_update_group": "The group to be destroyed does not exist.",
    }
    for path, message in told.items():
        response = client.post(path, announce(old_model))
        assert (response.status_code, response.json()) == (400, {"success": False, "message": message})
    client.ok("/begin_weight_update", {})
    response = client.post("/begin_weight_update", {})
    assert response.status_code == 400
    assert "already open" in response.json()["message"]
    response = client.post(SESSION, announce(old_model))
    assert response.status_code == 400
    assert "Failed to receive weights: Group g not in []" in response.json()["message"]
    assert tokens(client) == greedy(old_model, PROMPT, 20)


def test_refusals_come_before_the_broadcast(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """A dtype that torch does not know, and a misaligned bucket, get 400 though nobody has sent anything."""
    client = serve("sglang", old)
    with joined(client):
        client.ok("/begin_weight_update", {})
        wrong = {"names": ["a"], "dtypes": ["torch.bfloat16"], "shapes": [[1]], "group_name": "g"}
        response = client.post(SESSION, wrong)
        assert response.status_code == 400
        assert "module 'torch' has no attribute 'torch.bfloat16'" in response.json()["message"]
        unaligned = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[1], [1]], "group_name": "g"}
        response = client.post(SESSION, {**unaligned, "load_format": "flattened_bucket"})
        assert response.status_code == 400
        assert "Unaligned received tensor b: byte offset 2, dtype torch.float32" in response.json()["message"]
    assert tokens(client) == greedy(old_model, PROMPT, 20)


def test_a_wrong_shape_leaves_the_weights_partly_new(serve: Serve, old: Path, new_model: CausalLM) -> None:
    """400 says so; the tensors before it are in, the version is the old one, and the server lives."""
    client = serve("sglang", old)
    before = checksum(client)
    good, bad = dict(new_model.tensors())["model.norm.weight"] + 1, torch.zeros(3)
    with joined(client) as group:
        client.ok("/begin_weight_update", {})
        wrong = {"names": ["model.norm.weight", "lm_head.weight"], "dtypes": ["float32"] * 2, "shapes": [[32], [3]]}
        answer = client.later(SESSION, {**wrong, "group_name": "g", "weight_version": "v1"})
        group.broadcast(good, timeout=10.0)
        group.broadcast(bad, timeout=10.0)
        response = answer.result(10)
    assert response.status_code == 400
    assert "partially updated. Please discard the whole weights." in response.json()["message"]
    assert client.ok("/get_weights_by_name", {"name": "model.norm.weight"}) == good.tolist()
    assert checksum(client) != before
    assert client.get("/model_info").json()["weight_version"] == "default"


def test_unknown_names_and_short_lists_succeed_silently(serve: Serve, old: Path) -> None:
    """A tensor that the model does not have, and names without dtypes, get 200 and change nothing."""
    client = serve("sglang", old)
    before = checksum(client)
    with joined(client) as group:
        client.ok("/begin_weight_update", {})
        stranger = {"names": ["stranger"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"}
        answer = client.later(SESSION, stranger)
        group.broadcast(torch.zeros(2), timeout=10.0)
        assert finish(answer)["success"]
        assert client.ok(SESSION, {**stranger, "names": ["lm_head.weight"], "dtypes": []})["success"]
    assert checksum(client) == before


def test_a_trainer_that_dies_fails_the_update_and_not_the_server(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """400 as soon as the connection is gone; nothing is loaded, the session can be ended, and requests are served."""
    client = serve("sglang", old)
    with joined(client) as group:
        client.ok("/begin_weight_update", {})
        answer = client.later(SESSION, announce(old_model))
        group.cut()
        response = answer.result(10)
    assert response.status_code == 400
    assert "Failed to receive weights" in response.json()["message"]
    client.ok("/end_weight_update", {})
    assert client.ok("/destroy_weights_update_group", {"group_name": "g"})["success"]
    assert tokens(client) == greedy(old_model, PROMPT, 20)


def test_a_group_that_nobody_hosts_blocks_until_its_deadline(serve: Serve, old: Path) -> None:
    """Control calls and generation wait behind it, /ready does not; after the deadline all go on."""
    client = serve("sglang", old, transfer_timeout_seconds=0.4)
    where = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    joining = client.later("/init_weights_update_group", where)
    while client.get("/ready").status_code == 200 and not joining.running():
        pass
    assert client.get("/ready").status_code == 200
    assert client.ok("/generate", body(1))["meta_info"]["completion_tokens"] == 1
    response = joining.result(10)
    assert response.status_code == 400
    assert response.json()["message"].startswith("Failed to initialize custom process group:")


def test_continue_waits_for_an_update_over_a_group(serve: Serve, old: Path, new_model: CausalLM) -> None:
    """While paused, a distributed update holds the gate: continue is answered after it."""
    client = serve("sglang", old)
    with joined(client) as group:
        client.ok("/pause_generation", {"mode": "retract"})
        client.ok("/begin_weight_update", {})
        update = client.later(SESSION, announce(new_model))
        first, *rest = [tensor for _, tensor in new_model.tensors()]
        group.broadcast(first, timeout=10.0)
        resume = client.later("/continue_generation", {})
        assert client.get("/model_info").status_code == 200
        assert not resume.done()
        for tensor in rest:
            group.broadcast(tensor, timeout=10.0)
        assert update.result(10).status_code == 200
        assert resume.result(10).status_code == 200


def test_weights_can_be_looked_at(serve: Serve, old: Path, old_model: CausalLM) -> None:
    """Rows come as JSON, cut to the size that was asked for; unknown names get 400."""
    client = serve("sglang", old)
    rows = client.ok("/get_weights_by_name", {"name": "lm_head.weight", "truncate_size": 2})
    torch.testing.assert_close(torch.tensor(rows), old_model.lm_head.weight[:2].detach())
    response = client.post("/get_weights_by_name", {"name": "nope"})
    assert (response.status_code, response.json()) == (400, {"error": {"message": "Get parameter by name failed"}})


def test_weights_checker_knows_its_actions(serve: Serve, old: Path) -> None:
    """Checksums are stable and one per tensor; what does not work on CPU is refused; a reset shows in the checksum."""
    client = serve("sglang", old)
    first = client.ok("/weights_checker")
    assert first == client.ok("/weights_checker", {"action": "checksum"})
    assert all(len(value) == 16 for value in first["ranks"][0]["checksums"].values())
    for action in ("compare", "bogus"):
        assert client.post("/weights_checker", {"action": action}).status_code == 400
    assert client.ok("/weights_checker", {"action": "reset_tensors"})["success"]
    assert checksum(client) != first["per_engine_checksum"]
