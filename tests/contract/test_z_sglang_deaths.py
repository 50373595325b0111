"""What ends an SGLang server, or blocks it for good. Each test leaves such a one; the next starts it anew."""

from __future__ import annotations

import http.client
import shutil
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Weights
    from .dialects import SGLang

DIALECT = "sglang"
GONE_SECONDS = 60.0


def gone(wire: SGLang) -> bool:
    """Whether the process ends by itself."""
    return wire.server.wait_until_gone(min(GONE_SECONDS, wire.patience))


def test_a_checkpoint_of_another_shape_kills_the_server_without_an_answer(
    wire: SGLang, new: Weights, tmp_path: Path
) -> None:
    """The connection drops after some seconds: no answer here is neither done nor undone."""
    wrong = shutil.copytree(new.path, tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:64].clone()
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    flight = wire.later("/update_weights_from_disk", {"model_path": str(wrong)})
    with pytest.raises((OSError, http.client.HTTPException)):
        flight.answer()
    assert gone(wire)


def test_giving_memory_back_while_a_request_runs_kills_the_server(wire: SGLang) -> None:
    """Only an idle engine survives it."""
    wire.fly()
    flight = wire.later("/release_memory_occupation", {})
    with pytest.raises((OSError, http.client.HTTPException)):
        flight.answer()
    assert gone(wire)


def test_a_group_that_nobody_hosts_blocks_all_generation(wire: SGLang) -> None:
    """No limit of time is the request's own: a hang-up does not end it, and only a new server generates again."""
    where = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    join = wire.later("/init_weights_update_group", {**where, "group_name": "nobody", "backend": "gloo"})
    wire.exchange()
    generation = wire.start(1)
    wire.exchange()
    assert wire.get("/model_info").status == 200
    assert wire.get("/ready").status == 200
    assert not join.landed
    assert not generation.landed
    join.hang_up()
    wire.exchange()
    assert not generation.landed
    wire.server.kill()
