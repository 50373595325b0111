"""Workflows, filters and calls that nobody expects: each is refused in a sentence, or does what it says."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.from_thread
import pytest

from lifecycle import Episode, Rollout, RolloutStatus, Ticket
from lifecycle.errors import Reentrant, WrongEventLoop
from lifecycle.rollouts import BlockingEpisode
from tests.lifecycle.driver.driver_rig import SOURCE

from .rollouts_rig import Stage, echo, outcome_of, settled, staged, within

pytestmark = pytest.mark.anyio


def _logged(workflow: Callable[[Episode, Any], Awaitable[Any]]) -> Callable[[Episode, Any], Awaitable[Any]]:
    @functools.wraps(workflow)
    def wrapper(episode: Episode, data: Any) -> Awaitable[Any]:
        return workflow(episode, data)

    return wrapper


class _Callable:
    async def __call__(self, _: Episode, data: Any) -> Any:
        return data


@pytest.mark.parametrize(
    "workflow",
    [_logged(echo), functools.partial(_Callable()), functools.partial(functools.partial(echo)), _Callable()],
    ids=["decorated", "partial of an object", "partial of a partial", "object"],
)
async def test_a_coroutine_function_is_seen_through_what_wraps_it(workflow: Any) -> None:
    """It runs on the event loop, and its value is what it returns."""
    async with staged() as stage:
        [result] = await stage.executor.rollout(["a"], workflow)
        assert (result.value, result.errors) == ("a", ())


async def _generator(_: Episode, data: Any) -> Any:
    yield data


async def test_an_asynchronous_generator_is_no_workflow() -> None:
    """What it would yield is no value."""
    async with staged() as stage:
        [result] = await stage.executor.rollout(["a"], _generator)
        assert "use async def" in str(result.error)


async def test_a_lambda_that_returns_a_coroutine_is_told_what_to_be() -> None:
    """Never is a coroutine that nobody awaits taken for a value, or for the word of a filter."""

    async def never(_: Any) -> bool:
        return False

    async with staged() as stage:
        results = await stage.executor.rollout(["a"], lambda episode, data: echo(episode, (data, 1)))
        results += await stage.executor.rollout(["a"], echo, accept=lambda value: never((value, 1)))
        for result in results:
            assert result.status is RolloutStatus.FAILED
            assert "use async def" in str(result.error)


@pytest.mark.parametrize("group_size", [True, 1.0, 0, -1, "2"])
async def test_a_group_size_that_is_no_whole_number_harms_nobody(group_size: Any) -> None:
    """It is refused before anything is queued, and the executor goes on."""
    async with staged() as stage:
        for call in (
            lambda: stage.executor.rollout(["a"], echo, group_size=group_size),
            lambda: stage.executor.batch(["a"], echo, group_size=group_size),
        ):
            assert isinstance(await outcome_of(call), ValueError)
        with pytest.raises(ValueError, match="group_size must be an int of at least 1"):
            stage.executor.submit(echo, "a", group_size=group_size)
        assert [result.value for result in await stage.executor.rollout(["b"], echo)] == ["b"]


async def test_what_belongs_to_the_event_loop_is_refused_in_a_thread() -> None:
    """Submitting and settling tickets there would corrupt both; done by way of the event loop they work."""
    errors: list[BaseException] = []

    async with staged() as stage:

        def workflow(episode: BlockingEpisode, _: Any) -> str:
            for call in (episode.ticket.accept, lambda: stage.executor.submit(echo, "b")):
                try:
                    call()
                except WrongEventLoop as error:
                    errors.append(error)
            anyio.from_thread.run_sync(episode.ticket.accept)
            return "a"

        [result] = await stage.executor.rollout(["a"], workflow)
        assert (result.value, len(errors)) == ("a", 2)
        assert [result.value for result in await stage.executor.rollout(["c"], echo)] == ["c"]


@pytest.mark.parametrize("operation", ["publish", "suspend", "close", "evaluate"])
async def test_an_evaluation_that_calls_an_operation_is_told(operation: str) -> None:
    """It would wait for the end of the evaluation, which waits for it."""
    async with staged() as stage:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "publish": lambda: stage.lifecycle.publish(SOURCE, version=1),
            "suspend": stage.lifecycle.suspend,
            "close": stage.lifecycle.close,
            "evaluate": lambda: stage.executor.evaluate(["b"], echo),
        }

        async def workflow(_: Episode, __: Any) -> Any:
            return await calls[operation]()

        [result] = await within(100, lambda: stage.executor.evaluate(["a"], workflow))
        assert isinstance(result.error, Reentrant)
        await stage.publish()


async def test_what_was_begun_in_an_evaluation_may_call_operations_after_it() -> None:
    """Only while the evaluation lasts would it wait for ever."""
    begun: list[Any] = []

    async with staged() as stage, anyio.create_task_group() as tasks:

        async def later() -> None:
            await settled()
            while stage.executor._evaluations._scopes:
                await settled()
            begun.append(await outcome_of(lambda: stage.lifecycle.publish(SOURCE, version=1)))

        async def workflow(_: Episode, data: Any) -> Any:
            tasks.start_soon(later)
            return data

        await stage.executor.evaluate(["a"], workflow)
    assert [type(outcome).__name__ for outcome in begun] == ["PublishReport"]


async def _given_up(stage: Stage, how: str) -> None:
    if how == "forgotten":
        dataset = ["a", "b"]
        assert isinstance(
            await outcome_of(lambda: stage.executor.batch(dataset, stage.script, timeout=1)), TimeoutError
        )
        stage.executor.forget(dataset)
    elif how == "timed out":
        synchronous = stage.executor.rollout(["a", "b"], stage.script, timeout=1)
        assert isinstance(await outcome_of(lambda: synchronous), TimeoutError)
    else:
        with anyio.move_on_after(1):
            await stage.executor.rollout(["a", "b"], stage.script)


@pytest.mark.parametrize("how", ["forgotten", "timed out", "cancelled"])
async def test_what_nobody_waits_for_any_more_is_cancelled(how: str) -> None:
    """Rollouts that hang return their capacity when whoever wanted them has given up."""
    async with staged(batch_size=2, max_staleness=0) as stage:
        await _given_up(stage, how)
        await settled()
        assert (stage.counts, stage.script.active) == ((0, 0, 2), [])
        results = await within(100, lambda: stage.executor.rollout(["c", "d"], echo))
        assert [result.value for result in results] == ["c", "d"]


async def test_a_ticket_of_another_lifecycle_is_not_consumed() -> None:
    """It would be counted here, and be missing there."""
    async with staged() as stage, staged() as other:
        [rollout] = await other.executor.rollout(["a"], echo)
        ticket: Any = rollout.ticket
        assert isinstance(rollout, Rollout)
        for tickets in ([ticket], [Ticket(1, 0)]):
            with pytest.raises(ValueError, match="were given out by somebody else"):
                stage.lifecycle.consume(tickets)
