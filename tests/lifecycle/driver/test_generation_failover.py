"""Generations whose engine dies, is lost, or is paused alone: each goes on elsewhere, once, from what had arrived."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import attrs
import pytest

from lifecycle import GenerationRequest, PauseMode, Standing, State, events
from lifecycle.ports import Capabilities

from .driver_rig import SOURCE, Engine, Later, Rig, bring_to, rig, start
from .invariants import check, leave
from .test_generation import finish

pytestmark = pytest.mark.anyio

STREAMING = Capabilities(pause_modes=frozenset(PauseMode), streams=True)
TELLING = attrs.evolve(STREAMING, reports_versions=True)


def _asked(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"input_ids": (1, 2), "max_new_tokens": 6, "stream": True, **fields})


async def _generating(stage: Rig, tasks: Any, count: int, *, tokens: int = 2, **fields: Any) -> list[Later]:
    """Start generations, and let each make some tokens."""
    later = [start(tasks, lambda: stage.lifecycle.generate(_asked(**fields))) for _ in range(count)]
    await anyio.wait_all_tasks_blocked()
    for engine in stage.engines:
        engine.produce(tokens)
    return later


def _dies(_: Rig, engine: Engine) -> None:
    engine.crash()


def _is_lost(stage: Rig, engine: Engine) -> None:
    stage.lifecycle._context.books.fence(engine.name, Standing.LOST, "does not answer")


@pytest.mark.parametrize("goes", [_dies, _is_lost])
@pytest.mark.parametrize("stream", [True, False])
async def test_requests_of_an_engine_that_goes_are_sent_once_more_each(
    goes: Callable[[Rig, Engine], None], stream: bool
) -> None:
    """To an engine that is left, and behind the tokens that had arrived; those of other engines stay where they are."""
    stage = rig(3, min_engines=1, manual=True, capabilities=STREAMING)
    async with stage.lifecycle, anyio.create_task_group() as tasks:
        later = await _generating(stage, tasks, 6, stream=stream)
        assert [engine.in_flight for engine in stage.engines] == [2, 2, 2]
        goes(stage, stage["E1"])
        await anyio.sleep(1)
        assert [engine.in_flight for engine in stage.engines] == [0, 3, 3]
        await finish(stage)
        assert [one.value.output_ids for one in later] == [(3, 4, 5, 6, 7, 8)] * 6
        hops = Counter(tuple(len(segment.output_ids) for segment in one.value.segments) for one in later)
        assert hops == {(6,): 4, (2, 4): 2} if stream else {(6,): 6}
        assert Counter(event.engine for event in stage.of(events.GenerationSent)) == {"E1": 2, "E2": 3, "E3": 3}
        check(stage)
    await leave(stage)


@pytest.mark.parametrize("capabilities", [STREAMING, TELLING], ids=["silent", "reports versions"])
async def test_a_kept_request_whose_engine_dies_after_the_publication_is_not_exact(capabilities: Capabilities) -> None:
    """Its tokens are of the version published when it was sent, or of the next: which, died with the engine."""
    stage = rig(2, min_engines=1, manual=True, capabilities=capabilities)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        [later] = await _generating(stage, tasks, 1)
        await lifecycle.publish(SOURCE, version=1, mode=PauseMode.KEEP)
        await anyio.wait_all_tasks_blocked()
        first = next(engine for engine in stage.engines if engine.in_flight)
        first.produce(1)
        first.crash()
        await anyio.sleep(1)
        await finish(stage)
        assert later.value.versions == (0, 0, 0, 1, 1, 1)
        assert [segment.exact for segment in later.value.segments] == [False, True]
        check(stage)
    await leave(stage)


async def test_a_request_goes_on_where_nothing_is_paused() -> None:
    """An engine that is paused alone gets nothing while it owes a continue, and what it aborted is no failure."""
    stage = rig(2, manual=True, capabilities=STREAMING)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = await _generating(stage, tasks, 2, tokens=0, retry_budget=1)
        lifecycle._cohort.ledger.owe("E1", mode=PauseMode.ABORT, epoch=1, certain=True)
        stage["E1"]._abort()
        await anyio.wait_all_tasks_blocked()
        assert [engine.in_flight for engine in stage.engines] == [0, 2]
        assert all(not one.done for one in later)
        await finish(stage)
        lifecycle._cohort.ledger.continued("E1")
        assert [one.value.output_ids for one in later] == [(3, 4, 5, 6, 7, 8)] * 2
        check(stage)
    await leave(stage)


async def test_a_generation_in_one_piece_is_of_one_version() -> None:
    """With `partial_rollout=False` a publication discards what was made, and the result has none of the old version."""
    stage = rig(1, manual=True, capabilities=STREAMING)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        [later] = await _generating(stage, tasks, 1, partial_rollout=False)
        for version in (1, 2):
            await lifecycle.publish(SOURCE, version=version)
            await anyio.wait_all_tasks_blocked()
            stage["E1"].produce(1)
        await finish(stage)
        assert (later.value.versions, later.value.discarded) == ((2,) * 6, 3)
        check(stage)
    await leave(stage)


async def test_aborting_a_held_generation_in_one_piece_returns_what_was_made() -> None:
    """It was to begin again, but now it does not."""
    stage = rig(1, manual=True, capabilities=STREAMING)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        [later] = await _generating(stage, tasks, 1, partial_rollout=False)
        await bring_to(lifecycle, State.PAUSED)
        await anyio.wait_all_tasks_blocked()
        await lifecycle.abort_generation()
        await anyio.wait_all_tasks_blocked()
        assert (later.value.output_ids, later.value.finish_reason) == ((3, 4), "abort")
        check(stage)
    await leave(stage)


async def test_generations_one_after_the_other_are_spread_over_the_fleet() -> None:
    """No engine is always the first: each of three has a third of them."""
    stage = rig(3)
    async with stage.lifecycle as lifecycle:
        used = [(await lifecycle.generate(_asked(stream=False))).segments[0].engine for _ in range(9)]
        assert Counter(used) == {"E1": 3, "E2": 3, "E3": 3}
        check(stage)
    await leave(stage)
