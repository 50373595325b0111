"""Streamed generations through the adapters, watched while they come."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from adapters.engines import HttpEngine
from adapters.engines.sglang import SGLang
from adapters.engines.vllm import VLLM
from lifecycle import GenerationRequest, errors

from .wire import PROMPT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from adapters.engines.dialect import Dialect
    from lifecycle import Segment
    from lifecycle.generation import Tokens

    from .engines.servers import Server

__all__ = ["Listener", "Streamed", "dialect_of", "engine_of", "greedy", "streaming"]

_DIALECTS: dict[str, Callable[[], Dialect]] = {"sglang": SGLang, "vllm": VLLM}


def greedy(tokens: int, **more: Any) -> GenerationRequest:
    """Return a greedy request for so many tokens."""
    return GenerationRequest(
        **{"input_ids": PROMPT, "temperature": 0.0, "ignore_eos": True, **more}, max_new_tokens=tokens
    )


def dialect_of(server: Server) -> Dialect:
    """Return a dialect that the server speaks, and that has met none yet."""
    return _DIALECTS[server.kind.dialect]()


@asynccontextmanager
async def engine_of(server: Server, *, completions: bool = False) -> AsyncIterator[HttpEngine]:
    """Speak to the server within the block; `completions`: as to a vLLM that offers no generation by tokens."""
    dialect = dialect_of(server)
    if completions:
        assert isinstance(dialect, VLLM)
        dialect._tokens = False
    engine = HttpEngine(server.url, dialect, name="engine")
    try:
        yield engine
    finally:
        await engine.aclose()


class Listener:
    """Takes tokens as they come."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.chunks = 0
        self._changed = anyio.Event()

    def __call__(self, tokens: Tokens) -> None:
        """Take what has arrived."""
        assert tokens.ids
        self.ids += tokens.ids
        self.logprobs += tokens.logprobs
        self.chunks += 1
        self.change()

    def change(self) -> None:
        """Let those who wait look again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Wait for more.

        Cancellation: nothing is lost.
        """
        await self._changed.wait()


class Streamed:
    """One generation that is streamed.

    Args:
        engine: Who is asked.
        patience: Seconds after which what must come is given up.
    """

    def __init__(self, engine: HttpEngine, patience: float) -> None:
        self.arrived = Listener()
        self.outcome: Segment | errors.LifecycleError | None = None
        self._engine, self._patience = engine, patience

    async def run(self, request: GenerationRequest) -> None:
        """Generate.

        Cancellation: reaches the engine by its connection.
        """
        try:
            self.outcome = await self._engine.generate(request, timeout=self._patience, arrived=self.arrived)
        except (errors.EngineUnavailable, errors.GenerationRefused) as error:
            self.outcome = error
        self.arrived.change()

    async def until(self, tokens: int) -> None:
        """Wait until so many tokens have arrived, and fail where the generation ends before.

        Cancellation: the generation goes on.
        """
        with anyio.fail_after(self._patience):
            while len(self.arrived.ids) < tokens:
                assert self.outcome is None, f"{len(self.arrived.ids)} tokens came: {self.outcome}"
                await self.arrived.changed()

    @property
    def segment(self) -> Segment:
        """What was generated; its tokens are those that had arrived."""
        assert not isinstance(self.outcome, errors.LifecycleError), self.outcome
        assert self.outcome is not None
        assert list(self.outcome.output_ids) == self.arrived.ids
        assert list(self.outcome.logprobs) == self.arrived.logprobs
        return self.outcome


@asynccontextmanager
async def streaming(engine: HttpEngine, request: GenerationRequest, patience: float) -> AsyncIterator[Streamed]:
    """Begin a streamed generation, and wait at the end of the block for its end.

    Cancellation: it is cancelled.
    """
    streamed = Streamed(engine, patience)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(streamed.run, request)
        yield streamed
