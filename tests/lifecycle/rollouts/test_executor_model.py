"""The executor under everything at once: rollouts of all kinds, versions, closed gates, impatience, cancellations."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle import OnStale
from tests.lifecycle.unit.test_staleness_model import examples
from tests.virtual_time import on_virtual_clock

from .rollouts_rig import staged
from .world import STEPS, Step, World


@asynccontextmanager
async def _world(sizes: tuple[int, int, int | None, OnStale], *, native: bool) -> AsyncIterator[World]:
    batch, staleness, most, on_stale = sizes
    before = asyncio.all_tasks() if native else set()
    async with staged(
        batch_size=batch, max_staleness=staleness, max_concurrent=most, budget={"on_stale": on_stale}, max_queued=8
    ) as stage:
        stage.budget.consume(0)
        async with anyio.create_task_group() as tasks:
            world = World(stage, tasks, before)
            yield world
            tasks.cancel_scope.cancel()
        await stage.executor.close()
        world._check_capacity()
    assert stage.budget.running == 0


def play(backend: str, sizes: tuple[int, int, int | None, OnStale], steps: list[Step]) -> None:
    """Take the steps one after the other, and look at everything after each."""

    async def main() -> None:
        async with _world(sizes, native=backend == "asyncio") as world:
            world.check()
            for step in steps:
                await world.do(step)
                world.check()
            await world.end()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine '.*' was never awaited")  # of tasks cancelled before they began
        anyio.run(main, backend=backend, backend_options=on_virtual_clock(backend))
        if any(step[0] == "strike" for step in steps):
            gc.collect()


SIZES = st.tuples(
    st.integers(1, 4), st.integers(0, 2), st.none() | st.integers(3, 6), st.sampled_from([OnStale.DROP, OnStale.KEEP])
)


SOME = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 99), st.integers(0, 99)), max_size=30)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(sizes=SIZES, steps=SOME)
@settings(deadline=None, max_examples=examples(40))
def test_whatever_happens_nothing_is_lost_leaked_or_delivered_twice(
    backend: str, sizes: tuple[int, int, int | None, OnStale], steps: list[Step]
) -> None:
    """Budget, results and callers are as a plain count of events says, after every step and at the end."""
    play(backend, sizes, steps)
