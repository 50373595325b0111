"""Many callers at once: one operation at a time, and close() before all others."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from driver_rig import SOURCE, Engine, Rig, bring_to, prompt, rig
from invariants import check, leave, tasks
from test_cancellation import OPERATIONS

from lifecycle import Lifecycle, PauseMode, StalenessBudget, State, Trigger, errors, events
from lifecycle.events import Request
from lifecycle.testing import Delay, ScriptedTransfer

pytestmark = pytest.mark.anyio


class Outcome:
    """What became of a call in another task."""

    value: Any = None
    error: BaseException | None = None
    done = False


def start(group: Any, call: Callable[[], Awaitable[Any]]) -> Outcome:
    """Start `call` in a task group, and keep what it brings."""
    outcome = Outcome()

    async def run() -> None:
        try:
            outcome.value = await call()
        except errors.LifecycleError as error:
            outcome.error = error
        outcome.done = True

    group.start_soon(run)
    return outcome


def slow(stage: Rig) -> None:
    """Let every transfer take half of its deadline."""
    for engine in stage.engines:
        engine.on(events.TransferWeights, *[Delay(0.5)] * 20)


async def test_two_publications_at_once_follow_each_other() -> None:
    """The second waits for the first; the requests of the two do not mix."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        first = start(group, lambda: lifecycle.publish(SOURCE, version=1))
        second = start(group, lambda: lifecycle.publish(SOURCE, version=2))
        await anyio.sleep(10)
        assert (first.value.version, second.value.previous, second.value.version) == (1, 1, 2)
        targets = [event.target for event in stage.of(events.TransferWeights)]
        assert targets == sorted(targets)
        check(stage)


