"""`RolloutExecutor`: keeps rollouts running as far as the staleness budget allows, and hands over what they bring."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio

from lifecycle.checks import whole
from lifecycle.errors import EndOfDataset, IllegalTransition, NoCapacity, NoSuchRollout
from lifecycle.gate import hopeless
from lifecycle.staleness import Unlimited
from lifecycle.states import State, Trigger

from .datasets import Batches, Recipe
from .jobs import Job
from .results import Results
from .values import Accept, Rollout, Workflow
from .works import Works

EVALUATIONS_AT_ONCE = 256
"""Where neither the caller nor the budget says how many."""


class RolloutExecutor(Works):
    """Run workflows as rollouts: each under a ticket that is settled exactly once, whatever becomes of its task.

    ```python
    async with RolloutExecutor(lifecycle, group_size=8) as executor:
        async for batch in executor.batches(prompts, workflow):
            train(batch)
            await lifecycle.publish(source, version=...)
    ```

    A workflow is `async def workflow(episode, data)`, or an ordinary function of the same arguments, which runs in a
    thread; `episode.generate(request)` generates. What it returns is the rollout's value; `None` means that there is
    nothing to train on. Taking a result counts as consuming it (`Lifecycle.consume`), and what has grown too old by
    then is treated as `StalenessBudget.on_stale` says.

    Leaving the block cancels what runs; tickets are returned, and whoever waits gets `ExecutorClosed`. A workflow in a
    thread cannot be cancelled: its ticket is held, and leaving waits, until it returns.

    Args:
        lifecycle: Attached before the executor is entered, and closed after it is left.
        group_size: Members of each rollout, int ≥ 1 (GRPO's n): the workflow runs once for each of them, on the same
            data, and they are admitted and settled as a unit.
        min_members: The fewest members with which a group is accepted; the others raised, took too long or returned
            `None`. int from 1 to `group_size`; `None`: 2, or 1 where `group_size` is 1.
        accept: Filter for values (for groups: the tuple of values), unless `submit()` or `batch()` names another.
        retries: How often a rollout that failed is run again, with a new ticket, before that is its result, int ≥ 0.
        timeout: Seconds that a member may take. `None`: no limit, so that one that hangs holds its capacity for ever.
        max_queued: Submissions that may wait for admission, int ≥ 1: with so many waiting `submit()` raises
            `NoCapacity`. `None`: no limit.
        max_consecutive_failures: Rollouts of one dataset that fail in a row before `batch()` raises `RolloutsFailing`,
            int ≥ 1.
        max_threads: Ordinary functions that run at once, int ≥ 1.

    Raises:
        ValueError: A number that makes no sense, or a group that is larger than the budget.
    """

    # -------------------------------------------------------------------------------------------------- begin and end

    async def __aenter__(self) -> Self:
        if self._entered is not None:
            raise RuntimeError("an executor is entered once")
        # Two task groups: closing cancels the inner one, and not whoever holds the executor.
        self._around = anyio.create_task_group()
        await self._around.__aenter__()
        try:
            await self._around.start(self._serve)
        except BaseException:
            await self._around.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shut()
        # Not told of what the block raised, which it would wrap in a group.
        await self._around.__aexit__(None, None, None)

    async def close(self) -> None:
        """Cancel what runs, return every ticket, and give whoever waits `ExecutorClosed`. Idempotent.

        Cancellation: everything is told to end, and does; only the waiting for it is cut short.
        """
        self._shut()
        if self._entered is not None:
            await self._over.wait()

    # ------------------------------------------------------------------------------------------------------ one by one

    def submit(
        self,
        workflow: Workflow,
        data: Any,
        *,
        accept: Accept | None = None,
        group_size: int | None = None,
        retries: int | None = None,
    ) -> int:
        """Queue a rollout, and start it as soon as the gate lets it through. Returns its id, an int > 0.

        `accept`, `group_size`, `retries`: for this rollout alone. `None`: the executor's.

        Raises `ExecutorClosed`, `LifecycleClosed`, `NoCapacity` where `max_queued` submissions wait already, and
        `ValueError` for a group that can never fit.
        """
        if self._max_queued is not None and len(self._dispatcher) >= self._max_queued:
            raise NoCapacity(f"{self._max_queued} submissions wait for admission already: {self._standing()}")
        job = self._job(workflow, data, self._results, accept=accept, group_size=group_size, retries=retries)
        self._submit(job)
        return job.id

    async def wait(self, count: int, timeout: float | None = None) -> list[Rollout]:
        """Wait for `count` results of `submit()`, and take the oldest by version at admission.

        Accepted rollouts and failed ones are results; a rollout that returned `None`, was filtered out or dropped for
        its age has none. Results come in every state, also while submission is closed. `timeout`: seconds; `None`: no
        limit.

        Raises `TimeoutError`, with nothing lost; `ValueError` for more than the budget can ever hold; `ExecutorClosed`,
        `LifecycleClosed` or `LifecycleFaulted` where waiting is in vain.

        Cancellation: nothing is taken.
        """
        whole("count", count, 1)
        self._refuse_what_never_fits(count, 1)
        return self._delivered(await self._taken(self._results, count, timeout))

    async def wait_for(self, rollout_id: int, timeout: float | None = None) -> Rollout:
        """Wait for the result of one `submit()`, whatever it is, and take it. `timeout`: seconds; `None`: no limit.

        Raises as `wait()`, and `NoSuchRollout` for an id that was never given out, whose result was taken, or that
        somebody else waits for.

        Cancellation: the result stays, for whoever waits next.
        """
        job = self._jobs.get(rollout_id)
        if job is None:
            self._results.refresh()  # a version may be published that nobody was told of yet
            result = self._told.pop(rollout_id, None) or self._results.pick(rollout_id)
            if result is None:
                raise NoSuchRollout(f"rollout {rollout_id} is not known, or its result was taken or dropped before")
            return self._delivered([result])[0]
        if job.results is not self._results:
            raise NoSuchRollout(f"somebody else waits for rollout {rollout_id}")
        with self._own_results() as own:
            job.results = own
            try:
                return self._delivered(await self._taken(own, 1, timeout))[0]
            finally:
                job.results = self._results
                for result in own.take_all():
                    self._file(self._results, result)

    # ----------------------------------------------------------------------------------------------------- many at once

    async def batch(
        self,
        dataset: Iterable[Any] | AsyncIterable[Any],
        workflow: Workflow,
        *,
        size: int | None = None,
        accept: Accept | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
    ) -> list[Rollout]:
        """Wait for a full batch of accepted rollouts, oldest first, and keep the fleet busy with the next ones.

        Items are drawn as rollouts are admitted, between two calls, too; the next call with the same `dataset` goes on
        with it. Several datasets share the budget by the sizes of their batches. What fails, returns `None`, is
        filtered out or dropped for its age is replaced by further items. An iterable is iterated on the event loop: let
        a slow one be asynchronous.

        `size`: results in a batch; `None`: as many groups as the budget's `batch_size` holds. `accept`, `group_size`:
        `None` for the executor's own. `timeout`: seconds; `None`: no limit.

        Raises `EndOfDataset` when the items left make no full batch; results that are left can be had with a smaller
        `size`. `RolloutsFailing` when `max_consecutive_failures` in a row have failed, or all of a dataset that has
        ended, and the next call tries again; `TimeoutError`, with nothing lost; what the dataset raised; `ValueError`
        for a batch that never fits, or a budget without bound; otherwise as `wait()`.

        Cancellation: nothing is taken; the dataset goes on.
        """
        if isinstance(self._budget, Unlimited):  # which would let the dataset run to its end
            raise ValueError("batch() needs a lifecycle with a StalenessBudget")  # noqa: TRY004 - of a right type
        group_size = self._group_size if group_size is None else whole("group_size", group_size, 1)
        size = self._batch_size(group_size) if size is None else whole("size", size, 1)
        self._refuse_what_never_fits(size, group_size)
        await self._refuse_when_closed()
        share = (self._budget.max_staleness + 1) * size
        stream = self._stream(dataset, Recipe(workflow, accept, group_size, share))
        try:
            self._refuse_in_vain(stream.results, size)
            return self._delivered(await self._in_time(stream.batch, size, timeout))
        except EndOfDataset as end:
            if not end.left:
                self.forget(dataset)
            raise

    def batches(
        self,
        dataset: Iterable[Any] | AsyncIterable[Any],
        workflow: Workflow,
        *,
        size: int | None = None,
        accept: Accept | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[list[Rollout]]:
        """Yield full batches until the dataset ends; a rest that makes none is dropped. Otherwise as `batch()`.

        Breaking out of the loop leaves the dataset as it is: go on with it, or `forget()` it. `timeout`: seconds for
        each batch.

        Cancellation: as `batch()`.
        """
        options: Any = {"size": size, "accept": accept, "group_size": group_size, "timeout": timeout}
        return Batches(partial(self.batch, dataset, workflow, **options), partial(self.forget, dataset))

    def forget(self, dataset: Any) -> None:
        """Draw no more from `dataset`; its rollouts that run, or were not taken, are dropped.

        Whoever waits for a batch of it gets `EndOfDataset`.
        """
        if (stream := self._streams.pop(id(dataset), None)) is not None:
            stream.stop()
            self._withdraw(stream.results)

    async def rollout(
        self,
        batch: Iterable[Any],
        workflow: Workflow,
        *,
        accept: Accept | None = None,
        group_size: int | None = None,
        timeout: float | None = None,
    ) -> list[Rollout]:
        """Run `workflow` for each item and return every result, in the order of the items: for synchronous training.

        Raises as `wait()`; `ValueError` for more items than the budget can hold at once.

        Cancellation: what was not finished is given up, and its tickets are returned.
        """
        await self._refuse_when_closed()
        items = list(batch)
        self._refuse_what_never_fits(len(items), self._group_size if group_size is None else group_size)
        with self._own_results() as own:
            jobs = [self._job(workflow, item, own, accept=accept, group_size=group_size) for item in items]
            for job in jobs:
                self._submit(job)
            results = await self._taken(own, len(jobs), timeout) if jobs else []
            return self._delivered(sorted(results, key=lambda result: result.id))

    async def evaluate(
        self,
        dataset: Iterable[Any],
        workflow: Workflow,
        *,
        concurrency: int | None = None,
        timeout: float | None = None,
    ) -> list[Rollout]:
        """Run `workflow` for each item outside the budget, with no publication in between; return results in order.

        Filters, groups and retries are for training: here they do not apply. Works in RUNNING and SUSPENDED. Operations
        of the lifecycle wait until it is over. `concurrency`: rollouts at once; `None`: the budget's `max_concurrent`,
        or `EVALUATIONS_AT_ONCE`. `timeout`: seconds for all.

        Raises `TimeoutError`, `ExecutorClosed`, `LifecycleClosed` or `LifecycleFaulted`, and `IllegalTransition` in any
        other state, since none can be left meanwhile.

        Cancellation: rollouts that run are given up.
        """
        await self._refuse_when_closed()
        if concurrency is None:
            concurrency = self._budget.max_concurrent or EVALUATIONS_AT_ONCE
        whole("concurrency", concurrency, 1)
        with self._own_results() as own:
            items = list(dataset)
            async with self._lifecycle.undisturbed():
                await self._refuse_when_closed()
                self._refuse_where_nothing_is_evaluated()
                jobs = [self._evaluation_of(workflow, item, own) for item in items]
                with anyio.move_on_after(timeout) as scope:
                    await self._evaluations.run(jobs, concurrency)
                if scope.cancelled_caught:
                    raise TimeoutError(f"{len(own)} of {len(jobs)} evaluations ended within {timeout:g} s")
                await self._refuse_when_closed()
            return sorted(own.take_all(), key=lambda result: result.id)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _evaluation_of(self, workflow: Workflow, item: Any, results: Results) -> Job:
        job = self._job(workflow, item, results, group_size=1, retries=0)
        job.accept = None
        self._jobs[job.id] = job
        return job

    def _refuse_what_never_fits(self, count: int, group_size: int) -> None:
        self._lifecycle.gate.refuse_what_never_fits(group_size)
        if count * group_size > (bound := self._budget.max_unconsumed):
            raise ValueError(
                f"{count} results of {group_size} rollouts never fit: the budget holds {bound} that are not consumed, "
                "(max_staleness + 1) * batch_size"
            )

    def _refuse_where_nothing_is_evaluated(self) -> None:
        state = self._lifecycle.state
        if (error := hopeless(state)) is not None:
            raise error
        if state not in {State.RUNNING, State.SUSPENDED}:
            raise IllegalTransition(
                Trigger.ADMIT, state, [trigger for trigger in Trigger if self._lifecycle.can(trigger)]
            )

    def _batch_size(self, group_size: int) -> int:
        if (size := self._budget.batch_size // group_size) < 1:
            raise ValueError(f"a batch of {self._budget.batch_size} rollouts has no place for a group of {group_size}")
        return size
