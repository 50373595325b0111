"""A stage for tests of the HTTP driver: an engine on a local server that misbehaves as scripted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import SocketStream

from adapters.engines import HttpEngine, SGLangEngine
from lifecycle import events as e
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest

from .wire_server import Heard, Script, WireServer, reply, serving, until_gone

FACTS = EngineFacts(name="E1")
CONTINUE = e.ContinueGeneration()  # one idempotent call
FINISH = e.FinishUpdate(kind="broadcast", label="run:8")  # one call that is never repeated
OK = reply({"status": "ok"})
TOKENS = reply(
    {
        "output_ids": [7],
        "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None]]},
    }
)
REQUEST = GenerationRequest(input_ids=[1, 2], max_new_tokens=4)
SOON = 30.0
"""Seconds after which a test that ought to be done long ago fails."""


@asynccontextmanager
async def engine_on(script: Script, **options: Any) -> AsyncIterator[tuple[HttpEngine, WireServer]]:
    """Serve `script`, and yield an SGLang engine on it."""
    with anyio.fail_after(SOON):
        async with serving(script) as server:
            engine = SGLangEngine(server.url, **options)
            try:
                yield engine, server
            finally:
                await engine.aclose()


def busy(engine: HttpEngine) -> int:
    """Return how many requests are in flight."""
    return sum(lane.busy for lane in engine._lanes.values())


async def drop(_heard: Heard, _stream: SocketStream) -> bool:
    """Close the connection without an answer."""
    return False


async def hold(_heard: Heard, stream: SocketStream) -> bool:
    """Never answer."""
    await until_gone(stream)
    return False
