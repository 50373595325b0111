"""Timeouts, retries and connections, on real sockets: what a client lost to a bad server it has back with a good one.

In real time; nothing here waits for time to pass, and nothing is measured.
"""

from collections.abc import Callable, Iterator

import anyio
import anyio.to_thread
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from adapters.engines import HttpEngine, SGLangEngine, VLLMEngine
from adapters.testing import Answer, Drop, Fault, Silence
from lifecycle import Deadlines, Lifecycle, State, events
from lifecycle.fleet import EngineFacts
from lifecycle.testing import ScriptedTransfer
from tests.adapters.engines.http_stage import REQUEST, SOON, busy
from tests.adapters.engines.wire_server import serving
from tests.adapters.faults.servers import Obedient
from tests.adapters.faults.stage import in_between
from tests.lifecycle.driver.driver_rig import SOURCE

ENGINES: dict[str, Callable[..., HttpEngine]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}
FACTS = EngineFacts(name="E1")
FAULTS: dict[str, Fault] = {
    "silent": Silence(),
    "silent after": Silence(applied=True),
    "come back later": Answer(503, headers={"retry-after": "3600"}),
    "too many": Answer(429, headers={"retry-after": "3600"}),
    "dropped": Drop(reset=True),
}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run the test on both backends, in real time."""
    return str(request.param)


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_gets_well_is_reached_after_any_number_of_timeouts(dialect: str, fault: str) -> None:
    """Calls that timed out, were turned away for an hour, or were cut hold nothing that the next ones need."""
    async with in_between(Obedient(dialect)) as (proxy, _):
        engine = ENGINES[dialect](proxy.url)
        proxy.always("*", FAULTS[fault])

        async def ask() -> None:
            assert not (await engine.perform(events.ContinueGeneration(), FACTS, timeout=0.2)).done

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask)
        assert busy(engine) == 0
        proxy.heal()
        assert (await engine.perform(events.ContinueGeneration(), FACTS, timeout=20)).done
        assert (await engine.generate(REQUEST, timeout=20)).output_ids == (7,)
        await engine.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
async def test_a_call_that_waits_to_be_repeated_holds_up_no_other(dialect: str) -> None:
    """While a continue is turned away again and again, generation and other control calls go through."""
    async with in_between(Obedient(dialect)) as (proxy, _):
        engine = ENGINES[dialect](proxy.url)
        route = "/continue_generation" if dialect == "sglang" else "/resume"
        proxy.always(route, Answer(503, headers={"retry-after": "3600"}))
        # Far longer than the other calls may take.
        lifecycle = Lifecycle([engine], initial_version=7, deadlines=Deadlines(resume=600.0))
        async with lifecycle, anyio.create_task_group() as tasks:
            await lifecycle.suspend()
            await lifecycle.pause_generation()
            tasks.start_soon(lifecycle.continue_generation)
            await proxy.until(2, route)
            assert (await engine.perform(events.AbortGeneration(), FACTS, timeout=10)).done
            assert (await engine.generate(REQUEST, timeout=10)).output_ids == (7,)
            proxy.heal()
        assert lifecycle.state is State.CLOSED
        assert not lifecycle.engines[0].debt


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
async def test_cancelled_rollouts_leave_the_fleet_reachable(dialect: str) -> None:
    """200 generations cancelled in flight, then new weights: every control call goes through, and nothing is held."""
    async with in_between(Obedient(dialect)) as (proxy, _):
        engine = ENGINES[dialect](proxy.url)
        route = "/generate" if dialect == "sglang" else "/inference/v1/generate"
        transfer = ScriptedTransfer()
        async with Lifecycle([engine], transfer=transfer, initial_version=7) as lifecycle:
            proxy.always(f"POST {route}", Silence())
            met = len(proxy.requests(route))
            async with anyio.create_task_group() as tasks:
                for _ in range(200):
                    tasks.start_soon(lifecycle.generate, REQUEST)
                await proxy.until(met + 100, route)
                tasks.cancel_scope.cancel()
            assert (busy(engine), lifecycle.running) == (0, 0)
            proxy.heal()
            report = await lifecycle.publish(SOURCE, version=8)
            assert (report.failures, lifecycle.state) == ((), State.RUNNING)


# -------------------------------------------------------------------------------------------------- many event loops


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread of its own."""
    with start_blocking_portal() as portal:
        yield portal


def test_one_engine_serves_every_event_loop_that_asks(portal: BlockingPortal, anyio_backend: str) -> None:
    """Three lifecycles in plain code, one after the other, and a thread that asks in the middle of each."""
    with portal.wrap_async_context_manager(serving(Obedient("sglang"))) as server:
        engine = SGLangEngine(server.url)
        generated: list[str] = []

        async def ask() -> None:
            await engine.generate(REQUEST, timeout=20)
            generated.append("in a thread")
            await engine.aclose()

        async def live(version: int) -> None:
            lifecycle = Lifecycle([engine], transfer=ScriptedTransfer(), initial_version=version)
            with anyio.fail_after(SOON):
                async with lifecycle:
                    await lifecycle.generate(REQUEST)
                    await anyio.to_thread.run_sync(lambda: anyio.run(ask, backend=anyio_backend))
                    await lifecycle.publish(SOURCE, version=version + 1)
                    await lifecycle.generate(REQUEST)
                    generated.append("in plain code")

        for version in (7, 8, 9):
            anyio.run(live, version, backend=anyio_backend)
        assert generated == ["in a thread", "in plain code"] * 3
