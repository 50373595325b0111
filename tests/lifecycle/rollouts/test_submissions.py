"""Submitting one by one: each submission has one result, or is told about."""

import asyncio
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from lifecycle import Episode, Rollout, RolloutStatus, Ticket, events
from lifecycle.rollouts import BlockingEpisode

from .rollouts_rig import Script, echo, settled, staged, start

pytestmark = pytest.mark.anyio

TOKEN: ContextVar[str] = ContextVar("TOKEN", default="nobody")


def _echo_in_a_thread(_: BlockingEpisode, data: Any) -> Any:
    return data


class _Foreign(BaseException):
    """Another library's idea of a cancellation."""


async def test_a_rollout_that_returns_a_value_is_accepted_and_consumed_when_it_is_taken() -> None:
    """The result carries data, value, version and staleness; capacity stays taken until a version frees it."""
    async with staged(batch_size=2, max_staleness=0) as stage:
        [number] = stage.submit("a")
        await settled()
        stage.script.of("a").succeed(7)
        [result] = await stage.executor.wait(1)
        assert (result.id, result.data, result.value, result.values) == (number, "a", 7, (7,))
        assert (result.status, result.accepted, result.error) == (RolloutStatus.ACCEPTED, True, None)
        assert (result.version, result.staleness) == (0, 0)
        assert stage.counts == (0, 1, 0)
        assert [event.ticket for event in stage.of(events.RolloutConsumed)] == [1]
        assert stage.budget.capacity() == 1
        await stage.publish()
        assert stage.budget.capacity() == 2


async def test_a_rollout_that_raises_is_a_failed_result_and_its_place_is_free() -> None:
    """Training is told of the failure by `wait()`, with the exception."""
    async with staged() as stage:
        stage.submit("a")
        await settled()
        stage.script.of("a").fail(error := ValueError("bad"))
        [result] = await stage.executor.wait(1)
        assert (result.status, result.error, result.value) == (RolloutStatus.FAILED, error, None)
        assert stage.counts == (0, 0, 1)


async def test_a_rollout_that_returns_none_has_no_result_for_wait_and_one_for_wait_for() -> None:
    """There is nothing to train on: `wait()` goes on waiting, who asks by id is told."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        [first, _] = stage.submit("a", "b")
        waiting = start(tasks, lambda: stage.executor.wait(1))
        await settled()
        stage.script.of("a").succeed(None)
        await settled()
        assert not waiting.done
        assert (await stage.executor.wait_for(first)).status is RolloutStatus.REJECTED
        stage.script.succeed("b")
        await settled()
        assert [result.data for result in waiting.value] == ["b"]
        assert stage.counts == (0, 1, 1)


@pytest.mark.parametrize("workflow", [echo, _echo_in_a_thread], ids=["async", "in a thread"])
async def test_submissions_start_in_order_as_far_as_the_budget_goes(workflow: Any) -> None:
    """A bound of four lets four of six through; the others go with the version."""
    async with staged(batch_size=2, max_staleness=1) as stage:
        for number in range(6):
            stage.executor.submit(workflow, number)
        first = await stage.executor.wait(4)
        assert ([result.data for result in first], stage.executor.queued) == ([0, 1, 2, 3], 2)
        await stage.publish()
        assert [result.data for result in await stage.executor.wait(2)] == [4, 5]
        assert stage.counts == (0, 6, 0)


@pytest.mark.parametrize(
    "error", [_Foreign(), asyncio.CancelledError(), SyntaxError(), ExceptionGroup("two", [OSError()])]
)
async def test_whatever_a_workflow_raises_is_its_own_failure(error: BaseException) -> None:
    """A foreign `BaseException`, or asyncio's cancellation raised by hand, fails one rollout and hurts no other."""
    async with staged() as stage:
        stage.submit("a", "b")
        await settled()
        stage.script.of("a").fail(error)
        stage.script.succeed("b")
        results = await stage.executor.wait(2)
        assert [(result.data, result.error) for result in results] == [("a", error), ("b", None)]
        stage.submit("c")
        await settled()
        stage.script.succeed("c")
        assert [result.data for result in await stage.executor.wait(1)] == ["c"]


async def test_a_workflow_sees_the_submitters_context_and_keeps_what_it_sets_to_itself() -> None:
    """Context variables go with the submission, into threads and filters, too; the next rollout sees none of them."""
    seen: list[str] = []

    async def look(_: Episode, data: Any) -> Any:
        seen.append(TOKEN.get())
        TOKEN.set("leaked")
        return data

    def look_in_a_thread(_: BlockingEpisode, data: Any) -> Any:
        seen.append(TOKEN.get())
        TOKEN.set("leaked")
        return data

    async def accept(_: Any) -> bool:
        seen.append(TOKEN.get())
        TOKEN.set("leaked")
        return True

    async with staged(batch_size=8) as stage:
        for name in ("alice", "bob"):
            TOKEN.set(name)
            stage.executor.submit(look, name, accept=accept)
            await settled()
        TOKEN.set("carol")
        stage.executor.submit(look_in_a_thread, "carol", accept=accept)
        TOKEN.set("dave")
        await stage.executor.wait(3)
        assert seen == ["alice", "alice", "bob", "bob", "carol", "carol"]
        assert TOKEN.get() == "dave"


