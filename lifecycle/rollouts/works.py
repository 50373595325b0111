"""What an executor is made of, and what goes on inside while its callers wait."""

import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint_if_cancelled

from lifecycle.checks import whole
from lifecycle.controller import Lifecycle
from lifecycle.errors import ExecutorClosed, LifecycleClosed
from lifecycle.gate import hopeless
from lifecycle.shielding import to_the_end
from lifecycle.states import OnStale, State
from lifecycle.ticket import Ticket

from .attempts import Attempts
from .crew import Crew
from .datasets import Recipe, Stream
from .dispatch import Dispatcher
from .evaluations import Evaluations
from .jobs import Attempt, Job
from .results import Results
from .running import cancelled_alone, is_async
from .values import Accept, Rollout, RolloutStatus, Workflow

_log = logging.getLogger("lifecycle")

_ENTER_FIRST = "enter the executor first: async with RolloutExecutor(...) as executor"
_REMEMBERED = 1_000
"""Rollouts without a result for training, whose fate `wait_for()` can still tell."""


class Works:
    """The parts of an executor. `RolloutExecutor` adds what can be done with it."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        *,
        group_size: int = 1,
        min_members: int | None = None,
        accept: Accept | None = None,
        retries: int = 0,
        timeout: float | None = None,
        max_queued: int | None = None,
        max_consecutive_failures: int = 16,
        max_threads: int = 40,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be None or more than 0 seconds, got {timeout!r}")
        lifecycle.gate.refuse_what_never_fits(group_size)
        self._lifecycle = lifecycle
        self._budget = lifecycle.budget
        self._group_size = group_size
        self._accept = accept
        self._retries = whole("retries", retries, 0)
        self._max_queued = None if max_queued is None else whole("max_queued", max_queued, 1)
        self._most_failures = whole("max_consecutive_failures", max_consecutive_failures, 1)
        self._attempts = Attempts(
            lifecycle,
            self._ended,
            self._interrupted,
            timeout=timeout,
            min_members=None if min_members is None else whole("min_members", min_members, 1, group_size),
            threads=whole("max_threads", max_threads, 1),
        )
        self._dispatcher = Dispatcher(lifecycle.gate, self._start)
        self._results = Results(self._budget, self._drop, self._finished_beside)
        self._jobs: dict[int, Job] = {}
        """Submissions without a result yet."""
        self._told: OrderedDict[int, Rollout] = OrderedDict()
        """Results that nobody trains on, for who asks by id; the oldest are forgotten."""
        self._streams: dict[int, Stream] = {}
        self._boxes: set[Results] = {self._results}
        self._evaluations = Evaluations(lifecycle.gate, self._attempts)
        self._ids = itertools.count(1)
        self.outcomes: Counter[RolloutStatus] = Counter()
        """What became of rollouts so far. Accepted ones that were dropped for their age count twice."""
        self._told_stuck = False
        self._entered: Crew | None = None
        self._closed = False
        self._over = anyio.Event()

    @property
    def queued(self) -> int:
        """Submissions that wait for admission."""
        return len(self._dispatcher)

    @property
    def running(self) -> int:
        """Rollouts that run; a group counts once."""
        return len(self._attempts)

    @property
    def finished(self) -> int:
        """Results that `wait()` could take."""
        return len(self._results)

    # ---------------------------------------------------------------------------------------------------------- inside

    @property
    def _crew(self) -> Crew:
        if self._entered is None:
            raise RuntimeError(_ENTER_FIRST)
        return self._entered

    async def _serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the tasks that run workflows, until the executor is shut.

        Cancellation: every ticket is returned. asyncio's own, of this task alone, closes the executor.
        """
        unwatch = self._lifecycle.gate.watch(self._changed)
        try:
            async with anyio.create_task_group() as tasks:
                self._entered = Crew(tasks, self._attempts.run)
                task_status.started()
                await anyio.sleep_forever()
        except BaseException as error:
            if not cancelled_alone(error):
                raise
        finally:
            unwatch()
            self._shut()
            await to_the_end(self._evaluations.over)
            self._attempts.give_up()
            for results in self._boxes:
                results.close()
            self._over.set()

    def _shut(self) -> None:
        """Start nothing more, and let everything end. Synchronous."""
        if self._closed:
            return
        self._closed = True
        for job in self._dispatcher.close():
            del self._jobs[job.id]
        for results in self._boxes:
            results.refuse(ExecutorClosed("the executor was closed"))
        self._evaluations.cancel()
        if self._entered is not None:
            self._entered.cancel()

    def _interrupted(self, error: BaseException) -> None:
        """Start nothing more where everything is cancelled, and not one task alone."""
        if not cancelled_alone(error):
            self._shut()

    def _job(
        self,
        workflow: Workflow,
        data: Any,
        results: Results,
        *,
        accept: Accept | None = None,
        group_size: int | None = None,
        retries: int | None = None,
    ) -> Job:
        if not callable(workflow):
            raise TypeError(f"a workflow is a function of (episode, data), got {workflow!r}")
        group_size = self._group_size if group_size is None else group_size
        if group_size is not self._group_size:
            self._lifecycle.gate.refuse_what_never_fits(group_size)
        return Job(
            id=next(self._ids),
            workflow=workflow,
            threaded=not is_async(workflow),
            data=data,
            accept=self._accept if accept is None else accept,
            group_size=group_size,
            retries=self._retries if retries is None else whole("retries", retries, 0),
            results=results,
            context=copy_context(),
            revocable=results is not self._results,
        )

    def _submit(self, job: Job) -> None:
        self._lifecycle.refuse_elsewhere()
        self._refuse_closed()
        if isinstance(error := hopeless(self._lifecycle.state), LifecycleClosed):
            raise error
        self._jobs[job.id] = job
        self._dispatcher.add(job)
        self._warn_where_stuck()

    def _start(self, job: Job, ticket: Ticket) -> None:
        """Run an admitted job. Called where room appears, be it in the midst of a publication."""
        self._told_stuck = False
        if job.stream is not None:
            job.stream.admitted()
        for member in self._attempts.begin(job, ticket):
            self._crew.hand_over(member)

    def _ended(self, attempt: Attempt, status: RolloutStatus) -> None:
        """Repeat a job whose attempt has ended, or file its result."""
        job = attempt.job
        if status is RolloutStatus.FAILED and job.retries and not (self._closed or job.results.closed):
            job.retries -= 1
            if job.stream is not None:
                job.stream.queued_again()
            self._dispatcher.add_first(job)
            return
        del self._jobs[job.id]
        self.outcomes[status] += 1
        result = attempt.result(status)
        if job.stream is not None:
            job.stream.ended(result)
        else:
            self._file(job.results, result)
        if self._budget.on_stale is OnStale.WAIT:
            self._refresh()
        self._warn_where_stuck()

    def _file(self, results: Results, result: Rollout) -> None:
        if (
            results is not self._results
            or result.status is RolloutStatus.ACCEPTED
            or result.status is RolloutStatus.FAILED
        ):
            results.put(result)
            return
        self._told[result.id] = result
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)

    def _delivered(self, results: list[Rollout]) -> list[Rollout]:
        """Consume accepted results: training takes them now."""
        accepted = [result for result in results if result.accepted]
        self._leave_buffer(accepted, self._lifecycle.consume)
        return results

    def _drop(self, results: Results, stale: list[Rollout]) -> None:
        """Discard accepted results that are too old, or that nobody will take; their capacity is free at once."""
        self._leave_buffer(stale, self._lifecycle.discard)
        for result in stale:
            result.status = RolloutStatus.STALE
            if not results.closed:
                self.outcomes[RolloutStatus.STALE] += 1
            if results is self._results:
                self._file(results, result)
            elif results.keeps_all and not results.closed:
                results.put(result)

    def _finished_beside(self, results: Results) -> Iterator[Ticket]:
        """Yield the tickets of accepted rollouts that training may still take from elsewhere."""
        for others in self._boxes - {results}:
            yield from others.tickets()

    @staticmethod
    def _leave_buffer(results: list[Rollout], record: Callable[[list[Ticket]], tuple[int, ...]]) -> None:
        # A workflow that settles its own ticket may have recorded its end, too.
        left = [result for result in results if not result.ticket.left_buffer]
        for result, versions in zip(left, record([result.ticket for result in left]), strict=True):
            result.staleness = versions

    async def _refuse_when_closed(self) -> None:
        """Raise `ExecutorClosed`; but the cancellation where that is why the executor was closed.

        Cancellation: nothing is changed.
        """
        if self._closed:
            await checkpoint_if_cancelled()
        self._refuse_closed()

    async def _taken(self, results: Results, count: int, timeout: float | None) -> list[Rollout]:
        await self._refuse_when_closed()
        self._refuse_in_vain(results, count)
        return await self._in_time(results.take, count, timeout)

    async def _in_time(
        self, take: Callable[[int], Awaitable[list[Rollout]]], count: int, timeout: float | None
    ) -> list[Rollout]:
        with anyio.move_on_after(timeout):
            return await take(count)
        raise TimeoutError(f"{count} results were not there within {timeout:g} s: {self._standing()}")

    def _stream(self, dataset: Any, recipe: Recipe) -> Stream:
        """Return the stream of `dataset`, begun before or now. It holds the dataset, so that no other has its id."""
        if (stream := self._streams.get(id(dataset))) is None:
            results = Results(self._budget, self._drop, self._finished_beside)
            self._boxes.add(results)
            stream = self._streams[id(dataset)] = Stream(
                dataset, results, recipe, budget=self._budget, submit=self._draw, most=self._most_failures
            )
            self._crew.also(stream.feed)
        stream.follow(recipe)
        return stream

    def _draw(self, stream: Stream, item: Any) -> None:
        recipe = stream.recipe
        job = self._job(recipe.workflow, item, stream.results, accept=recipe.accept, group_size=recipe.group_size)
        job.stream = stream
        self._submit(job)

    @contextmanager
    def _own_results(self) -> Iterator[Results]:
        """Give a place for results that one caller alone waits for; what is not taken by the end is dropped."""
        own = Results(self._budget, self._drop, self._finished_beside, keeps_all=True)
        self._boxes.add(own)
        try:
            yield own
        finally:
            self._withdraw(own)

    def _withdraw(self, results: Results) -> None:
        # What waits goes first: dropping results makes room, which it would take.
        for job in self._dispatcher.withdraw(results):
            del self._jobs[job.id]
        results.close()
        self._boxes.discard(results)
        self._attempts.revoke(results)

    def _changed(self) -> None:
        """Look at everything anew: a state, a version or the capacity has changed."""
        if self._attempts.settling:  # `_ended` looks, once the result is there
            return
        if (error := hopeless(self._lifecycle.state)) is not None:
            for results in list(self._boxes):
                results.refuse(error)
        else:
            self._refresh()

    def _refresh(self) -> None:
        for results in list(self._boxes):
            results.refresh()
        for stream in list(self._streams.values()):
            stream.look()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ExecutorClosed("the executor is closed")
        if self._entered is None:
            raise RuntimeError(_ENTER_FIRST)

    def _refuse_in_vain(self, results: Results, count: int) -> None:
        if len(results) < count and (error := hopeless(self._lifecycle.state)) is not None:
            raise error

    def _warn_where_stuck(self) -> None:
        """Say once what only a publication, or somebody who takes results, can change."""
        if self._attempts or not self._dispatcher or self._budget.running or self._told_stuck:
            return
        waited = [results for results in self._boxes if results.waited]
        if not waited or self._lifecycle.state is not State.RUNNING or self._budget.capacity() >= self._dispatcher.size:
            return
        self._told_stuck = True
        beside = sum(len(results) for results in self._boxes if not results.waited)
        _log.warning(
            "an executor waits, nothing runs, and the budget of %d rollouts is used up at version %d: what was taken "
            "counts until the next publication%s",
            self._budget.max_unconsumed,
            self._budget.version,
            f"; {beside} results of other datasets or submissions wait to be taken: forget() the dataset if nobody will"
            if beside
            else "",
        )

    def _standing(self) -> str:
        """Say how things stand, for errors."""
        lifecycle, budget = self._lifecycle, self._budget
        return (
            f"{len(self._results)} finished, {self.running} running and {self.queued} queued; "
            f"{lifecycle.state.name}, staleness capacity {budget.capacity()} at version {budget.version}"
        )
