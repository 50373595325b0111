"""A world around an executor: what is asked of it, what it delivers, and what must hold after every step."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup
from attrs import define, field

from lifecycle import Episode, OnStale, Rollout, RolloutStatus, State, events
from lifecycle.errors import ExecutorClosed, LifecycleError, NoCapacity, NoSuchRollout

from .rollouts_rig import Stage, echo, settled

STEPS = (
    "submit", "submit", "submit", "finish", "finish", "finish", "publish", "suspend", "resume", "wait", "wait",
    "wait_for", "batch", "forget", "rollout", "evaluate", "give up", "time", "admit", "return", "strike",
)  # fmt: skip

Step = tuple[str, int, int]


class _Foreign(BaseException):
    """Another library's idea of a cancellation."""


async def _nothing(_: Episode, data: Any) -> Any:
    return None


async def _fails(_: Episode, data: Any) -> Any:
    raise ZeroDivisionError


async def _odd(value: Any) -> bool:
    await anyio.lowlevel.checkpoint()
    return bool((value[0] if isinstance(value, tuple) else value) % 2)


@define(eq=False)
class Call:
    """Somebody who waits for results."""

    name: str
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    done: bool = False
    error: BaseException | None = None


@define(eq=False)
class World:
    """An executor, what was asked of it, and what it delivered."""

    stage: Stage
    tasks: TaskGroup
    own: "set[asyncio.Task[Any]]"
    submitted: list[int] = field(factory=list)
    delivered: Counter[int] = field(factory=Counter)
    calls: list[Call] = field(factory=list)
    tickets: list[Any] = field(factory=list)
    dataset: Any = field(factory=lambda: iter(range(10**9)))
    struck: bool = False

    # ------------------------------------------------------------------------------------------------------- the steps

    async def do(self, step: Step) -> None:
        """Carry a step out, and let everything follow from it."""
        name, a, b = step
        action: Callable[[int, int], Any] = getattr(self, "_" + name.replace(" ", "_"))
        with suppress(ExecutorClosed, NoCapacity):
            action(a, b)
        for _ in range(1 + 2 * self.struck):  # asyncio tells a group of a task that never began by callbacks
            await settled()

    def _submit(self, a: int, b: int) -> None:
        workflow = (self.stage.script, self.stage.script, self.stage.script, echo, _nothing, _fails)[a % 6]
        accept = _odd if b % 3 == 0 else None
        group = min(1 + b % 3, self.stage.budget.largest_group)
        number = self.stage.executor.submit(workflow, a, accept=accept, group_size=group, retries=b % 2)
        self.submitted.append(number)

    def _finish(self, a: int, b: int) -> None:
        if not (waiting := [run for run in self.stage.script.active if not run.over.is_set()]):
            return
        run = waiting[a % len(waiting)]
        match b % 8:
            case 0:
                run.fail()
            case 1:
                run.fail(_Foreign())
            case 2:
                run.succeed(None)
            case 3:
                run.fail(asyncio.CancelledError())
            case _:
                run.succeed(a)

    def _publish(self, a: int, b: int) -> None:
        if not any(call.name in {"evaluate", "publish"} and not call.done for call in self.calls):
            self._call("publish", self.stage.publish)

    def _suspend(self, a: int, b: int) -> None:
        if self.stage.rig.state() is State.RUNNING:
            self._call("suspend", self.stage.lifecycle.suspend)

    def _resume(self, a: int, b: int) -> None:
        if self.stage.rig.state() is State.SUSPENDED:
            self._call("resume", self.stage.lifecycle.resume)

    def _wait(self, a: int, b: int) -> None:
        count, timeout = 1 + a % min(3, self.stage.budget.max_unconsumed), b % 4 or None
        self._call("wait", lambda: self.stage.executor.wait(count, timeout))

    def _wait_for(self, a: int, b: int) -> None:
        if self.submitted:
            number, timeout = self.submitted[a % len(self.submitted)], b % 4 or None
            self._call("wait_for", lambda: self.stage.executor.wait_for(number, timeout))

    def _batch(self, a: int, b: int) -> None:
        size = 1 + a % min(3, self.stage.budget.max_unconsumed)
        self._call("batch", lambda: self.stage.executor.batch(self.dataset, self.stage.script, size=size))

    def _forget(self, a: int, b: int) -> None:
        self.stage.executor.forget(self.dataset)

    def _rollout(self, a: int, b: int) -> None:
        items = range(min(a % 3, self.stage.budget.max_unconsumed))
        self._call("rollout", lambda: self.stage.executor.rollout(items, self.stage.script, timeout=b % 4 or None))

    def _evaluate(self, a: int, b: int) -> None:
        if self.stage.rig.state() in {State.RUNNING, State.SUSPENDED}:
            items, concurrency = range(a % 4), 1 + b % 2
            self._call(
                "evaluate",
                lambda: self.stage.executor.evaluate(items, self.stage.script, concurrency=concurrency, timeout=3),
            )

    def _give_up(self, a: int, b: int) -> None:
        if waiting := [call for call in self.calls if not call.done and call.name != "publish"]:
            waiting[a % len(waiting)].scope.cancel()

    def _time(self, a: int, b: int) -> None:
        self._call("time", lambda: anyio.sleep(1 + a % 3))

    def _admit(self, a: int, b: int) -> None:
        if (ticket := self.stage.lifecycle.gate.try_acquire()) is not None:
            self.tickets.append(ticket)

    def _return(self, a: int, b: int) -> None:
        if self.tickets:
            self.tickets.pop(a % len(self.tickets)).reject()

    def _strike(self, a: int, b: int) -> None:
        """Cancel a task of the executor as asyncio does, perhaps one that has not begun."""
        if not self.own:
            return
        if b % 4 == 0:
            self._submit(0, 1)
            self._submit(0, 2)
        crew = [task for task in asyncio.all_tasks() - self.own if task.get_name().startswith("lifecycle.")]
        if crew and b % 3:
            sorted(crew, key=lambda task: task.get_name())[a % len(crew)].cancel()
            self.struck = True

    def _call(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        made = Call(name)
        self.calls.append(made)

        async def run() -> None:
            with made.scope:
                try:
                    self._take(made, await call())
                except (LifecycleError, TimeoutError, RuntimeError) as error:
                    made.error = error
            made.done = True

        self.tasks.start_soon(run)

    def _take(self, call: Call, results: list[Rollout] | Rollout | None) -> None:
        results = [results] if isinstance(results, Rollout) else results or []
        keys = [(result.version, result.id) for result in results]
        if call.name in {"wait", "batch"}:
            assert keys == sorted(keys)
        if call.name in {"rollout", "evaluate"}:
            assert [result.data for result in results] == list(range(len(results)))
        for result in results:
            self.delivered[result.id] += 1
            drops = self.stage.budget.on_stale in {OnStale.DROP, OnStale.WAIT}
            if drops and result.accepted and call.name != "evaluate":
                assert (result.staleness or 0) <= self.stage.budget.max_staleness

    # -------------------------------------------------------------------------------------------------- what must hold

    def check(self) -> None:
        """Whatever has happened so far."""
        budget, executor = self.stage.budget, self.stage.executor
        runs = {run.ticket for run in self.stage.script.active}
        running = sum(ticket.group_size for ticket in runs if not ticket.evaluation)
        assert budget.running == running + len(self.tickets)
        assert self.stage.lifecycle.running == budget.running + sum(ticket.evaluation for ticket in runs)
        admitted = self.stage.of(events.RolloutAdmitted)
        assert budget.submitted == sum(event.group_size for event in admitted if not event.evaluation)
        assert budget.submitted == budget.running + budget.accepted + budget.rejected
        assert all(times == 1 for times in self.delivered.values())
        self._check_capacity()
        if executor._closed:
            assert self.struck
            assert all(call.done for call in self.calls if call.name not in {"publish", "time"})
        elif self.stage.rig.state() is State.RUNNING and executor.queued:
            assert budget.capacity() < executor._dispatcher.size

    def _check_capacity(self) -> None:
        """What is admitted and not consumed is within the bound, and capacity is the rest."""
        budget = self.stage.budget
        members, freed, taken = {}, 0, 0
        for event in self.stage.rig.sink.events:
            match event:
                case events.RolloutSettled():
                    members[event.ticket] = event.members or 0
                case events.RolloutConsumed() if event.ticket > 0:
                    taken += members[event.ticket]
                case events.RolloutDiscarded() if event.ticket > 0:
                    freed += members[event.ticket]
                case events.VersionAdvanced():
                    freed, taken = freed + taken, 0
                case _:
                    pass
        unconsumed = budget.running + budget.accepted - freed
        assert unconsumed <= budget.max_unconsumed
        free = budget.max_unconsumed - unconsumed
        most = budget.max_concurrent
        assert budget.capacity() == (free if most is None else min(free, most - budget.running))

    async def end(self) -> None:
        """Let everything end, and ask for whatever was not delivered: nothing is lost."""
        for ticket in self.tickets:
            ticket.reject()
        self.tickets.clear()
        self.stage.executor.forget(self.dataset)
        for call in self.calls:
            if call.name not in {"publish", "suspend", "resume"}:
                call.scope.cancel()
        await settled()
        waiting = dict.fromkeys(self.submitted)
        for _ in range(10 + len(waiting)):
            for run in self.stage.script.active:
                run.succeed(1)
            await settled()
            for number in [number for number in waiting if number not in self.stage.executor._jobs]:
                del waiting[number]
                if not self.stage.executor._closed:
                    await self._ask(number)
            await self.do(("resume", 0, 0))
            await self.do(("publish", 0, 0))
            self.check()
        assert self.stage.executor._closed or not waiting

    async def _ask(self, number: int) -> None:
        try:
            with anyio.fail_after(1):
                result = await self.stage.executor.wait_for(number)
        except NoSuchRollout:
            assert self.delivered[number] == 1, f"{number} is lost"
        else:
            assert self.delivered[number] == 0, f"{number} is delivered twice"
            assert result.status in RolloutStatus
