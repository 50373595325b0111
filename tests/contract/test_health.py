"""What the probes of a cluster, and of this library, see while an engine is paused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conftest import Weights
    from .wire import Wire

READINESS = {
    "sglang": {"/ready": 503, "/model_info": 200, "/server_info": 200, "/v1/models": 200},
    "vllm": {"/health": 200, "/version": 200, "/weight_info": 200, "/v1/models": 200, "/get_world_size": 200},
}


def test_a_paused_engine_answers_what_needs_no_generation(wire: Wire, mode: str) -> None:
    """SGLang is not ready then and vLLM is well, so that a prober takes only the first for dead."""
    wire.pause(mode)
    assert {path: wire.get(path).status for path in READINESS[wire.dialect]} == READINESS[wire.dialect]
    wire.resume()
    assert not wire.paused()
    running = {path: wire.get(path).status for path in READINESS[wire.dialect]}
    assert set(running.values()) == {200}


def test_a_generation_of_one_token_tells_a_paused_engine_from_a_running_one(
    wire: Wire, old: Weights, mode: str
) -> None:
    """Nothing else proves that rollouts would be served."""
    assert wire.generate(1).tokens == old.tokens[:1]
    wire.pause(mode)
    canary = wire.start(1)
    wire.exchange()
    assert not canary.landed
    wire.resume()
    assert canary.completed().tokens == old.tokens[:1]
