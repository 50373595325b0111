"""What a vLLM process tells of itself: since when it runs, what it lacks, how it takes weights."""

import re
from typing import Any

from .dialect import HttpReply, Reply, field_of
from .offer import Offer

_NEEDED = ("/pause", "/resume", "/abort_requests", "/reset_prefix_cache", "/weight_info", "/update_weight_version")


def backend_of(config: Reply) -> str | None:
    """Return the weight-transfer backend that /server_info tells; `None` where it does not."""
    vllm_config = field_of(config, "vllm_config")
    chosen = vllm_config.get("weight_transfer_config") if isinstance(vllm_config, dict) else None
    backend = chosen.get("backend") if isinstance(chosen, dict) else None
    return backend if isinstance(backend, str) else None


def lacking(offer: Offer, version: Any) -> str | None:
    """Return why a server with these routes cannot be spoken to, or `None`."""
    if missing := offer.lacking(*_NEEDED):
        # Labels came after all the others (vllm#49040): without them nobody can tell which weights an engine holds.
        return f"vLLM {version} has no {', '.join(missing)}; use a version that labels its weights, such as 0.32"
    if offer.takes("/pause", "mode"):
        return None
    return f"vLLM {version} pauses without a mode, so that a kept pause would abort; use a version that has it"


def start_of(metrics: Reply) -> str | None:
    """Return when the server's process started, as Prometheus' client reports it; `None` where it does not."""
    text = metrics.text if isinstance(metrics, HttpReply) and metrics.status == 200 else ""
    found = re.search(r"^process_start_time_seconds\s+(\S+)", text, re.MULTILINE)
    return f"started {found[1]}" if found else None
