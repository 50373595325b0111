"""The lifecycle is closed or faulted under an executor: who waits is told, and what is queued survives a recovery."""

import anyio
import pytest

from lifecycle import RolloutStatus, State
from lifecycle.errors import LifecycleClosed, LifecycleFaulted

from .rollouts_rig import Stage, bring, outcome_of, settled, staged, start
from .test_closing import CALLS

pytestmark = pytest.mark.anyio

WAITING = [name for name in CALLS if name != "evaluate"]


async def _fault(stage: Stage) -> None:
    stage.rig.engines[0].crash()
    await outcome_of(stage.publish)
    assert stage.rig.state() is State.FAULTED


@pytest.mark.parametrize("name", WAITING)
async def test_whoever_waits_is_told_when_the_lifecycle_is_closed(name: str) -> None:
    """With `LifecycleClosed`, and whoever comes later, too."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        [number] = stage.submit("a")
        waiting = start(tasks, lambda: CALLS[name](stage, number))
        await settled()
        await stage.lifecycle.close()
        await settled()
        assert isinstance(waiting.error, LifecycleClosed)
        with pytest.raises(LifecycleClosed):
            await CALLS[name](stage, number)
        with pytest.raises(LifecycleClosed):
            stage.submit("b")


@pytest.mark.parametrize("name", WAITING)
async def test_whoever_waits_is_told_of_a_fault(name: str) -> None:
    """With `LifecycleFaulted`; after `recover()` the same call goes on."""
    async with staged() as stage, anyio.create_task_group() as tasks:
        [number] = stage.submit("a")
        waiting = start(tasks, lambda: CALLS[name](stage, number))
        await settled()
        await _fault(stage)
        await settled()
        assert isinstance(waiting.error, LifecycleFaulted)
        with pytest.raises(LifecycleFaulted):
            await CALLS[name](stage, number)
        stage.rig.engines[0].restart()
        await stage.lifecycle.recover()
        await stage.publish(consumed=0)
        if stage.rig.state() is State.SUSPENDED:
            await stage.lifecycle.resume()
        again = start(tasks, lambda: CALLS[name](stage, number))
        await settled()
        assert not again.done
        stage.submit("b")
        await settled()
        for _ in range(4):
            for run in stage.script.active:
                run.succeed()
            await settled()
        assert (again.done, again.error) == (True, None)


@pytest.mark.parametrize("submits", [False, True])
async def test_what_is_queued_goes_on_after_a_recovery(submits: bool) -> None:
    """Submissions are not lost by a fault: those that ran end, those that waited start, and so do later ones."""
    async with staged(batch_size=1, max_staleness=0) as stage:
        stage.submit("a", "b", "c")
        await settled()
        await _fault(stage)
        if submits:
            stage.submit("d")
        stage.script.of("a").fail()
        await settled()
        assert (stage.script.waiting, stage.executor.queued) == ([], 2 + submits)
        stage.rig.engines[0].restart()
        await stage.lifecycle.recover()
        await stage.publish(consumed=0)
        if stage.rig.state() is State.SUSPENDED:
            await stage.lifecycle.resume()
        seen = []
        for _ in range(2 + submits):
            await settled()
            seen += stage.script.waiting
            stage.script.of(seen[-1]).fail()
        results = await stage.executor.wait(1)
        assert (seen, results[0].data) == (["b", "c", "d"][: 2 + submits], "a")


async def test_results_that_are_there_can_be_taken_from_a_closed_lifecycle() -> None:
    """What was finished before is not lost."""
    async with staged() as stage:
        stage.submit("a", "b")
        await settled()
        stage.script.succeed("a")
        await settled()
        await stage.lifecycle.close()
        assert bring(await stage.executor.wait(1)) == [("a", RolloutStatus.ACCEPTED)]
        with pytest.raises(LifecycleClosed):
            await stage.executor.wait(1)