async def test_a_workflow_may_submit_further_rollouts() -> None:
    """What it submits is a rollout of its own."""
    async with staged() as stage:

        async def parent(_: Episode, data: Any) -> Any:
            stage.executor.submit(echo, "child")
            return data

        stage.executor.submit(parent, "parent")
        assert sorted(result.data for result in await stage.executor.wait(2)) == ["child", "parent"]


@pytest.mark.parametrize(
    ("verdict", "status"), [("accept", RolloutStatus.ACCEPTED), ("reject", RolloutStatus.REJECTED)]
)
async def test_a_workflow_may_settle_its_own_ticket(verdict: str, status: RolloutStatus) -> None:
    """Its word counts where it brings a value; what it accepted and then failed to bring holds no capacity."""

    async def workflow(episode: Episode, data: Any) -> Any:
        getattr(episode.ticket, verdict)()
        if data == "raises":
            raise ZeroDivisionError
        return None if data == "nothing" else data

    async with staged() as stage:
        numbers = [stage.executor.submit(workflow, data) for data in ("a", "nothing", "raises")]
        await settled()
        results = [await stage.executor.wait_for(number) for number in numbers]
        assert [result.status for result in results] == [status, RolloutStatus.REJECTED, RolloutStatus.FAILED]
        assert stage.counts == ((0, 3, 0) if verdict == "accept" else (0, 0, 3))
        assert stage.budget.capacity() == (7 if verdict == "accept" else 8)


async def test_a_subscriber_that_raises_hurts_no_rollout() -> None:
    """Events are told in the midst of admission and settlement; what a callback raises there goes to the log."""

    def broken(_: events.Event) -> None:
        raise ZeroDivisionError

    async with staged() as stage:
        stage.lifecycle.subscribe(broken)
        for number in range(3):
            stage.executor.submit(echo, number)
        assert [result.data for result in await stage.executor.wait(3)] == [0, 1, 2]
        assert stage.counts == (0, 3, 0)


async def test_a_subscriber_may_submit_from_within_an_event() -> None:
    """A rollout that is submitted while another is admitted waits its turn."""
    async with staged() as stage:
        submitted: list[int] = []

        def follow(event: events.Event) -> None:
            if isinstance(event, events.RolloutAdmitted) and len(submitted) < 2:
                submitted.append(stage.executor.submit(stage.script, f"follower {len(submitted)}"))

        stage.lifecycle.subscribe(follow)
        stage.submit("first")
        await settled()
        assert stage.script.waiting == ["first", "follower 0", "follower 1"]


async def test_submissions_wait_while_submission_is_closed() -> None:
    """Queued in SUSPENDED, they start with RUNNING, in order."""
    async with staged() as stage:
        await stage.lifecycle.suspend()
        stage.submit("a", "b")
        await settled()
        assert (stage.script.waiting, stage.executor.queued) == ([], 2)
        await stage.lifecycle.resume()
        await settled()
        assert (stage.script.waiting, stage.executor.queued) == (["a", "b"], 0)


async def test_rollouts_take_turns_with_callers_of_admit() -> None:
    """The executor stands in the gate's queue as one of many: nobody is kept waiting by a long queue of submissions."""
    async with staged(batch_size=1, max_staleness=0) as stage, anyio.create_task_group() as tasks:
        stage.submit("a", "b", "c")
        caller = start(tasks, lambda: stage.lifecycle.admit().__aenter__())
        await settled()
        stage.script.of("a").fail()
        await settled()
        assert (stage.script.waiting, caller.done) == (["b"], False)
        stage.script.of("b").fail()
        await settled()
        assert (stage.script.waiting, caller.done) == ([], True)
        caller.value.reject()
        await settled()
        assert stage.script.waiting == ["c"]


async def test_a_rollout_that_takes_too_long_has_failed() -> None:
    """After `timeout` seconds it is cancelled, and its place is free."""
    script = Script()
    async with staged(timeout=3.0) as stage:
        number = stage.executor.submit(script, "a")
        with anyio.fail_after(10):
            result: Rollout = await stage.executor.wait_for(number)
        assert (result.status, str(result.error)) == (RolloutStatus.FAILED, f"rollout {number} took longer than 3 s")
        assert (isinstance(result.error, TimeoutError), script.runs[0].cancelled, anyio.current_time() < 10) == (
            True, True, True,
        )  # fmt: skip
        assert stage.counts == (0, 0, 1)


async def test_a_ticket_that_a_workflow_holds_is_left_to_it() -> None:
    """What became of the attempt is not known: its capacity stays taken until whoever holds the ticket says so."""
    held: list[Ticket] = []

    async def workflow(episode: Episode, _: Any) -> Any:
        episode.ticket.hold()
        held.append(episode.ticket)
        raise TimeoutError("the environment did not answer")

    async with staged(batch_size=2) as stage:
        result = await stage.executor.wait_for(stage.executor.submit(workflow, "a"))
        assert (result.status, stage.counts) == (RolloutStatus.FAILED, (1, 0, 0))
        held[0].reject()
        assert stage.counts == (0, 0, 1)
