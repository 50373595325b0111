"""Engines: the HTTP driver, one dialect per server, and a real CPU engine to test against."""

from typing import TYPE_CHECKING, Any

from .http import HttpEngine, SGLangEngine, VLLMEngine

if TYPE_CHECKING:
    from .process import EmbeddedEngine

__all__ = ["EmbeddedEngine", "HttpEngine", "SGLangEngine", "VLLMEngine"]


def __getattr__(name: str) -> Any:
    """Import `EmbeddedEngine` on first use only."""
    if name == "EmbeddedEngine":
        from .process import EmbeddedEngine  # noqa: PLC0415 - lazy on purpose

        return EmbeddedEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
