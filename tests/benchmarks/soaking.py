"""A trainer, its rollouts and everything that goes wrong with them, for a soak. On asyncio."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.lowlevel import checkpoint

from lifecycle import (
    Deadlines,
    Lifecycle,
    MeasuredFrom,
    OnStale,
    PauseMode,
    RolloutExecutor,
    StalenessBudget,
    State,
    Trigger,
    errors,
)
from lifecycle.testing import ScriptedEngine, ScriptedTransfer
from lifecycle.trace import verify_file

from .faults import Filters, Workflows, let_an_engine_fail

_DEADLINES = Deadlines(
    attach=60.0,
    probe=0.05,
    drain=0.5,
    abort=0.05,
    pause=0.05,
    resume=0.05,
    begin=0.05,
    transfer=0.05,
    finish=0.05,
    verify=0.05,
    flush=0.05,
    label=0.05,
    canary=0.05,
    abandon=0.05,
    grace=0.05,
)
_BATCH = 256
_QUEUED = 1_000
_PATIENCE = 500
"""Steps after which something ought to have happened."""
_HUNG = 600.0
"""Seconds after which a step that should have ended counts as hung."""


class _Source:
    """Weights that `ScriptedTransfer` does not look at."""

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from ()


class Soak:
    """A lifecycle over two engines, an executor, a trainer, and dice."""

    def __init__(self, dice: random.Random, *, journal: Path | None = None) -> None:
        self.tally: Counter[str] = Counter()
        """What happened, how often."""
        self.budget = StalenessBudget(
            batch_size=_BATCH,
            max_staleness=dice.randrange(4),
            max_concurrent=dice.choice((None, 100, 512)),
            on_stale=dice.choice(list(OnStale)),
            measured_from=dice.choice(list(MeasuredFrom)),
        )
        self.engines = [ScriptedEngine("E1"), ScriptedEngine("E2")]
        self.transfer = ScriptedTransfer(buckets=2)
        self._journal = journal
        self.lifecycle = Lifecycle(
            self.engines, transfer=self.transfer, budget=self.budget, deadlines=_DEADLINES, journal=journal
        )
        self.executor = RolloutExecutor(
            self.lifecycle,
            accept=Filters(dice).one,
            retries=1,
            timeout=0.05,
            max_queued=_QUEUED,
            max_consecutive_failures=1_000,
        )
        self.budget.consume(0)  # so that every version counts what was consumed, the first included
        self._dice = dice
        self._workflows = Workflows(dice)
        self._numbers = iter(range(1 << 60))
        self._stack = AsyncExitStack()
        self._ids: list[int] = []
        self._wrong: list[str] = []
        self._dataset = self._items()
        self._tasks_before: set[asyncio.Task[Any]] = set()
        self._interrupters = 0
        self._cancels: set[Callable[[], object]] = set()
        """What cancels those who wait now."""
        self._by_itself = anyio.Event()
        """Set when nobody is there any more whom others interrupt."""

    async def __aenter__(self) -> Self:
        self._tasks_before = asyncio.all_tasks()
        await self._stack.enter_async_context(self.lifecycle)
        await self._stack.enter_async_context(self.executor)
        self._stack.callback(self.lifecycle.gate.watch(self._cancel_some))
        self.tasks = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # ended in the midst of work
            for _ in range(10):
                self._submit_some()
            await checkpoint()
            if self._dice.random() < 0.3:  # before the executor is left
                await self.lifecycle.close()
        self.tasks.cancel_scope.cancel()
        await self._stack.__aexit__(kind, error, trace)
        for _ in range(5):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - self._tasks_before
        self._wrong += [f"a task is left: {task.get_name()}" for task in left]

    def _items(self) -> Iterator[int]:
        while True:
            yield next(self._numbers)

    async def until(self, rollouts: int) -> None:
        """Train until so many rollouts were admitted, and then let everything end.

        Cancellation: whatever runs is left to the executor.
        """
        idle = 0
        while self.budget.submitted < rollouts:
            before = self.budget.submitted
            with anyio.fail_after(_HUNG):
                await self._step()
            idle = 0 if self.budget.submitted > before else idle + 1
            if idle > _PATIENCE:
                raise RuntimeError(f"nothing is admitted any more: {self._standing()}")
        with anyio.fail_after(_HUNG):
            await self._quiet()
        self._wrong += self._out_of_balance()

    # ----------------------------------------------------------------------------------------------------- the trainer

    async def _step(self) -> None:
        """Take one training step.

        Cancellation: passed on.
        """
        self._submit_some()
        for _ in range(self._dice.randrange(8)):
            if not self._interrupters:
                self._by_itself = anyio.Event()
            self._interrupters += 1
            self.tasks.start_soon(self._interrupted)
        await self._dice.choices(
            (self._wait, self._batch, self._wait_for, self._rollout, self._evaluate), (8, 8, 2, 1, 0.3)
        )[0]()
        await self._cure()
        if self._dice.random() < 0.7:
            await self._publish()

    def _submit_some(self) -> None:
        with suppress(errors.NoCapacity):
            for _ in range(self._dice.randrange(200)):
                blocking = self._dice.random() < 0.002
                workflow = self._workflows.blocking if blocking else self._workflows.one
                size = self._dice.choice((1, 1, 1, 4))
                self._ids.append(self.executor.submit(workflow, next(self._numbers), group_size=size))

    async def _wait(self) -> None:
        await self._take("waits", lambda: self.executor.wait(self._dice.randrange(1, 100), 0.2))

    async def _batch(self) -> None:
        size = self._dice.randrange(1, 33)

        async def batch() -> Any:
            with anyio.fail_after(0.2):
                return await self.executor.batch(self._dataset, self._workflows.one, size=size, group_size=4)

        await self._take("batches", batch)

    async def _wait_for(self) -> None:
        ids, self._ids = self._ids[-200:], []
        for number in self._dice.sample(ids, min(3, len(ids))):
            await self._take("results by id", partial(self.executor.wait_for, number, 0.1))

    async def _rollout(self) -> None:
        await self._take(
            "synchronous batches",
            lambda: self.executor.rollout(range(20), self._workflows.one, group_size=2, timeout=0.2),
        )

    async def _evaluate(self) -> None:
        await self._take(
            "evaluations", lambda: self.executor.evaluate(range(20), self._workflows.one, concurrency=8, timeout=0.5)
        )

    async def _take(self, what: str, step: Callable[[], Any]) -> None:
        try:
            await step()
            self.tally[what] += 1
        except (TimeoutError, errors.NoSuchRollout, errors.RolloutsFailing, errors.LifecycleFaulted) as error:
            self.tally[type(error).__name__] += 1

    async def _interrupted(self) -> None:
        """Wait for something, and be cancelled meanwhile in one way or the other."""
        step = self._dice.choice((self._admit, self._wait, self._wait_for, self._batch, self._rollout))
        if self._dice.random() < 0.5:
            with anyio.CancelScope() as scope:
                await self._exposed(step, scope.cancel)
        else:
            task = asyncio.current_task()
            assert task is not None
            try:
                await self._exposed(step, task.cancel)
                if task.cancelling():  # after its last moment to be noticed
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                if self.tasks.cancel_scope.cancel_called:
                    raise
                task.uncancel()
        self._interrupters -= 1
        if not self._interrupters:
            self._by_itself.set()
        self.tally["interruptions"] += 1

    async def _exposed(self, step: Callable[[], Awaitable[None]], cancel: Callable[[], object]) -> None:
        """Do `step` while others may cancel it: some time later, or just as it is let through.

        Cancellation: passed on.
        """
        timer = asyncio.get_running_loop().call_later(self._dice.random() * 0.01, self._cancel, cancel)
        self._cancels.add(cancel)
        try:
            await step()
        finally:
            self._cancels.discard(cancel)
            timer.cancel()

    def _cancel(self, cancel: Callable[[], object]) -> None:
        if cancel in self._cancels:  # once, and not while it cleans up
            self._cancels.discard(cancel)
            cancel()

    def _cancel_some(self) -> None:
        """Cancel some of those who wait. Called when the gate has let through whoever can go, and before they run."""
        for cancel in list(self._cancels):
            if self._dice.random() < 0.3:
                self._cancel(cancel)

    async def _admit(self) -> None:
        try:
            async with self.lifecycle.admit(group_size=self._dice.choice((1, 3))) as ticket:
                await checkpoint()
                if self._dice.random() < 0.5:
                    ticket.accept()
                    self.lifecycle.consume([ticket])
        except errors.LifecycleFaulted:
            self.tally["LifecycleFaulted"] += 1

    # ------------------------------------------------------------------------------------------------ publications

    async def _publish(self) -> None:
        """Publish, often with an accident, and see to it that the fleet is whole afterwards."""
        for engine in self.engines:
            engine.land()
        if self._dice.random() < 0.25:
            let_an_engine_fail(self.engines, self._dice)
            self.tally["accidents"] += 1
        await self._attempt(self._dice.choice(list(PauseMode)))
        await self._cure()

    async def _attempt(self, mode: PauseMode) -> None:
        try:
            await self.lifecycle.publish(_Source(), version=self.budget.version + 1, mode=mode)
            self.tally["publications"] += 1
        except (errors.OperationFailed, errors.TransitionRefused, errors.IllegalTransition) as error:
            self.tally[type(error).__name__] += 1

    async def _cure(self) -> None:
        """Bring every engine back, as an operator would."""
        for _ in range(20):
            if self.lifecycle.state is State.RUNNING and all(engine.alive for engine in self.engines):
                break
            await self._repair()
        else:
            raise RuntimeError(f"nothing cures it: {self.lifecycle.state}, {self.lifecycle.engines}")
        for engine in self.engines:
            engine.requests.clear()
        self.transfer.calls.clear()

    async def _repair(self) -> None:
        for engine in self.engines:
            if not engine.alive:
                engine.restart()
        with suppress(errors.LifecycleError):
            await self.lifecycle.recover()
        await self._attempt(PauseMode.ABORT)
        if self.lifecycle.can(Trigger.CONTINUE_GENERATION):
            await self.lifecycle.continue_generation()
        if self.lifecycle.can(Trigger.RESUME):
            await self.lifecycle.resume()
        self.tally["repairs"] += 1

    # ------------------------------------------------------------------------------------------------------ the end

    async def _quiet(self) -> None:
        """Wait until nothing runs, and nothing waits."""
        executor = self.executor
        if self._interrupters:
            await self._by_itself.wait()
        executor.forget(self._dataset)
        self._dataset = self._items()
        for _ in range(_PATIENCE):
            if not (executor.queued or executor.running or executor.finished or self.lifecycle.gate.waiting):
                break
            await self._publish()
            with suppress(TimeoutError):
                await executor.wait(max(1, min(executor.finished, _BATCH)), 0.01)
        else:
            raise RuntimeError(f"it never ends: {self._standing()}")
        self._ids.clear()
        for _ in range(10):  # until tasks that have ended their rollouts are parked again
            await checkpoint()

    def _standing(self) -> str:
        return f"{self._out_of_balance()}, {self.lifecycle.state}, {self.lifecycle.engines}, {self.budget}"

    def complaints(self) -> list[str]:
        """Return what is wrong once everything is closed, in sentences."""
        wrong = [*self._wrong, *self._out_of_balance()]
        for engine in self.engines:
            wrong += [f"{engine.name}: {violation}" for violation in engine.violations]
            if engine.in_flight:
                wrong.append(f"{engine.name}: {engine.in_flight} requests are in flight")
        if self._journal is not None:
            wrong += [str(violation) for violation in verify_file(self._journal).violations[:10]]
        return wrong

    def _out_of_balance(self) -> list[str]:
        budget, executor, lifecycle = self.budget, self.executor, self.lifecycle
        crew = executor._entered
        assert crew is not None
        closed = lifecycle.state is State.CLOSED
        counted = {
            "rollouts hold a ticket": lifecycle.running,
            "rollouts count as running": budget.running,
            "tickets are out": len(list(budget.unsettled)),
            "callers wait at the gate": lifecycle.gate.waiting,
            "rollouts run in the executor": executor.running,
            "submissions are queued": executor.queued,
            "submissions have no result": len(executor._jobs),
            "generations are in flight": lifecycle._context.segments.in_flight,
            "members are ready": len(crew._ready),
            "tasks are coming": crew._coming,
            "tasks are parked": len(crew._parked) if closed else 0,
            "streams are open": len(executor._streams),
            "results stand about": executor.finished,
            "boxes are open": len(executor._boxes) - 1,
            "watchers look on": len(lifecycle.gate._watchers) if closed else 0,
        }
        wrong = [f"{count} {what}" for what, count in counted.items() if count]
        if budget.submitted != budget.running + budget.accepted + budget.rejected:
            wrong.append(f"the books do not balance: {budget}")
        held = budget.counted - budget.version * budget.batch_size - (budget._taken or 0)
        if held and not executor.finished:
            wrong.append(f"{held} accepted rollouts hold capacity, and nobody has them: {budget}")
        return wrong