async def test_of_two_publications_of_one_version_one_is_refused() -> None:
    """The guard is asked when the turn has come, not when the call was made."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        outcomes = [start(group, lambda: lifecycle.publish(SOURCE, version=1)) for _ in range(2)]
        await anyio.sleep(10)
        assert sorted(type(outcome.error).__name__ for outcome in outcomes) == ["NoneType", "TransitionRefused"]
        assert len(stage.of(events.VersionAdvanced)) == 1
        check(stage)


async def test_two_begins_at_once_open_one_session() -> None:
    """Of two callers that begin an update from PAUSED exactly one does; the other is told where it stands."""
    stage = rig(2)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        await bring_to(lifecycle, State.PAUSED)
        outcomes = [start(group, lambda: lifecycle.begin_update(version=1)) for _ in range(2)]
        await anyio.sleep(10)
        assert sorted(type(outcome.error).__name__ for outcome in outcomes) == ["IllegalTransition", "NoneType"]
        assert len(stage.of(events.BeginUpdate)) == 2
        check(stage)


@pytest.mark.parametrize("name", ["suspend", "resume", "pause_generation", "continue_generation"])
async def test_a_caller_that_does_not_want_to_wait_is_told_what_is_in_flight(name: str) -> None:
    """With `wait=False` it gets `Busy`, and the operation that holds the lifecycle goes on."""
    stage = rig(2)
    slow(stage)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        publication = start(group, lambda: lifecycle.publish(SOURCE, version=1))
        await anyio.sleep(0.1)
        with pytest.raises(errors.Busy) as busy:
            await getattr(lifecycle, name)(wait=False)
        assert busy.value.in_flight is lifecycle.in_flight is Trigger.TRANSFER
        await anyio.sleep(10)
        assert publication.value.version == 1
        check(stage)


async def test_a_suspend_during_a_publication_waits_for_its_end() -> None:
    """It is not lost, and nobody is cancelled by it: the fleet ends SUSPENDED at the new version."""
    stage = rig(2)
    slow(stage)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        publication = start(group, lambda: lifecycle.publish(SOURCE, version=1))
        await anyio.sleep(0.1)
        suspension = start(group, lifecycle.suspend)
        await anyio.sleep(10)
        assert (publication.error, suspension.error) == (None, None)
        assert (lifecycle.state, lifecycle.version) == (State.SUSPENDED, 1)
        check(stage)


@pytest.mark.parametrize("after", [False, True], ids=["before it acts", "after it acted"])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_closing_pre_empts_an_operation_at_each_of_its_requests(name: str, after: bool) -> None:
    """Whoever loses gets `LifecycleClosed`, nobody is left waiting, and no whole engine is left paused."""
    count, reached = 1, True
    while reached:
        reached = False
        stage = rig(budget=StalenessBudget(batch_size=1, max_staleness=0))
        lifecycle = stage.lifecycle
        state, action = OPERATIONS[name]
        before = tasks()
        closing = anyio.Event()

        def close() -> None:
            nonlocal reached
            reached = True
            closing.set()  # noqa: B023 - called before the loop goes on

        await lifecycle.attach()
        await lifecycle.resume()
        async with anyio.create_task_group() as group, lifecycle.admit() as ticket:
            await bring_to(lifecycle, state)
            at_gate = start(group, lambda: lifecycle.admit().__aenter__())  # noqa: B023
            evaluating = start(group, lambda: lifecycle.generate(prompt()))  # noqa: B023
            await anyio.wait_all_tasks_blocked()
            stage.when(count, close, after=after)
            operation = start(group, lambda: action(stage))  # noqa: B023
            with anyio.move_on_after(60):
                await closing.wait()
            if reached:
                await lifecycle.close()
            else:
                ticket.reject()
                group.cancel_scope.cancel()
        if reached:
            # Its last request answered, an operation may have come to its end before it could be pre-empted.
            assert operation.error is None or isinstance(operation.error, errors.LifecycleClosed)
            assert [outcome.done for outcome in (operation, at_gate, evaluating)] == [True] * 3
        assert tasks() == before
        await leave(stage)
        count += 1
    assert count > 1


async def test_closing_ends_whatever_runs_and_whatever_waits_with_the_same_error() -> None:
    """The publication that moves weights, the operations behind it and the rollouts at the gate: `LifecycleClosed`."""
    stage = rig(2, budget=StalenessBudget(batch_size=1, max_staleness=0))
    slow(stage)
    lifecycle = stage.lifecycle
    await lifecycle.attach()
    await lifecycle.resume()
    async with anyio.create_task_group() as group, lifecycle.admit() as ticket:
        running = start(group, lambda: lifecycle.publish(SOURCE, version=1))
        await anyio.sleep(0.1)
        assert lifecycle.in_flight is Trigger.TRANSFER
        waiting: list[Callable[[], Awaitable[Any]]] = [
            lambda: lifecycle.publish(SOURCE, version=2),
            lifecycle.suspend,
            lifecycle.abort_generation,
            lambda: lifecycle.admit().__aenter__(),
            lambda: lifecycle.admit(evaluation=True).__aenter__(),
            lambda: lifecycle.generate(prompt()),
            lambda: lifecycle.generate(prompt(), ticket=ticket),
        ]
        outcomes = [running, *(start(group, call) for call in waiting)]
        await anyio.sleep(0.1)
        await lifecycle.close()
        await anyio.wait_all_tasks_blocked()
        assert [type(outcome.error) for outcome in outcomes] == [errors.LifecycleClosed] * len(outcomes)
    assert "stop" in stage.transfer.calls
    await leave(stage)


async def test_closing_while_nothing_runs_frees_whoever_waits() -> None:
    """Callers at the gate, draining ones and held generations all come back."""
    stage = rig(1, budget=StalenessBudget(batch_size=1, max_staleness=0))
    lifecycle = stage.lifecycle
    await lifecycle.attach()
    async with anyio.create_task_group() as group:
        waiting = [start(group, lambda: lifecycle.admit().__aenter__()) for _ in range(3)]
        await anyio.wait_all_tasks_blocked()
        assert not any(outcome.done for outcome in waiting)
        await lifecycle.close()
        await anyio.wait_all_tasks_blocked()
        assert [type(outcome.error) for outcome in waiting] == [errors.LifecycleClosed] * 3
    await leave(stage)


async def test_closing_twice_at_once_closes_once() -> None:
    """Both callers return when it is done."""
    stage = rig(2)
    await stage.lifecycle.attach()
    async with anyio.create_task_group() as group:
        outcomes = [start(group, stage.lifecycle.close) for _ in range(2)]
        await anyio.wait_all_tasks_blocked()
        assert [outcome.value for outcome in outcomes] == [(), ()]
    assert len([event for event in stage.of(events.TransitionBegun) if event.trigger is Trigger.CLOSE]) == 1
    await leave(stage)


class Meddling(ScriptedTransfer):
    """Calls the lifecycle from inside the operation that uses the transfer."""

    call: Callable[[], Awaitable[object]]
    error: BaseException | None = None

    async def prepare(self, members: Any, *, timeout: float) -> Any:
        try:
            await self.call()
        except errors.LifecycleError as error:
            self.error = error
        return await super().prepare(members, timeout=timeout)


@pytest.mark.parametrize(
    "call",
    [Lifecycle.suspend, Lifecycle.resume, Lifecycle.recover, Lifecycle.abort_generation, Lifecycle.close],
    ids=lambda call: call.__name__,
)
async def test_an_operation_called_from_inside_another_is_refused(call: Callable[[Any], Awaitable[object]]) -> None:
    """It raises `Reentrant` instead of waiting for itself, and what was being done goes on, cleaned up as ever."""
    transfer = Meddling()
    stage = rig(2, transfer=transfer)
    transfer.call = lambda: call(stage.lifecycle)
    async with stage.lifecycle as lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        assert isinstance(transfer.error, errors.Reentrant)
        assert "BEGIN_UPDATE" in str(transfer.error)
        check(stage)
        stage["E1"].on(events.BeginUpdate, Delay(5))
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=2)
        check(stage)
    await leave(stage)


async def test_rollouts_are_admitted_in_running_only_and_in_order() -> None:
    """While suspended nobody starts; on RESUME the first to come is the first to go."""
    stage = rig(1, budget=StalenessBudget(batch_size=2, max_staleness=0))
    order: list[int] = []
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        await lifecycle.suspend()

        async def roll(number: int) -> None:
            async with lifecycle.admit() as ticket:
                order.append(number)
                ticket.accept()

        for number in range(4):
            group.start_soon(roll, number)
            await anyio.wait_all_tasks_blocked()
        assert order == []
        await lifecycle.resume()
        await anyio.wait_all_tasks_blocked()
        assert order == [0, 1]
        await lifecycle.publish(SOURCE, version=1)
        await anyio.wait_all_tasks_blocked()
        assert order == [0, 1, 2, 3]
        check(stage)


async def test_an_evaluation_is_admitted_while_suspended_but_not_while_paused() -> None:
    """Evaluations run between training steps, outside the budget."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        await lifecycle.suspend()
        async with lifecycle.admit(evaluation=True) as ticket:
            assert ticket.evaluation
        await lifecycle.pause_generation()
        waiting = start(group, lambda: lifecycle.admit(evaluation=True).__aenter__())
        await anyio.wait_all_tasks_blocked()
        assert not waiting.done
        await lifecycle.continue_generation()
        await anyio.wait_all_tasks_blocked()
        assert waiting.done
        waiting.value.reject()
        check(stage)


