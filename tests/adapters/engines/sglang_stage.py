"""What a real SGLang answers, and dialects that have heard some of it."""

from typing import Any

from attrs import evolve

from adapters.engines.dialect import Reply
from adapters.engines.sglang import SGLang
from lifecycle import events as e
from lifecycle.ports import Acknowledgement
from lifecycle.states import PauseMode

from .dialogue import CLEAN, answer, converse, words

PAUSED = evolve(CLEAN, paused=True)
OK = answer({"status": "ok", "message": "Generation paused successfully."})
TAKEN = answer({"success": True, "message": "ok"})
MODEL = answer({"model_path": "tiny", "weight_version": "run:7"})
SERVER = answer({"version": "0.5.23", "random_seed": 41, "tp_size": 2, "pp_size": 1, "dp_size": 1})
_NEEDED = ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/update_weight_version")
_OLD: dict[str, Any] = {path: {"post": {}} for path in _NEEDED}
_MODES: dict[str, Any] = {"properties": {"mode": {"enum": ["abort", "retract", "in_place"]}}}
_PAUSE = {"post": {"requestBody": {"content": {"application/json": {"schema": _MODES}}}}}
OLD_ROUTES = answer({"paths": _OLD})
_NEW: dict[str, Any] = {"/pause_generation": _PAUSE, "/begin_weight_update": {}, "/end_weight_update": {}}
ROUTES = answer({"paths": {**_OLD, **_NEW}})
READY, NOT_READY, NOT_FOUND = answer({}), words("", 503), answer({"detail": "Not Found"}, 404)
NO_SESSION = answer({"success": False, "message": "no weight-update session is open; call begin_..."}, 400)
UNFLUSHED = answer({"success": False, "message": "Weights were updated, but the cache was not flushed because"}, 400)


def probed(*replies: Reply) -> tuple[SGLang, Acknowledgement]:
    """Return a dialect and what it learnt by its first probe."""
    dialect = SGLang()
    return dialect, converse(dialect.probe(), *replies)[1]


def paused(mode: PauseMode) -> SGLang:
    """Return a dialect whose engine was paused in `mode`."""
    dialect = SGLang()
    replies = [OK] if mode is PauseMode.ABORT else [OK, SERVER]
    _, ack = converse(dialect.perform(e.PauseGeneration(mode=mode), CLEAN), *replies)
    assert ack.done
    return dialect
