"""Continuous batching in a thread of its own.

Everything that reaches the scheduler goes through one inbox and is taken in order, between two forward passes:
requests, aborts, pauses, weight updates. So weights never change within a pass, and an answered control call proves
that every earlier one has been carried out, which is what the real servers' channels give too.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import torch

from adapters.engines.embedded.batch import RunningBatch
from adapters.engines.embedded.sequence import Finish, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from adapters.engines.embedded.model import CausalLM
    from adapters.engines.embedded.options import EngineOptions

__all__ = ["Fatal", "Scheduler", "SchedulerState"]

T = TypeVar("T")


class Fatal(Exception):
    """Something that a real server does not survive."""


class SchedulerState(Enum):
    """What the scheduler may do."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"  # the running batch goes on, nothing is admitted
    PAUSED_ALL = "paused_all"  # no forward pass


class Scheduler:
    """Run requests on a model.

    Args:
        model: What to run.
        options: Limits.
        scaled_logprobs: See `sampling.sample`.
        version: What the weights are called at the start.
        seed: Seed of the sampling of requests that bring none.
        on_death: Called in the scheduler's thread with the reason when it stops for good.
        shortest_prefix: See `PrefixCache`.
    """

    def __init__(
        self,
        model: CausalLM,
        options: EngineOptions,
        *,
        scaled_logprobs: bool,
        version: str,
        seed: int,
        on_death: Callable[[BaseException], None],
        shortest_prefix: int | None = None,
    ) -> None:
        self.state = SchedulerState.UNPAUSED
        self.version = version
        self.weights_lost = False
        self.gauges = (0, 0)
        self.forward_sleep_seconds = options.forward_sleep_seconds
        self.waiting: deque[Sequence] = deque()
        self.batch = RunningBatch(
            model,
            max_prefill_tokens=options.max_prefill_tokens,
            scaled_logprobs=scaled_logprobs,
            seed=seed,
            shortest_prefix=shortest_prefix,
        )
        self._max_running = options.max_running_requests
        self._num_threads = options.num_threads
        self._lethal = options.lethal_traps
        self._on_death = on_death
        self._inbox: deque[Sequence | Callable[[], None]] = deque()
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._when_drained: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="embedded-scheduler", daemon=True)

    # -- called from any thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end, wait for at most `timeout` seconds, and return whether it has ended."""
        self._stop.set()
        self._post(lambda: None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, sequence: Sequence) -> None:
        """Queue a request."""
        self._post(sequence)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the scheduler's thread, after everything posted before and between two forward passes."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = function()
            except Fatal as error:
                if self._lethal:
                    raise
                future.set_exception(error)
            except BaseException as error:  # noqa: BLE001 - it belongs to who called, not to this thread
                future.set_exception(error)
            else:
                future.set_result(result)

        self._post(run)
        return future

    # -- called in the scheduler's thread, through `call` ------------------------------------------------------------

    def set_version(self, version: str) -> None:
        """Call the weights `version` from now on."""
        self.version = version
        for sequence in (*self.batch.sequences, *self.waiting):
            sequence.mark(version)

    def set_state(self, state: SchedulerState) -> None:
        """Pause or go on."""
        self.state = state
        if state is SchedulerState.PAUSED_ALL:
            self._drained()

    def retract(self) -> int:
        """Drop keys and values of every running request, and queue it to be computed again from all its tokens."""
        running = list(self.batch.sequences)
        for sequence in running:
            sequence.retractions += 1
        self.batch.remove(set(running))
        self.waiting.extendleft(reversed(running))
        self._drained()
        return len(running)

    def abort(self, matches: Callable[[Sequence], bool], finish: Finish) -> None:
        """End every matching request at once, running or waiting."""
        running = {sequence for sequence in self.batch.sequences if matches(sequence)}
        self.batch.remove(running)
        gone = [*running, *(sequence for sequence in self.waiting if matches(sequence))]
        self.waiting = deque(sequence for sequence in self.waiting if not matches(sequence))
        for sequence in gone:
            sequence.finish = finish
            sequence.notify(sequence)
        self._drained()

    def request_abort(self, matches: Callable[[Sequence], bool]) -> None:
        """End matching requests as SGLang does: waiting ones at once, running ones with their next token.

        While the engine is paused with requests in the batch, that token never comes.
        """
        for sequence in self.batch.sequences:
            sequence.abort_requested = sequence.abort_requested or matches(sequence)
        queued = {sequence for sequence in self.waiting if matches(sequence)}
        self.abort(queued.__contains__, Finish("abort", message="Abort in waiting queue"))

    def idle(self) -> bool:
        """Whether no request holds keys and values: nothing runs, and nothing waits that could run now."""
        return not self.batch and (not self.waiting or self.state is SchedulerState.PAUSED_ALL)

    def clear_prefixes(self) -> None:
        """Forget the keys and values of prompts; those of running requests stay."""
        self.batch.prefixes.clear()

    def when_drained(self, future: Future[None]) -> None:
        """Resolve `future` as soon as no request is running."""
        self._when_drained.append(future)
        self._drained()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _post(self, item: Sequence | Callable[[], None]) -> None:
        with self._news:
            self._inbox.append(item)
            self._news.notify()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while not self._stop.is_set():
                    self._take_inbox()
                    if self._has_work() and not self._stop.is_set():
                        self._step()
        except BaseException as error:  # noqa: BLE001 - nobody joins this thread for its result
            self._on_death(error)

    def _take_inbox(self) -> None:
        with self._news:
            while not self._inbox and not self._has_work() and not self._stop.is_set():
                self._news.wait()
        while self._inbox and not self._stop.is_set():
            item = self._inbox.popleft()
            if isinstance(item, Sequence):
                item.mark(self.version)
                self.waiting.append(item)
            else:
                item()

    def _has_work(self) -> bool:
        if self.state is SchedulerState.PAUSED_ALL:
            return False
        return bool(self.batch) or (bool(self.waiting) and self.state is SchedulerState.UNPAUSED)

    def _step(self) -> None:
        """One pass: prefill what may join, or else decode one token for all that run."""
        if self.weights_lost:
            self._lose_all()
            return
        admitted = self._admit()
        if admitted:
            self.batch.prefill(admitted)
        else:
            self.batch.decode()
        touched = admitted or self.batch.sequences
        heard = [sequence for sequence in touched if sequence.stream or sequence.finish]
        self.batch.remove({sequence for sequence in heard if sequence.finish})
        for sequence in heard:
            sequence.notify(sequence)
        # Running and waiting, as of the last pass: like the real servers' gauges, they stand still in a pause.
        self.gauges = (len(self.batch), len(self.waiting))
        self._drained()
        if self.forward_sleep_seconds:
            self._stop.wait(self.forward_sleep_seconds)

    def _admit(self) -> list[Sequence]:
        room = self._max_running - len(self.batch)
        if self.state is not SchedulerState.UNPAUSED or room <= 0:
            return []
        return [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]

    def _lose_all(self) -> None:
        """A forward pass over weights that are not there ends a real engine."""
        error = Fatal("a forward pass was asked for while the weights were being replaced")
        if self._lethal:
            raise error
        self.abort(lambda _: True, Finish("error", message=str(error)))

    def _drained(self) -> None:
        if self._when_drained and (not self.batch or self.state is SchedulerState.PAUSED_ALL):
            waiters, self._when_drained = self._when_drained, []
            for future in waiters:
                future.set_result(None)
