"""Many rollouts against many publications: generation and updates exclude each other, and nobody is forgotten."""

import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lifecycle import PauseMode, StalenessBudget, State, events
from lifecycle.events import Request
from lifecycle.testing import Delay
from tests.lifecycle.driver.driver_rig import SOURCE, Engine, Rig, prompt, rig
from tests.lifecycle.driver.invariants import check, leave

pytestmark = pytest.mark.anyio

ROLLOUTS, PUBLICATIONS = 20, 15
SLOW = (events.PauseGeneration, events.BeginUpdate, events.TransferWeights, events.FinishUpdate)
"""Requests that take longer than a token does, so that tokens fall within an update if anything lets them."""


class Excluding:
    """Notes every engine that makes a token while any engine is being written to."""

    def __init__(self, stage: Rig) -> None:
        self.broken: list[str] = []
        self.tokens = 0
        self.accepted = anyio.Event()
        self._updating: set[str] = set()
        for engine in stage.engines:
            engine.acted = self._acted
            engine._make = self._watched(engine)  # type: ignore[method-assign, assignment]
            for kind in SLOW:
                engine.on(kind, *[Delay(0.05)] * PUBLICATIONS)

    async def until_accepted(self) -> None:
        """Wait until a rollout is accepted from now on."""
        self.accepted = anyio.Event()
        await self.accepted.wait()

    def _acted(self, engine: Engine, request: Request) -> None:
        if isinstance(request, events.BeginUpdate):
            self._updating.add(engine.name)
        elif isinstance(request, events.FinishUpdate):
            self._updating.discard(engine.name)

    def _watched(self, engine: Engine) -> Callable[[Any, int], None]:
        make = engine._make

        def watched(generation: Any, tokens: int) -> None:
            self.tokens += tokens
            if self._updating:
                self.broken.append(f"{engine.name} generated while {self._updating} took weights")
            make(generation, tokens)

        return watched


@pytest.mark.parametrize("mode", PauseMode)
async def test_generating_and_updating_exclude_each_other(mode: PauseMode) -> None:
    """Through random arrivals and cancellations: never both at once, no wake-up is lost, and no capacity."""
    chance = random.Random(mode.value)
    budget = StalenessBudget(batch_size=8, max_staleness=1, max_concurrent=12)
    stage = rig(2, budget=budget, manual=True, buckets=1)
    watch = Excluding(stage)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:

        async def rollouts() -> None:
            while True:
                with anyio.move_on_after(chance.choice([0.01, 0.3, 100])):
                    async with lifecycle.admit() as ticket:
                        await lifecycle.generate(prompt(chance.randint(1, 4)), ticket=ticket)
                        ticket.accept()
                        lifecycle.discard([ticket])
                        watch.accepted.set()
                await anyio.sleep(chance.random() / 20)

        async def work(engine: Engine) -> None:
            while True:
                await anyio.sleep(0.02)
                engine.produce()

        for _ in range(ROLLOUTS):
            tasks.start_soon(rollouts)
        for engine in stage.engines:
            tasks.start_soon(work, engine)
        for version in range(1, PUBLICATIONS + 1):
            await lifecycle.publish(SOURCE, version=version, mode=mode, consumed=0)
            assert lifecycle.state is State.RUNNING
            with anyio.fail_after(60):
                await watch.until_accepted()
        tasks.cancel_scope.cancel()
    assert watch.broken == []
    assert watch.tokens > PUBLICATIONS
    assert (lifecycle.running, budget.running, lifecycle._context.gate.waiting) == (0, 0, 0)
    assert budget.submitted == budget.accepted + budget.rejected
    check(stage)
    await leave(stage)
