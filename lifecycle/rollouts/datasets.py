"""A dataset on its way through an executor: drawn from as rollouts are admitted, and handed over in batches."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from attrs import frozen

from lifecycle.errors import EndOfDataset, LifecycleError, RolloutsFailing
from lifecycle.shielding import genuine
from lifecycle.staleness import StalenessBudget

from .results import Results
from .running import cancelled_alone
from .values import Accept, Rollout, RolloutStatus, Workflow

_log = logging.getLogger("lifecycle")

_ROWS_TOLD = frozenset({100, 1_000, 10_000, 100_000})


@frozen
class Recipe:
    """What is made of a dataset's items."""

    workflow: Workflow
    accept: Accept | None
    group_size: int
    share: int
    """Results of it that the budget is to hold at once, taken ones included until the next version: more would keep
    other datasets out."""


class Stream:
    """One dataset: a task draws its items one ahead of the gate, so that as many rollouts run as the budget allows."""

    def __init__(
        self,
        dataset: Any,
        results: Results,
        recipe: Recipe,
        *,
        budget: StalenessBudget,
        submit: Callable[["Stream", Any], None],
        most: int,
    ) -> None:
        self.dataset = dataset
        self.results = results
        self.recipe = recipe
        self._budget = budget
        self._submit = submit
        self._most = most
        """Failures in a row after which drawing stops."""
        self._queued = 0
        self._outstanding = 0
        self._wanted = 0
        """Callers who wait for a batch."""
        self._taken = 0
        """Results that were taken since `_version` was published."""
        self._version = budget.version
        self._failures: list[BaseException] = []
        """What failed since the last rollout that did not."""
        self._ends: Counter[RolloutStatus] = Counter()
        self._in_vain = 0
        """Rollouts in a row that brought nothing to train on."""
        self._room = anyio.Event()
        self._exhausted = False
        self._stopped = False
        self._error: BaseException | None = None
        self._scope = anyio.CancelScope()

    async def feed(self) -> None:
        """Draw items until the dataset ends.

        Cancellation: every item that was drawn has been submitted.
        """
        with self._scope:
            try:
                draw = _drawing(self.dataset)
                while True:
                    await self._until_room()
                    item = await draw()
                    if item is _END:
                        break
                    self._hand_over(item)
            except BaseException as error:
                # Of the user's dataset: raised where a batch is awaited.
                if isinstance(error, genuine()) and not cancelled_alone(error):
                    raise
                self._error = error
        self._exhausted = True
        self.look()

    def follow(self, recipe: Recipe) -> None:
        """Make this of the items that are drawn from now on."""
        self.recipe = recipe
        self._room.set()

    def admitted(self) -> None:
        """Take note that one of its jobs has left the queue."""
        self._queued -= 1
        self._room.set()

    def queued_again(self) -> None:
        """Take note that one of its jobs waits once more, to be repeated."""
        self._queued += 1

    def ended(self, result: Rollout) -> None:
        """Take note of what became of a job, and keep what training can use."""
        self._outstanding -= 1
        self._ends[result.status] += 1
        if result.status is RolloutStatus.FAILED:
            self._failures.extend(result.errors[:1])
        else:
            self._failures.clear()
        if result.accepted:
            self._in_vain = 0
            self.results.put(result)
        else:
            self._in_vain += 1
            self._warn(result)
        self.look()

    def _warn(self, result: Rollout) -> None:
        """Say what would otherwise be seen by nobody: the first failure of a row, and a long row of rejections."""
        if self._stopped or isinstance(result.error, genuine()):
            return  # the dataset was forgotten, or the executor is being closed
        if len(self._failures) == 1:
            _log.warning("rollout %d of a dataset failed (%s)", result.id, type(self._failures[0]).__name__)
        elif self._in_vain in _ROWS_TOLD:
            _log.warning("%d rollouts of a dataset in a row brought nothing to train on", self._in_vain)

    async def batch(self, size: int) -> list[Rollout]:
        """Wait for `size` results. Raises `EndOfDataset`, `RolloutsFailing`, or what the dataset raised.

        Cancellation: nothing is taken.
        """
        self._wanted += 1
        self._room.set()
        try:
            while True:
                self._refuse_in_vain(size)
                with suppress(_LookAgain):
                    batch = await self.results.take(size)
                    self._unconsumed()
                    self._taken += len(batch)
                    return batch
        finally:
            self._wanted -= 1

    def _hand_over(self, item: Any) -> None:
        self._queued += 1
        self._outstanding += 1
        try:
            self._submit(self, item)
        except BaseException:
            self._queued -= 1
            self._outstanding -= 1
            raise

    def look(self) -> None:
        """Wake who waits for a batch that may never come, and draw where results were dropped."""
        self._room.set()
        if self._fails or (self._exhausted and not self._outstanding):
            self.results.refuse(_LookAgain())

    def stop(self) -> None:
        """Draw nothing more, and tell whoever waits for a batch that none will come."""
        self._stopped = True
        self._scope.cancel()
        self.results.refuse(_LookAgain())

    @property
    def _fails(self) -> bool:
        return len(self._failures) >= self._most

    def _refuse_in_vain(self, size: int) -> None:
        if self._stopped:
            raise EndOfDataset(size, 0)
        if len(self.results) >= size:
            return
        if self._fails:
            failures, self._failures = self._failures, []
            self._room.set()
            raise RolloutsFailing(failures) from failures[-1]
        if self._exhausted and not self._outstanding:
            if (error := self._error) is not None:
                self._error = None
                if isinstance(error, genuine()):  # which the caller would take for its own cancellation
                    raise RuntimeError("drawing from the dataset was cancelled") from error
                raise error
            raise self._end(size)

    def _end(self, size: int) -> LifecycleError:
        ends, last = self._ends, self._failures[-1] if self._failures else None
        error: LifecycleError
        if last is not None and not ends[RolloutStatus.ACCEPTED]:
            error = RolloutsFailing(self._failures)
        else:
            error = EndOfDataset(size, len(self.results), ends[RolloutStatus.FAILED], ends[RolloutStatus.REJECTED])
        error.__cause__ = last
        return error

    async def _until_room(self) -> None:
        await checkpoint()
        while self._queued or self._fails or self._unconsumed() >= self.recipe.share:
            self._room = anyio.Event()
            await self._room.wait()

    def _unconsumed(self) -> int:
        """Return how many of its results count against its share; those that were taken do unless more are wanted."""
        if self._version != self._budget.version:
            self._version, self._taken = self._budget.version, 0
        here = self._outstanding + len(self.results) + self.results.reserved
        return here if self._wanted else here + self._taken


class Batches(AsyncIterator[list[Rollout]]):
    """Full batches of a dataset, until it ends. No generator: that would have to be closed when it is left early."""

    def __init__(self, batch: Callable[[], Awaitable[list[Rollout]]], forget: Callable[[], None]) -> None:
        self._batch = batch
        self._forget = forget

    async def __anext__(self) -> list[Rollout]:
        """Wait for the next batch.

        Cancellation: nothing is taken.
        """
        try:
            return await self._batch()
        except EndOfDataset as end:
            self._forget()
            if end.failed:
                _log.warning("%s", end)
            raise StopAsyncIteration from None


class _LookAgain(LifecycleError):
    """Something has changed for those who wait for a batch."""


_END = object()


def _drawing(dataset: Any) -> Callable[[], Awaitable[Any]]:
    """Return what draws the next item of an iterable or an asynchronous iterable; `_END` after the last."""
    if hasattr(dataset, "__aiter__"):
        asynchronous = aiter(dataset)
        return lambda: anext(asynchronous, _END)
    items = iter(dataset)

    async def draw() -> Any:
        return next(items, _END)

    return draw
