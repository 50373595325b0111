"""What a real vLLM answers, and dialects that have heard some of it."""

from attrs import evolve

from adapters.engines.dialect import Reply
from adapters.engines.vllm import VLLM
from lifecycle import events as e
from lifecycle.ports import Acknowledgement

from .dialogue import CLEAN, answer, converse, words

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
