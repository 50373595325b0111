"""What ends a server. Each test leaves a dead one, and the next that needs it starts it anew."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

import pytest
import torch

from .trainer import training

if TYPE_CHECKING:
    from .conftest import Weights
    from .dialects import VLLM

DIALECT = "vllm"
GONE_SECONDS = 30.0


def gone(wire: VLLM) -> bool:
    """Whether the process ends by itself."""
    return wire.server.wait_until_gone(min(GONE_SECONDS, wire.patience))


def test_a_failed_reload_kills_the_engine_at_its_next_token(wire: VLLM, new: Weights) -> None:
    """500 for the path; the engine says that it is well; the old weights are gone all the same."""
    assert wire.load(new.path / "nowhere").status == 500
    assert wire.get("/health").status == 200
    answer = wire.start(1).answer()
    assert (answer.status, answer.body["error"]["code"]) == (500, 500)
    assert gone(wire)


def test_a_continue_after_a_failed_update_kills_the_engine_at_its_next_token(wire: VLLM) -> None:
    """A failed update leaves the model without tensors: never continue before a finish or a reload has succeeded."""
    wire.pause("abort")
    with training(wire) as trainer:
        assert wire.begin().status == 200
        assert trainer.update([("model.nope", torch.zeros(4, dtype=torch.bfloat16))]).status == 500
    assert wire.resume().status == 200
    assert wire.get("/health").status == 200
    assert wire.start(1).answer().status == 500
    assert gone(wire)


def test_a_start_while_a_request_runs_kills_the_engine_and_the_stream_says_200(wire: VLLM) -> None:
    """The stream ends in an event with an error, behind a status of 200, and with the usual last line."""
    flight = wire.fly()
    assert wire.begin().status == 200
    try:
        answer = flight.answer()
    except (OSError, http.client.HTTPException) as error:
        pytest.fail(f"the stream broke off: {error}")
    assert answer.status == 200
    assert answer.body[-1] == "[DONE]"
    assert answer.body[-2]["error"]["code"] == 500
    assert gone(wire)
