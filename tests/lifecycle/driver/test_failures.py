"""Each request fails in each way at each engine, in the middle of a publication: nothing is left that is not true."""

from collections.abc import Callable

import pytest

from lifecycle import State, errors, events
from lifecycle.table import TRANSITIONS
from lifecycle.testing import Crash, Delay, LandLate, LoseReply, Refuse, Silence, Step

from .driver_rig import DEADLINES, NAMES, SOURCE, rig
from .invariants import check_now, cure, engines_named, leave

AT_ENGINES = tuple(dict.fromkeys(kind for row in TRANSITIONS for kind in row.requests if kind.fact is not None))

WAYS: dict[str, Callable[[float], Step]] = {
    "refuses": lambda _: Refuse(),
    "loses the reply": lambda _: LoseReply(applied=True),
    "loses the request": lambda _: LoseReply(applied=False),
    "lands late": lambda _: LandLate(),
    "is silent": lambda _: Silence(),
    "crashes": lambda _: Crash(),
    "is too slow": lambda deadline: Delay(2 * deadline),
}
TOLERANT = (events.AbortGeneration, events.CloseTransfer)
"""Requests whose failure is made good by what follows."""


@pytest.mark.anyio
@pytest.mark.parametrize("min_engines", [None, 1])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", AT_ENGINES)
async def test_a_publication_in_which_a_request_fails_leaves_the_fleet_truthful_and_curable(
    kind: type[events.Request], way: str, name: str, min_engines: int | None
) -> None:
    """Whatever one engine does with one kind of request, no invariant breaks, and the fleet comes back."""
    stage = rig(min_engines=min_engines)
    lifecycle, odd = stage.lifecycle, stage[name]
    await lifecycle.attach()
    await lifecycle.resume()
    odd.on(kind, *[WAYS[way](DEADLINES.of(kind))] * 40)
    if kind is events.AbandonUpdate:
        stage.transfer.fail_on = "send"
    if kind is events.BeginUpdate:
        # Later than the abandonment it cannot land by the library's doing: here it lands right after it.
        odd.acted = lambda engine, request: engine.land() if isinstance(request, events.AbandonUpdate) else None
    try:
        report = await lifecycle.publish(SOURCE, version=1)
    except errors.LifecycleError as error:
        assert lifecycle.version in {0, 1}
        if kind is not events.AbandonUpdate:
            assert engines_named(error) >= {name}, error  # noqa: PT017 - whether it is raised depends on the case
            assert lifecycle.version == 0
    else:
        assert lifecycle.version == 1
        blamed = {failure.engine for failure in report.failures if isinstance(failure, errors.EngineFailure)}
        assert blamed <= {name}
        assert set(report.fenced) == blamed
    check_now(stage)
    if way == "lands late":
        odd.land()
    if kind in {events.ProbeEngine, events.Settle}:
        assert lifecycle.state is State.RUNNING
    await cure(stage)
    await leave(stage)
