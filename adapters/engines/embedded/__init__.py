"""A real inference engine for CPU that speaks the SGLang or the vLLM dialect.

It is no mock: a small Llama generates with continuous batching, a key/value cache and per-token log-probabilities, and
takes new weights from disk or from a gloo group. It answers as the real servers do, traps included, so that a trainer
can be tested against it without a GPU.

Importing this package is cheap; torch, starlette and uvicorn are imported when a name is first used (the extra
`rollout-lifecycle[embedded]` brings them).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapters.engines.embedded.checkpoint import CheckpointError, load, load_config, save
    from adapters.engines.embedded.model import CausalLM, LlamaConfig
    from adapters.engines.embedded.options import DIALECTS, EngineOptions
    from adapters.engines.embedded.server import EmbeddedServer, serve

__all__ = [
    "DIALECTS",
    "CausalLM",
    "CheckpointError",
    "EmbeddedServer",
    "EngineOptions",
    "LlamaConfig",
    "load",
    "load_config",
    "save",
    "serve",
]

_HOMES = {
    "DIALECTS": "options",
    "CausalLM": "model",
    "CheckpointError": "checkpoint",
    "EmbeddedServer": "server",
    "EngineOptions": "options",
    "LlamaConfig": "model",
    "load": "checkpoint",
    "load_config": "checkpoint",
    "save": "checkpoint",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
