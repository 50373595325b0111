"""The baseline: a rollout executor as frameworks write it by hand.

The shape is a common one: a thread of its own runs an event loop. Its loop asks for the capacity, takes so many
submissions out of an input queue, makes a task of each, waits for the first of them to finish with `asyncio.wait` for a
polling interval, and puts what has finished into an output queue. The trainer's `wait()` drains that queue, and sleeps
for a second between two looks. Counters stand behind a lock; a publication sets the version behind another, and the
loop learns of it the next time it looks.

It is meant to be good of its kind: it waits only where there is nothing to do, and not after each turn, which would
limit it to `max_concurrent` rollouts an interval. It stands for executors that poll, and for no particular one: those
that wait on condition variables do not pay these intervals.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from attrs import define, field

Workflow = Callable[[Any], Awaitable[Any]]

POLL_RUNNING = 0.05
"""Seconds that the loop waits for a task to finish before it looks at everything anew."""
POLL_RESULTS = 1.0
"""Seconds between two looks of `wait()` at the results."""


@define
class Counters:
    """How many rollouts there are, for the capacity formula. Thread-safe."""

    batch_size: int
    max_staleness: int
    max_concurrent: int
    accepted: int = 0
    running: int = 0
    rejected: int = 0
    _lock: threading.Lock = field(factory=threading.Lock)

    def capacity(self, version: int) -> int:
        """Return how many rollouts may start."""
        with self._lock:
            free = self.max_concurrent - self.running
            ahead = (self.max_staleness + version + 1) * self.batch_size - (self.accepted + self.running)
            return min(free, ahead)

    def started(self) -> None:
        """Count one that starts."""
        with self._lock:
            self.running += 1

    def ended(self, *, accepted: bool) -> None:
        """Count one that has ended."""
        with self._lock:
            self.running -= 1
            if accepted:
                self.accepted += 1
            else:
                self.rejected += 1


class HandWrittenExecutor:
    """Runs workflows in an event loop of its own. Used from the trainer's thread."""

    def __init__(self, *, batch_size: int, max_staleness: int, max_concurrent: int) -> None:
        self.counters = Counters(batch_size, max_staleness, max_concurrent)
        self.handed_over_at = 0.0
        """When it put a result into the output queue for the last time: `time.perf_counter()`."""
        self._version = 0
        self._version_lock = threading.Lock()
        self._input: queue.Queue[tuple[Workflow, Any]] = queue.Queue()
        self._output: queue.Queue[Any] = queue.Queue()
        self._results: list[Any] = []
        self._exiting = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._exiting.set()
        self._thread.join()

    def set_version(self, version: int) -> None:
        """Publish."""
        with self._version_lock:
            self._version = version

    def submit(self, workflow: Workflow, data: Any) -> None:
        """Queue a rollout."""
        self._input.put_nowait((workflow, data))

    def wait(self, count: int) -> list[Any]:
        """Block until there are `count` results, and take them."""
        while True:
            self._drain()
            if len(self._results) >= count:
                taken, self._results = self._results[:count], self._results[count:]
                return taken
            time.sleep(POLL_RESULTS)

    def _drain(self) -> None:
        while True:
            try:
                self._results.append(self._output.get_nowait())
            except queue.Empty:
                return

    async def _serve(self) -> None:
        """Start, await and hand over rollouts, until told to exit.

        Cancellation: tasks that run are cancelled by `asyncio.run`.
        """
        tasks: set[asyncio.Task[Any]] = set()
        while not self._exiting.is_set():
            self._start_what_may(tasks)
            if not tasks:
                await asyncio.sleep(POLL_RUNNING)
                continue
            done, tasks = await asyncio.wait(tasks, timeout=POLL_RUNNING, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                value = None if task.cancelled() or task.exception() else task.result()
                self.counters.ended(accepted=value is not None)
                if value is not None:
                    self._output.put_nowait(value)
            self.handed_over_at = time.perf_counter()

    def _start_what_may(self, tasks: set[asyncio.Task[Any]]) -> None:
        with self._version_lock:
            version = self._version
        capacity = self.counters.capacity(version)
        while capacity > 0 and not self._input.empty():
            workflow, data = self._input.get_nowait()
            tasks.add(asyncio.create_task(self._run(workflow, data)))
            self.counters.started()
            capacity -= 1

    async def _run(self, workflow: Workflow, data: Any) -> Any:
        """Run one.

        Cancellation: passed on.
        """
        return await workflow(data)
