"""vLLM's front-end state: requests by id, pause modes, sleep; what AsyncLLM and its engine core keep between them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING

from adapters.engines.embedded.scheduler import SchedulerState
from adapters.engines.embedded.sequence import Finish

if TYPE_CHECKING:
    from collections.abc import Iterable

    from adapters.engines.embedded.engine import Engine, Generation
    from adapters.engines.embedded.sequence import SamplingParams

__all__ = ["AsyncLLM"]

_ABORT = Finish("abort")


class AsyncLLM:
    """See the module.

    Args:
        engine: The engine behind the front end.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.server_load = 0
        self._requests: dict[str, list[Generation]] = {}
        self._asleep: set[str] = set()

    @property
    def tracked(self) -> int:
        """How many generations are in flight; a request with several choices counts as many."""
        return sum(map(len, self._requests.values()))

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, prompt: list[int], params: SamplingParams, *, stream: bool) -> Generation:
        """Queue a request under the id that aborts go by; several may share one."""
        generation = self.engine.submit(request_id, prompt, params, stream=stream)
        self._requests.setdefault(request_id, []).append(generation)
        return generation

    def leave(self, generations: Iterable[Generation]) -> None:
        """Forget requests whose answers are given, and abort those whose clients are gone."""
        for generation in generations:
            self.engine.forget(generation)
            same = self._requests.get(generation.sequence.request_id, [])
            if generation in same:
                same.remove(generation)
            if not same:
                self._requests.pop(generation.sequence.request_id, None)
            if generation.sequence.finish is None:
                self._drop([generation])

    def abort(self, request_ids: Iterable[str] | None) -> None:
        """End requests at once, with the tokens that have arrived here; `None` for all.

        This needs no answer of the scheduler, so it works while that is paused or blocked in a collective.
        """
        chosen = self._requests.keys() if request_ids is None else request_ids
        generations = [generation for request_id in chosen for generation in self._requests.get(request_id, ())]
        for generation in generations:
            generation.end(_ABORT)
        self._drop(generations)

    def _drop(self, generations: list[Generation]) -> None:
        sequences = {generation.sequence for generation in generations}
        self.engine.post(lambda: self.engine.scheduler.abort(sequences.__contains__, _ABORT))

    # -- pause, sleep ----------------------------------------------------------------------------------------------

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Stop generation: mode "abort", "wait" or "keep". In mode "wait" this returns when nothing runs any more."""
        drained: Future[None] = Future()

        def pause() -> None:
            scheduler = self.engine.scheduler
            if mode == "keep":
                if clear_cache:
                    scheduler.retract()
                scheduler.set_state(SchedulerState.PAUSED_ALL)
            else:
                scheduler.set_state(SchedulerState.PAUSED_NEW)
                if mode == "abort":
                    scheduler.abort(lambda _: True, _ABORT)
            scheduler.when_drained(drained)

        await self.engine.call(pause)
        # A client that gives up does not undo the pause, so neither does the end of this call.
        await asyncio.shield(asyncio.wrap_future(drained))
        if clear_cache:
            await self.engine.call(self.engine.scheduler.clear_prefixes)

    async def resume(self) -> None:
        """Undo any number of pauses."""
        await self.engine.call(lambda: self.engine.scheduler.set_state(SchedulerState.UNPAUSED))

    async def is_paused(self) -> bool:
        """Whether the scheduler is in any paused state, also while a pause in mode "wait" is still pending."""
        return await self.engine.call(lambda: self.engine.scheduler.state is not SchedulerState.UNPAUSED)

    async def sleep(self, level: int, mode: str) -> None:
        """Pause, and from level 1 on call itself asleep; nothing is freed on CPU."""
        await self.pause(mode, clear_cache=True)
        if level > 0:
            self._asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Wake what `tags` name, `None` for all, and say whether nothing sleeps any more; then it is not paused."""
        self._asleep -= self._asleep if tags is None else set(tags)
        if not self._asleep:
            await self.resume()
        return not self._asleep

    async def is_sleeping(self) -> bool:
        """Whether it is asleep, or merely paused."""
        return bool(self._asleep) or await self.is_paused()

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        """Say whether the cache could be dropped: not while a request holds keys and values."""

        def reset() -> bool:
            if reset_running_requests:
                self.engine.scheduler.retract()
            dropped = not self.engine.scheduler.batch
            if dropped:
                self.engine.scheduler.clear_prefixes()
            return dropped

        return await self.engine.call(reset)
