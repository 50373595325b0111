"""Executors at work, ours and one written by hand: rollouts a second, and how soon a publication has effect."""

import random
import time
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import anyio

from lifecycle import Episode, Lifecycle, RolloutExecutor, StalenessBudget, events
from lifecycle.testing import ScriptedEngine, ScriptedTransfer

from .gate import fill
from .handwritten import POLL_RUNNING, HandWrittenExecutor
from .measuring import Contest, Figure, ratio

ROLLOUTS = 20_000
AT_ONCE = 1_024
WAITING = 1_000

FIGURES = {
    "rate": Figure("no-op rollouts, taken by wait()", "1/s", at_least=20_000.0),
    "rate trio": Figure("  on trio", "1/s", more_is_better=True),
    "rate handwritten": Figure("  written by hand, until the last result is there", "1/s", more_is_better=True),
    "rate handwritten taken": Figure("  written by hand, taken by wait()", "1/s", more_is_better=True),
    "first": Figure("from commit to the first of 1 000 running", "ms", at_most=5.0),
    "first resumed": Figure("  from resume to the first running", "ms"),
    "last": Figure("  from commit to the last running", "ms"),
    "publish": Figure("  the whole publication, two engines", "ms"),
    "first handwritten": Figure("  by hand, from version to the first running", "ms"),
    "last handwritten": Figure("  by hand, from version to the last running", "ms"),
}


def contest() -> Contest:
    """Return what takes turns."""
    return {
        "executor": lambda: {"rate": anyio.run(_rate)},
        "executor on trio": lambda: {"rate trio": anyio.run(_rate, backend="trio")},
        "executor written by hand": _rate_handwritten,
        "publication": lambda: anyio.run(_publication),
        "publication by hand": _publication_handwritten,
    }


def ratios(figures: Mapping[str, Figure]) -> list[Figure]:
    """Return how far ours is ahead. Between executors, what counts is what the trainer sees: results it can take."""
    rate, by_hand = figures["rate"], figures["rate handwritten"]
    return [
        ratio("rollouts a second through wait(), ours : by hand", rate, figures["rate handwritten taken"], target=1.0),
        ratio("  the same without its wait()", rate, by_hand),
        ratio(
            "from publication to running, by hand : ours", figures["first handwritten"], figures["first"], target=1.0
        ),
    ]


class _Source:
    """Weights that `ScriptedTransfer` does not look at."""

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield from ()


async def _echo(_: Episode, data: Any) -> Any:
    return data


async def _rate() -> float:
    """Return rollouts a second, from the first submission until every result was taken."""
    budget = StalenessBudget(batch_size=ROLLOUTS, max_staleness=0, max_concurrent=AT_ONCE)
    lifecycle = Lifecycle([ScriptedEngine()], budget=budget)
    async with lifecycle, RolloutExecutor(lifecycle) as executor:
        began = perf_counter()
        for number in range(ROLLOUTS):
            executor.submit(_echo, number)
        await executor.wait(ROLLOUTS)
        return ROLLOUTS / (perf_counter() - began)


async def _publication() -> Mapping[str, float]:
    """Return milliseconds between a publication and the first, and the last, rollout that it lets run."""
    budget = StalenessBudget(batch_size=WAITING, max_staleness=0)
    engines = [ScriptedEngine("E1"), ScriptedEngine("E2")]
    lifecycle = Lifecycle(engines, transfer=ScriptedTransfer(), budget=budget)
    fill(budget)
    when: dict[type[events.Event], float] = {}

    def note(event: events.Event) -> None:
        when[type(event)] = perf_counter()
        if isinstance(event, events.SubmissionResumed):
            unsubscribe()

    running: list[float] = []

    async def workflow(_: Episode, data: Any) -> Any:
        running.append(perf_counter())
        return data

    async with lifecycle, RolloutExecutor(lifecycle) as executor:
        for number in range(WAITING):
            executor.submit(workflow, number)
        unsubscribe = lifecycle.subscribe(note)
        began = perf_counter()
        await lifecycle.publish(_Source(), version=1)
        over = perf_counter()
        await executor.wait(WAITING)
    committed, resumed = when[events.VersionAdvanced], when[events.SubmissionResumed]
    return {
        "first": (running[0] - committed) * 1e3,
        "first resumed": (running[0] - resumed) * 1e3,
        "last": (running[-1] - committed) * 1e3,
        "publish": (over - began) * 1e3,
    }


def _rate_handwritten() -> Mapping[str, float]:
    """Return rollouts a second, from the first submission until the last result is there, and until it was taken."""
    executor = HandWrittenExecutor(batch_size=ROLLOUTS, max_staleness=0, max_concurrent=AT_ONCE)

    async def echo(data: Any) -> Any:
        return data

    executor.start()
    began = perf_counter()
    for number in range(ROLLOUTS):
        executor.submit(echo, number)
    executor.wait(ROLLOUTS)
    taken = perf_counter() - began
    executor.stop()
    return {
        "rate handwritten": ROLLOUTS / (executor.handed_over_at - began),
        "rate handwritten taken": ROLLOUTS / taken,
    }


def _publication_handwritten() -> Mapping[str, float]:
    executor = HandWrittenExecutor(batch_size=WAITING, max_staleness=0, max_concurrent=WAITING)
    executor.counters.accepted = WAITING
    running: list[float] = []

    async def workflow(data: Any) -> Any:
        running.append(perf_counter())
        return data

    executor.start()
    for number in range(WAITING):
        executor.submit(workflow, number)
    # The trainer publishes at any moment of the polling interval.
    time.sleep(POLL_RUNNING * (2 + random.random()))
    began = perf_counter()
    executor.set_version(1)
    executor.wait(WAITING)
    executor.stop()
    return {"first handwritten": (running[0] - began) * 1e3, "last handwritten": (running[-1] - began) * 1e3}
