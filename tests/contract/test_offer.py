"""What a server says of itself, before anything is asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from adapters.engines import SGLangEngine, VLLMEngine
from lifecycle import events, fleet

from .expectations import MODES

if TYPE_CHECKING:
    from .engines.servers import Server
    from .wire import Wire

_SPEAKS = {"sglang": SGLangEngine, "vllm": VLLMEngine}


@pytest.mark.anyio
async def test_a_probe_finds_the_routes_and_modes_that_are_needed(server: Server, wire: Wire) -> None:
    """The server describes its routes, and the dialect reads from them which pauses it has."""
    engine = _SPEAKS[server.kind.dialect](server.url)
    facts = fleet.EngineFacts(name=engine.name)
    acknowledgement = await engine.perform(events.ProbeEngine(), facts, timeout=server.kind.patience)
    await engine.aclose()
    assert acknowledgement.report is not None, acknowledgement.detail
    assert acknowledgement.report.paused is False
    assert acknowledgement.report.label == "old"
    assert {mode.value for mode in engine.capabilities.pause_modes} == set(MODES[server.kind.dialect])
    assert engine.capabilities.reports_versions
    assert engine.capabilities.streams
