"""What both dialects share: the model with its scheduler, requests as awaitables, and the way an engine dies."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

import torch

from adapters.engines.embedded import checkpoint
from adapters.engines.embedded.scheduler import Scheduler
from adapters.engines.embedded.sequence import Completion, Finish, SamplingParams, Sequence
from adapters.engines.embedded.weights import Weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from adapters.engines.embedded.options import EngineOptions

__all__ = ["Disconnected", "Engine", "EngineDeadError", "Generation"]

T = TypeVar("T")
_DEFAULT_VERSION = "default"


class EngineDeadError(RuntimeError):
    """The scheduler has ended for good; the process follows."""


class Disconnected(Exception):
    """The client went away before its answer was ready."""


class Generation:
    """One request in flight, awaited on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence: Sequence
        self._loop = loop
        self._result: asyncio.Future[Completion] = loop.create_future()
        self._news = asyncio.Event()

    async def completion(self) -> Completion:
        """Wait for the end of the generation.

        Raises:
            Disconnected: If the client went away.
            EngineDeadError: If the engine died.
        """
        return await self._result

    async def progress(self) -> AsyncIterator[Completion]:
        """Yield the completion so far whenever it has grown, and last the finished one; for streaming requests."""
        seen = 0
        while True:
            await self._news.wait()
            self._news.clear()
            if self._result.done():
                yield self._result.result()
                return
            partial = self.sequence.snapshot()
            if partial.finish is None and len(partial.tokens) > seen:
                seen = len(partial.tokens)
                yield partial

    def heard(self) -> None:
        """Take notice of news; called on the loop."""
        if self.sequence.finish is not None:
            self.end(None)
        self._news.set()

    def end(self, finish: Finish | None) -> None:
        """Resolve with what there is, if nothing else came first; `finish` overrides the scheduler's own."""
        if not self._result.done():
            self._result.set_result(self.sequence.snapshot(finish))
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Resolve with an error, if nothing else came first."""
        if not self._result.done():
            self._result.set_exception(error)
            # Whoever waits still gets it; nobody may be waiting, and asyncio would complain about that.
            self._result.exception()
        self._news.set()


class Engine:
    """A model that generates, for a front end on one event loop.

    Args:
        path: Directory of the checkpoint.
        options: See `EngineOptions`.
        scaled_logprobs: What the dialect's server reports, unless `options` says otherwise.
        shortest_prefix: Fewest tokens that the dialect's server keeps in its prefix cache.
        on_death: Called on the loop when the scheduler has ended for good.

    Raises:
        CheckpointError: If the checkpoint cannot be loaded.
    """

    def __init__(
        self,
        path: str,
        options: EngineOptions,
        *,
        scaled_logprobs: bool,
        shortest_prefix: int,
        on_death: Callable[[Engine], None],
    ) -> None:
        model = checkpoint.load(path, dtype=options.dtype).requires_grad_(requires_grad=False).eval()
        config = model.config
        self.started = time.time()
        self.options = options
        self.seed = random.randrange(1 << 30) if options.seed is None else options.seed
        self.path = path
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_context = min(config.max_position_embeddings, options.max_context or config.max_position_embeddings)
        self.weights = Weights(model, path)
        self.dead: BaseException | None = None
        self.in_flight: set[Generation] = set()
        self.scheduler = Scheduler(
            model,
            options,
            scaled_logprobs=scaled_logprobs if options.logprobs is None else options.logprobs == "scaled",
            version=_DEFAULT_VERSION,
            seed=self.seed,
            shortest_prefix=shortest_prefix if options.prefix_cache else None,
            on_death=lambda error: self._on_loop(lambda: self._die(error)),
        )
        self.on_answer: Callable[[], None] = lambda: None
        self._on_death = on_death
        self._eos = config.eos_token_ids if options.eos_token_id is None else frozenset(options.eos_token_id)
        self._loop: asyncio.AbstractEventLoop
        self._heard: deque[Generation] = deque()
        self._woken = False

    def start(self) -> None:
        """Start the scheduler; call it on the event loop that will serve."""
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()

    def stop(self, timeout: float) -> bool:
        """End the scheduler and leave all groups; false if the scheduler is still busy after `timeout` seconds."""
        ended = self.scheduler.stop(timeout)
        if ended:
            self.weights.close()
        return ended

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the scheduler's thread, in its turn; a caller that goes away does not cancel it.

        Raises:
            EngineDeadError: If the engine is dead already.
        """
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        result = await asyncio.shield(asyncio.wrap_future(self.scheduler.call(function)))
        self.on_answer()
        return result

    def post(self, function: Callable[[], object]) -> None:
        """Run `function` in the scheduler's thread, in its turn, without waiting for it."""
        self.scheduler.call(function)

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams, *, stream: bool) -> Generation:
        """Queue a request.

        Raises:
            EngineDeadError: If the engine is dead.
        """
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        room = self.max_context - len(prompt)
        generation = Generation(self._loop)
        generation.sequence = Sequence(
            request_id=request_id,
            prompt=prompt,
            params=params,
            limit=room if params.max_new_tokens is None else min(room, params.max_new_tokens),
            stops=params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._eos,
            stream=stream,
            notify=lambda _: self._tell(generation),
            generator=None if params.seed is None else torch.Generator().manual_seed(params.seed),
        )
        self.in_flight.add(generation)
        self.scheduler.submit(generation.sequence)
        return generation

    def forget(self, generation: Generation) -> None:
        """Stop keeping track of a request whose answer has been given, or whose client is gone."""
        self.in_flight.discard(generation)

    def stray(self, prompt: list[int]) -> int | None:
        """Return a token of `prompt` that the vocabulary lacks, or `None`."""
        return next((token for token in prompt if not 0 <= token < self.vocab_size), None)

    def problem_with(self, prompt: list[int]) -> str | None:
        """Say why `prompt` cannot be run, or return `None`."""
        if not prompt:
            return "The prompt holds no tokens."
        if self.stray(prompt) is not None:
            return f"The prompt holds token ids outside the vocabulary, which has {self.vocab_size} tokens."
        if len(prompt) >= self.max_context:
            return (
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self.max_context} tokens)."
            )
        return None

    def _tell(self, generation: Generation) -> None:
        """Pass news from the scheduler's thread on to the loop, with one wake-up for many."""
        self._heard.append(generation)
        if not self._woken:
            self._woken = True
            self._on_loop(self._dispatch)

    def _dispatch(self) -> None:
        # Lowered before the queue is emptied: news that come during that wake the loop once more.
        self._woken = False
        self.on_answer()
        while self._heard:
            self._heard.popleft().heard()

    def _on_loop(self, function: Callable[[], None]) -> None:
        # A closed loop means that the server has ended, and with it whoever would have listened.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _die(self, error: BaseException) -> None:
        self.dead = error
        self._on_death(self)
