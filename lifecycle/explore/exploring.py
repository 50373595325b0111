"""The exploration itself."""

import asyncio
import time
from typing import Any

import anyio
from attrs import evolve

from lifecycle.cohort import FleetPolicy
from lifecycle.states import PauseMode

from .report import Exploration
from .retrace import retrace
from .search import Search
from .stage import Stage
from .truth import Truth
from .world import FAR_AWAY


def explore(
    engines: int = 2,
    faults: int = 3,
    *,
    min_engines: int | None = None,
    buckets: int = 1,
    mode: PauseMode = PauseMode.ABORT,
    at_risk_from_begin: bool = False,
    publish: bool = False,
    found: tuple[Truth, ...] | None = None,
) -> Exploration:
    """Go through everything that `engines` engines and at most `faults` faults can do to a lifecycle.

    `min_engines`: as in `FleetPolicy`; `None` for all. `buckets`: how many a version has. `at_risk_from_begin`: engines
    are like vLLM, whose weights are at risk as soon as an update is begun. `publish`: try whole publications, too, with
    their ways back. `found`: how ATTACH finds the engines;
    `None` for engines that generate, and that nothing has labelled. Stops at the first predicate that does not hold;
    the way there is the one with the fewest faults, and then the fewest steps. Raises `ValueError` for fewer than one
    engine or bucket, and fewer than no fault.
    """
    if engines < 1 or buckets < 1 or faults < 0:
        raise ValueError(f"{engines} engines, {buckets} buckets and {faults} faults leave nothing to explore")
    policy = FleetPolicy(min_engines=min_engines)
    stage = Stage(engines, policy=policy, mode=mode, buckets=buckets, at_risk=at_risk_from_begin)
    search = Search(stage, faults, publish=publish)
    search.start(stage.beginning(found or (Truth(),) * engines))
    return go_through(search)


def go_through(search: Search) -> Exploration:
    """Go through everything that follows from where `search` was started."""
    started = time.monotonic()
    result: Exploration = anyio.run(_explore, search, backend_options={"loop_factory": _TimelessLoop})
    return evolve(result, seconds=time.monotonic() - started)


async def _explore(search: Search) -> Exploration:
    with anyio.CancelScope(deadline=FAR_AWAY):
        broken = await search.close()
        counterexample = None if broken is None else await retrace(search, broken)
    return Exploration(
        engines=len(search.stage.names),
        faults=search.faults,
        states=search.states,
        edges=search.edges,
        depth=search.depth,
        seconds=0.0,
        counterexample=counterexample,
    )


class _TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop in which no time passes, so that no deadline does, and a run can be repeated exactly."""

    def time(self) -> float:
        """Return the same time, always."""
        return 0.0

    def call_at(self, *call: Any, **context: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        """Return a handle of what is never called: kept, such handles would fill the memory."""
        when, callback, *args = call
        return asyncio.TimerHandle(when, callback, args, self, **context)
