"""An engine is killed in the middle of a stream: what it had sent is kept, and another goes on from there."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import pytest
from anyio import to_thread

from adapters.engines import HttpEngine
from lifecycle import Deadlines, Lifecycle
from tests.contract.engines.servers import KINDS, Server
from tests.contract.streams import Listener, dialect_of, greedy

from .exactness import assert_accounted, assert_exact
from .stage import RUN, Rollout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lifecycle import GenerationRequest, Segment
    from lifecycle.generation import Tokens
    from tests.contract.conftest import Weights

ENGINES = {"embedded-sglang", "embedded-vllm"}
pytestmark = pytest.mark.anyio

TOKENS = 60
FIRST = 5
SECONDS = 30.0


class Overheard(HttpEngine):
    """An engine whose tokens are listened to on their way."""

    def __init__(self, server: Server, name: str) -> None:
        super().__init__(server.url, dialect_of(server), name=name)
        self.server, self.heard = server, Listener()

    async def generate(
        self, request: GenerationRequest, *, timeout: float, arrived: Callable[[Tokens], None] | None = None
    ) -> Segment:
        """Generate, as a stream.

        Cancellation: as for any engine.
        """
        assert arrived is not None

        def overhear(tokens: Tokens) -> None:
            self.heard(tokens)
            arrived(tokens)

        return await super().generate(request, timeout=timeout, arrived=overhear)

    async def under_way(self) -> None:
        """Wait until a stream of it is under way.

        Cancellation: nothing is lost.
        """
        while len(self.heard.ids) < FIRST:
            await self.heard.changed()


@pytest.fixture(params=["embedded-sglang", "embedded-vllm"])
def servers(request: pytest.FixtureRequest, old: Weights, tmp_path: Path) -> Iterator[list[Server]]:
    """Two engines of one kind with the same weights, slow enough to be killed on the way."""
    kind = KINDS[request.param]
    with ExitStack() as stack:
        started = []
        for number in range(2):
            server = Server(attrs.evolve(kind, command=_slow(kind.command)), old.path, tmp_path / f"{number}.log")
            stack.callback(server.stop)
            server.start()
            started.append(server)
        yield started


def _slow(command: Callable[[Path, int], list[str]]) -> Callable[[Path, int], list[str]]:
    def slow(model: Path, port: int) -> list[str]:
        *words, options = command(model, port)
        return [*words, options.replace("{", '{"forward_sleep_seconds": 0.02, ', 1)]

    return slow


async def test_a_stream_is_finished_by_another_engine_from_the_tokens_received(
    servers: list[Server], old: Weights
) -> None:
    """Every token that had arrived is kept, none comes twice, and all are what the weights generate."""
    engines = [Overheard(server, name) for server, name in zip(servers, ("left", "right"), strict=True)]
    deadlines = Deadlines(**dict.fromkeys((field.name for field in attrs.fields(Deadlines)), SECONDS))
    done: list[Any] = []
    request = greedy(TOKENS, stream=True)
    with anyio.fail_after(SECONDS):
        async with Lifecycle(engines, name=RUN, deadlines=deadlines) as lifecycle, anyio.create_task_group() as tasks:

            async def generate() -> None:
                done.append(await lifecycle.generate(request))

            tasks.start_soon(generate)
            first = await _first_of(engines)
            await to_thread.run_sync(first.server.kill)
    (generation,) = done
    before, after = generation.segments
    other = next(engine for engine in engines if engine is not first)
    assert (before.engine, after.engine) == (first.name, other.name)
    assert list(before.output_ids) == first.heard.ids
    assert list(after.output_ids) == other.heard.ids
    assert FIRST <= len(before.output_ids) < TOKENS
    rollout = Rollout(list(request.input_ids), generation)
    assert_accounted(rollout, TOKENS)
    assert_exact([rollout], lambda _: old)


async def _first_of(engines: list[Overheard]) -> Overheard:
    """Return the engine whose stream is under way first."""
    found: list[Overheard] = []
    async with anyio.create_task_group() as tasks:

        async def watch(engine: Overheard) -> None:
            await engine.under_way()
            found.append(engine)
            tasks.cancel_scope.cancel()

        for engine in engines:
            tasks.start_soon(watch, engine)
    return found[0]
