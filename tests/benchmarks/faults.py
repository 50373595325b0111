"""What goes wrong in a soak: workflows, filters and engines that misbehave, each as often as it is told."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from lifecycle import Episode, GenerationRequest, events
from lifecycle.testing import Crash, LandLate, LoseReply, Refuse, ScriptedEngine, Step


class Foreign(BaseException):
    """Another library's idea of ending something."""


class Bad(Exception):
    """What a workflow, a filter or a dataset raises."""


class Workflows:
    """Workflows that do something else each time, as the dice say."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    async def one(self, episode: Episode, data: Any) -> Any:
        """Run a rollout, in one of many ways.

        Cancellation: passed on.
        """
        chance = self._dice.random()
        if chance < 0.04:
            return await self._generate(episode, data)
        if chance < 0.16:
            return await self._misbehave(episode)
        if chance < 0.5:
            await checkpoint()
        elif chance < 0.51:
            await anyio.sleep(0.001)
        return data

    def blocking(self, _: Any, data: Any) -> Any:
        """Run a rollout in a thread."""
        if self._dice.random() < 0.2:
            raise Bad("in a thread")
        return data

    async def _generate(self, episode: Episode, data: Any) -> Any:
        request = GenerationRequest(input_ids=(1, 2), max_new_tokens=4, retry_budget=2, session=str(data % 7))
        await episode.generate(request)
        return data

    async def _misbehave(self, episode: Episode) -> Any:
        match self._dice.randrange(9):
            case 0 | 1:
                return None
            case 2:
                raise Bad("a workflow")
            case 3:
                raise Foreign
            case 4:
                await anyio.sleep(30.0)  # until the time limit
            case 5:
                await _cancel_itself(at_once=True)
            case 6:
                await _cancel_itself(at_once=False)
            case 7:
                raise asyncio.CancelledError  # of nobody
            case _ if episode.ticket.group_size > 1:  # which is not one member's to settle
                raise Bad("a member")
            case _ if self._dice.random() < 0.5:
                episode.ticket.reject()
            case _:
                episode.ticket.accept()
        return 0


async def _cancel_itself(*, at_once: bool) -> None:
    task = asyncio.current_task()
    if task is not None:
        task.cancel()
    if at_once:
        await asyncio.sleep(0)


class Filters:
    """Filters that reject one in ten, and raise one in fifty."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    async def one(self, _: Any) -> bool:
        """Judge a value.

        Cancellation: passed on.
        """
        chance = self._dice.random()
        if chance < 0.02:
            raise Bad("a filter")
        if chance < 0.022:
            raise Foreign
        if chance < 0.1:
            await checkpoint()
        return chance < 0.9


_STEPS: tuple[Callable[[], Step], ...] = (Refuse, LoseReply, lambda: LoseReply(applied=False), Crash)
_LATE = (events.PauseGeneration, events.ContinueGeneration)
"""Requests that may land late. The others do harm then that nobody could prevent."""
_KINDS = (
    *_LATE,
    events.BeginUpdate,
    events.TransferWeights,
    events.FinishUpdate,
    events.VerifyWeights,
    events.Canary,
)


def let_an_engine_fail(engines: list[ScriptedEngine], dice: random.Random) -> None:
    """Let the next publication meet something."""
    engine = dice.choice(engines)
    if dice.random() < 0.2:
        engine.crash()
    elif dice.random() < 0.2:
        engine.on(GenerationRequest, dice.choice((Refuse(), LoseReply(), Crash())))
    else:
        kind, step = dice.choice(_KINDS), dice.choice(_STEPS)()
        engine.on(kind, LandLate() if kind in _LATE and dice.random() < 0.3 else step)
