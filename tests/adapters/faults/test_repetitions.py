"""What is sent again and what never is, through the whole driver, on real connections that fail."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from adapters.engines import SGLangEngine, VLLMEngine
from adapters.testing import PASS, Answer, Delay, Drop, Fault, FaultProxy, HalfClose, LandLate, Silence
from lifecycle import Deadlines, Lifecycle, State, errors
from lifecycle import events as e
from lifecycle.fleet import EngineFacts
from lifecycle.states import Outcome, PauseMode, Standing
from lifecycle.testing import ScriptedTransfer
from tests.lifecycle.driver.driver_rig import SOURCE, Sink

from .servers import Obedient
from .stage import SOON, in_between
from .table import REQUESTS

ENGINES = {"sglang": SGLangEngine, "vllm": VLLMEngine}
FACTS = EngineFacts(name="E1")
SLACK = 5.0
"""Seconds that a busy machine may add to a deadline."""
UPDATES = ("init group", "begin", "transfer", "finish")
LOST = {
    "dropped before": Drop(),
    "dropped after": Drop(applied=True),
    "half-closed": HalfClose(applied=True),
    "502": Answer(502, applied=True),
    "503": Answer(503),
    "not JSON": Answer(200, "<html>", applied=True),
}


@asynccontextmanager
async def running(dialect: str, **options: Any) -> AsyncIterator[tuple[Lifecycle, FaultProxy, Obedient, Sink]]:
    """Attach a lifecycle to one engine behind a proxy."""
    server, sink = Obedient(dialect), Sink()
    async with in_between(server) as (proxy, _):
        engine = ENGINES[dialect](proxy.url, name="E1")
        lifecycle = Lifecycle(
            [engine], transfer=ScriptedTransfer(buckets=2), initial_version=7, journal=sink, **options
        )
        async with lifecycle:
            assert lifecycle.state is State.RUNNING
            yield lifecycle, proxy, server, sink
            proxy.heal()


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
@pytest.mark.parametrize("lost", LOST)
async def test_a_continue_is_repeated_until_it_is_acknowledged(dialect: str, lost: str) -> None:
    """However its reply is lost, and more often than a connection's own retries: in the end the engine serves."""
    async with running(dialect) as (lifecycle, proxy, server, sink):
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        proxy.on(REQUESTS["continue"].routes[dialect], *[LOST[lost]] * 4)
        await lifecycle.continue_generation()
        assert (lifecycle.engines[0].standing, lifecycle.engines[0].debt) == (Standing.SERVING, None)
        (fact,) = [event for event in sink.events if isinstance(event, e.EngineContinued)]
        assert (fact.outcome, server.paused) == (Outcome.DONE, False)


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("update", UPDATES)
async def test_an_update_is_never_sent_again(dialect: str, update: str, lost: str) -> None:
    """A lost reply fails the publication: the call that may have been carried out arrived once."""
    async with running(dialect) as (lifecycle, proxy, _, __):
        asked = REQUESTS[update]
        route = asked.routes[dialect]
        proxy.on(route, LOST[lost])
        with pytest.raises(errors.PublicationFailed) as caught:
            await lifecycle.publish(SOURCE, version=8)
        assert caught.value.engines == ("E1",)
        failed = [seen for seen in proxy.requests(route) if seen.fault is not PASS]
        assert len(failed) == 1
        assert lifecycle.version == 7


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
async def test_a_publication_over_a_line_without_faults_succeeds(dialect: str) -> None:
    """The tests above fail by their faults alone; and each update is made once."""
    async with running(dialect) as (lifecycle, proxy, server, _):
        report = await lifecycle.publish(SOURCE, version=8)
        assert (report.failures, server.label, lifecycle.state) == ((), "run:8", State.RUNNING)
        counts = [len(proxy.requests(REQUESTS[update].routes[dialect])) for update in UPDATES]
        assert counts == [1, 1, 2, 1]


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
@pytest.mark.parametrize("refusal", [400, 401, 403, 404, 409, 429])
async def test_a_refusal_does_not_undo_a_lost_pause(dialect: str, refusal: int) -> None:
    """The first attempt may have paused the engine, so that a second one which is refused leaves it unknown."""
    server = Obedient(dialect)
    async with in_between(server) as (proxy, _):
        engine = ENGINES[dialect](proxy.url)
        route = REQUESTS["pause"].routes[dialect]
        proxy.on(route, Drop(applied=True)).always(route, Answer(refusal, {"message": "no"}))
        ack = await engine.perform(e.PauseGeneration(mode=PauseMode.ABORT), FACTS, timeout=SOON)
        assert (ack.outcome, server.paused) == (Outcome.UNKNOWN, True)
        await engine.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
async def test_a_call_that_is_turned_away_for_now_is_made_again(dialect: str) -> None:
    """A rate limit in front of an engine costs a little time, and fences nobody."""
    async with running(dialect) as (lifecycle, proxy, _, __):
        proxy.on(REQUESTS["continue"].routes[dialect], Answer(429, headers={"retry-after": "1"}))
        proxy.on(REQUESTS["pause"].routes[dialect], Answer(429))
        await lifecycle.publish(SOURCE, version=8)
        assert lifecycle.engines[0].standing is Standing.SERVING


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
@pytest.mark.parametrize("fault", [Drop(), Silence(), Answer(503)], ids=["dropped", "silent", "503"])
async def test_repetitions_end_with_the_deadline_of_their_request(dialect: str, fault: Fault) -> None:
    """However often a continue is repeated, its one outcome is on record when its time is up."""
    async with running(dialect, deadlines=Deadlines(resume=0.4)) as (lifecycle, proxy, _, sink):
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        route = REQUESTS["continue"].routes[dialect]
        proxy.always(route, fault)
        with anyio.fail_after(lifecycle.deadlines.resume + SLACK):
            await lifecycle.continue_generation()
        (fact,) = [event for event in sink.events if isinstance(event, e.EngineContinued)]
        assert fact.outcome is Outcome.UNKNOWN
        assert fact.seconds < lifecycle.deadlines.resume + SLACK
        assert len(proxy.requests(route)) > 1
        assert (lifecycle.state, lifecycle.engines[0].standing) == (State.FAULTED, Standing.LOST)


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
async def test_a_pause_that_lands_after_its_continue_is_continued_again(dialect: str) -> None:
    """Its reply was lost, the continue was acknowledged, and then it landed: the probe that follows tells."""
    late, landed = anyio.Event(), anyio.Event()
    probe, pause = (REQUESTS[name].routes[dialect] for name in ("probe", "pause"))
    async with running(dialect, deadlines=Deadlines(pause=0.4)) as (lifecycle, proxy, server, _):
        await lifecycle.suspend()
        proxy.always(pause, LandLate(late)).on(probe, Delay(landed))
        probes = len(proxy.requests(probe))
        async with anyio.create_task_group() as tasks:

            async def fail_to_pause() -> None:
                with pytest.raises(errors.PauseFailed):
                    await lifecycle.pause_generation()

            tasks.start_soon(fail_to_pause)
            await proxy.until(probes + 1, probe)
            late.set()
            await server.until_paused()
            landed.set()
        engine = lifecycle.engines[0]
        assert (server.paused, engine.debt, engine.standing) == (False, None, Standing.SERVING)