async def test_draining_ends_when_the_last_ticket_returns() -> None:
    """It wakes at once, and counts whoever still runs."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        tickets = [await lifecycle.admit().__aenter__() for _ in range(3)]
        await lifecycle.suspend()
        draining = start(group, lifecycle.drain)
        for ticket in tickets:
            await anyio.wait_all_tasks_blocked()
            assert not draining.done
            ticket.reject()
        await anyio.wait_all_tasks_blocked()
        assert draining.done
        await lifecycle.drain()
        check(stage)


async def test_resuming_while_somebody_drains_lets_new_rollouts_start_at_once() -> None:
    """A straggler does not keep others out: the drain goes on, and so does submission."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as group:
        straggler = await lifecycle.admit().__aenter__()
        await lifecycle.suspend()
        draining = start(group, lifecycle.drain)
        await anyio.wait_all_tasks_blocked()
        await lifecycle.resume()
        async with lifecycle.admit():
            assert lifecycle.running == 2
        assert not draining.done
        straggler.reject()
        await anyio.wait_all_tasks_blocked()
        assert draining.done


@pytest.mark.parametrize("how", ["normally", "by an exception", "by cancellation"])
async def test_submission_suspended_for_a_while_opens_again(how: str) -> None:
    """However the block is left, submission is as it was before."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        with anyio.CancelScope() as scope:
            try:
                async with lifecycle.suspended():
                    assert lifecycle.state is State.SUSPENDED
                    if how == "by an exception":
                        raise ZeroDivisionError
                    if how == "by cancellation":
                        scope.cancel()
                        await anyio.sleep_forever()
            except ZeroDivisionError:
                pass
        assert lifecycle.state is State.RUNNING
        await lifecycle.suspend()
        async with lifecycle.suspended():
            pass
        assert lifecycle.state is State.SUSPENDED
        check(stage)


async def test_asking_what_is_possible_changes_nothing_and_never_raises() -> None:
    """`can` and `why_not` answer for every trigger in every state, with a reason."""
    stage = rig(1)
    async with stage.lifecycle as lifecycle:
        for state in (State.RUNNING, State.SUSPENDED, State.PAUSED, State.UPDATING):
            await bring_to(lifecycle, state)
            before = len(stage.sink.events)
            for trigger in Trigger:
                assert lifecycle.can(trigger) is (lifecycle.why_not(trigger) is None)
            assert len(stage.sink.events) == before
            assert lifecycle.in_flight is None
    assert "possible here" in (lifecycle.why_not(Trigger.RESUME) or "")


async def test_a_subscriber_may_settle_tickets_and_sees_every_event_in_order() -> None:
    """What a callback causes follows what it was called for."""
    stage = rig(1)
    seen: list[events.Event] = []
    async with stage.lifecycle as lifecycle:
        ticket = await lifecycle.admit().__aenter__()

        def settle(event: events.Event) -> None:
            seen.append(event)
            if isinstance(event, events.SubmissionSuspended):
                ticket.reject()

        unsubscribe = lifecycle.subscribe(settle)
        await lifecycle.publish(SOURCE, version=1)
        unsubscribe()
        count = len(seen)
        await lifecycle.suspend()
        assert len(seen) == count
        assert [event.seq for event in seen] == list(range(seen[0].seq, seen[0].seq + count))
        assert lifecycle.running == 0
        check(stage)


async def test_a_late_reply_of_a_request_that_was_given_up_changes_nothing() -> None:
    """The deadline has passed, the request was recorded as unknown: what comes later is nobody's."""
    stage = rig(1)
    late: list[Engine] = []

    def act_late(engine: Engine, request: Request) -> None:
        if isinstance(request, events.AbandonUpdate) and not late:
            late.append(engine)
            engine.label = "run:1"

    async with stage.lifecycle as lifecycle:
        stage["E1"].on(events.FinishUpdate, Delay(5))
        stage["E1"].acted = act_late
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=1, mode=PauseMode.ABORT)
        assert late
        assert lifecycle.version == 0
        assert stage.of(events.VersionAdvanced) == []
        check(stage)
