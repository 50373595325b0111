"""Whose turn it is: one operation at a time, and the last one takes it from whoever holds it."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

from lifecycle import Trigger
from lifecycle.errors import Busy, LifecycleClosed, Reentrant
from lifecycle.turn import Turn

from .crowd import a_few_turns, until

pytestmark = pytest.mark.anyio


class Work:
    """Operations that run until they are let go, and a record of what they did."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.may_end = anyio.Event()
        self.announced: list[bool] = []

    def named(self, name: str) -> Callable[[], Awaitable[str]]:
        """Return an operation that says when it begins and ends."""

        async def work() -> str:
            self.log.append(f"{name} begins")
            try:
                await self.may_end.wait()
            except BaseException:
                self.log.append(f"{name} is cancelled")
                raise
            self.log.append(f"{name} ends")
            return name

        return work

    async def close(self) -> None:
        """Be the last operation."""
        self.log.append("closed")

    def announce(self) -> None:
        """Say that the end has come, before anybody notices."""
        self.log.append("announced")


async def _nothing() -> str:
    return "done"


async def test_operations_follow_each_other_in_the_order_they_came() -> None:
    """One at a time, first come first served, each getting its own result."""
    turn, work = Turn(lambda: None), Work()
    results: list[str] = []

    async def take(name: str) -> None:
        results.append(await turn.take(work.named(name)))

    async with anyio.create_task_group() as tasks:
        for name in ("a", "b", "c"):
            tasks.start_soon(take, name)
            await a_few_turns()
        assert work.log == ["a begins"]
        work.may_end.set()
    assert work.log == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]
    assert results == ["a", "b", "c"]


async def test_whoever_will_not_wait_is_told_what_holds_the_lifecycle() -> None:
    """`wait=False` raises `Busy` with the trigger in flight, and takes a turn that is free."""
    turn, work = Turn(lambda: Trigger.TRANSFER), Work()
    assert await turn.take(_nothing, wait=False) == "done"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turn.take, work.named("a"))
        await until(lambda: work.log == ["a begins"])
        with pytest.raises(Busy, match="another operation holds the lifecycle") as busy:
            await turn.take(_nothing, wait=False)
        assert busy.value.in_flight is Trigger.TRANSFER
        work.may_end.set()


async def test_an_operation_cannot_be_called_from_inside_another() -> None:
    """It would wait for itself for ever; instead it is told which operation it is in."""
    turn = Turn(lambda: Trigger.PAUSE_GENERATION)

    async def nested() -> str:
        return await turn.take(_nothing)

    async def closing() -> None:
        await turn.take_last(Work().close, announce=Work().announce)

    for inner in (nested, closing):
        with pytest.raises(Reentrant, match="called from inside PAUSE_GENERATION; operations do not nest"):
            await turn.take(inner)
    assert await turn.take(_nothing) == "done"


async def test_an_operation_that_fails_passes_the_turn_on() -> None:
    """Its error is the caller's; the next operation is not concerned."""
    turn = Turn(lambda: None)

    async def fail() -> None:
        raise ArithmeticError("of its own")

    with pytest.raises(ArithmeticError, match="of its own"):
        await turn.take(fail)
    assert await turn.take(_nothing) == "done"


async def test_a_cancelled_caller_gets_its_cancellation_and_the_turn_passes_on() -> None:
    """Cancelling the holder ends its work; cancelling one who waits leaves the others in line."""
    turn, work = Turn(lambda: None), Work()
    scopes = {name: anyio.CancelScope() for name in "abc"}

    async def take(name: str) -> None:
        with scopes[name]:
            await turn.take(work.named(name))

    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(take, name)
            await a_few_turns()
        scopes["b"].cancel()
        scopes["a"].cancel()
        await until(lambda: work.log[-1] == "c begins")
        work.may_end.set()
    assert work.log == ["a begins", "a is cancelled", "c begins", "c ends"]
    assert [scopes[name].cancelled_caught for name in "abc"] == [True, True, False]


async def test_the_last_turn_takes_it_from_everybody() -> None:
    """The holder and those who wait get `LifecycleClosed`, not a cancellation, and the last work runs after them."""
    turn, work = Turn(lambda: None), Work()
    lost: list[str] = []

    async def take(name: str) -> None:
        with pytest.raises(LifecycleClosed):
            await turn.take(work.named(name))
        lost.append(name)

    async with anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(take, name)
            await a_few_turns()
        await turn.take_last(work.close, announce=work.announce)
    assert sorted(lost) == ["a", "b"]
    assert work.log == ["a begins", "announced", "a is cancelled", "closed"]


async def test_nobody_gets_in_after_the_last_turn_and_it_is_taken_once() -> None:
    """Closing again does nothing, and any later operation is told that it is too late."""
    turn, work = Turn(lambda: None), Work()
    for _ in range(2):
        await turn.take_last(work.close, announce=work.announce)
    assert work.log.count("closed") == 1
    for wait in (True, False):
        with pytest.raises(LifecycleClosed, match="the lifecycle is closed"):
            await turn.take(_nothing, wait=wait)


async def test_the_last_turn_is_taken_to_its_end_though_its_caller_is_cancelled() -> None:
    """Closing settles what is owed: a cancelled closer gets its cancellation, but not half-way."""
    turn, log = Turn(lambda: None), []

    async def close() -> None:
        await a_few_turns()
        log.append("closed")

    with anyio.CancelScope() as scope:
        scope.cancel()
        await turn.take_last(close, announce=lambda: None)
        await checkpoint()
    assert (log, scope.cancelled_caught) == (["closed"], True)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_that_asyncio_cancels_closes_first_and_is_cancelled_then() -> None:
    """`Task.cancel()` breaks through anyio's shield: the last work is taken up again, and the cancellation kept."""
    turn, log = Turn(lambda: None), []
    may_end = anyio.Event()

    async def close() -> None:
        log.append("begins")
        await may_end.wait()
        log.append("ends")

    task = asyncio.create_task(turn.take_last(close, announce=lambda: None))
    await until(lambda: log == ["begins"])
    task.cancel()
    await until(lambda: log == ["begins", "begins"])
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["begins", "begins", "ends"]


async def test_a_last_turn_that_failed_may_be_taken_again() -> None:
    """What could not be ended is not counted as ended, and still nobody else gets in."""
    turn, log = Turn(lambda: None), []

    async def close() -> None:
        log.append("tried")
        if len(log) == 1:
            raise OSError("not yet")

    with pytest.raises(OSError, match="not yet"):
        await turn.take_last(close, announce=lambda: None)
    with pytest.raises(LifecycleClosed):
        await turn.take(_nothing)
    for _ in range(2):
        await turn.take_last(close, announce=lambda: None)
    assert log == ["tried", "tried"]
