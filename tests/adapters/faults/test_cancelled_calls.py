"""Calls that are cancelled on the way leave nothing behind that the garbage collector would complain of."""

import gc
import warnings

import anyio
import anyio.lowlevel
import pytest

from adapters.engines import SGLangEngine
from adapters.testing import FaultProxy, Silence
from lifecycle.generation import GenerationRequest

from .servers import Obedient
from .stage import SOON, in_between

REQUEST = GenerationRequest(input_ids=[1, 2], max_new_tokens=1)
CHECKPOINTS = 40
"""More than a call takes until it waits for its reply."""


async def cancel_after(checkpoints: int, engine: SGLangEngine) -> None:
    """Begin a generation, and cancel it after so many steps of the event loop."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_generate, engine)
        for _ in range(checkpoints):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def _generate(engine: SGLangEngine) -> None:
    await engine.generate(REQUEST, timeout=SOON)


async def cancel_everywhere(proxy: FaultProxy) -> None:
    """Cancel calls at every step of their way."""
    engine = SGLangEngine(proxy.url)
    for checkpoints in range(CHECKPOINTS):
        await cancel_after(checkpoints, engine)
    await engine.aclose()


@pytest.mark.anyio
async def test_a_call_that_is_cancelled_anywhere_leaves_no_generator() -> None:
    """Trio warns of asynchronous generators that are collected before their end; a cancelled call leaves none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with in_between(Obedient("sglang")) as (proxy, _):
            await cancel_everywhere(proxy.always("*", Silence(applied=True)))
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
