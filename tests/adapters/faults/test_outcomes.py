"""Three-valued outcomes: what is known after every request of both dialects that meets a fault on a real connection."""

import anyio
import pytest

from adapters.engines import HttpEngine, SGLangEngine, VLLMEngine, http
from adapters.testing import Delay, FaultProxy
from lifecycle import errors
from lifecycle import events as e
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest

from .servers import Obedient
from .stage import in_between
from .table import EXCEPTIONS, FAULTS, REQUESTS, Known, expected

ENGINES = {"sglang": SGLangEngine, "vllm": VLLMEngine}
FACTS = EngineFacts(name="E1", paused=True)
REQUEST = GenerationRequest(input_ids=[1, 2], max_new_tokens=1)
LONG, SHORT = 30.0, 0.2


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat at once: what is tested here is how often."""
    monkeypatch.setattr(http, "BACKOFF_SECONDS", 0.0)


async def known_after(proxy: FaultProxy, engine: HttpEngine, request: str, fault: str) -> Known:
    """Let `request` meet `fault` at an engine that was probed before."""
    asked, rule = REQUESTS[request], FAULTS[fault]
    route = asked.routes[str(engine.dialect.kind)]
    assert (await engine.perform(e.ProbeEngine(), FACTS, timeout=LONG)).done
    earlier = len(proxy.requests(route))
    if rule.fault is None:
        await proxy.refuse()
    else:
        proxy.always(route, rule.fault)
    known = await _ask(engine, asked.request, SHORT if fault == "silence" else LONG)
    proxy.heal()
    proxy.accept()
    return Known(
        outcome=known.outcome,
        unreachable=known.unreachable,
        untouched=known.untouched,
        raised=known.raised,
        arrivals=len(proxy.requests(route)) - earlier,
    )


async def _ask(engine: HttpEngine, request: e.Request | None, timeout: float) -> Known:
    if request is not None:
        ack = await engine.perform(request, FACTS, timeout=timeout)
        return Known(outcome=ack.outcome, unreachable=ack.unreachable, untouched=ack.untouched)
    try:
        await engine.generate(REQUEST, timeout=timeout)
    except errors.LifecycleError as error:
        return Known(raised=type(error))
    return Known()


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
@pytest.mark.parametrize("request_", REQUESTS)
async def test_after_a_fault_no_more_and_no_less_is_known_than_the_table_says(dialect: str, request_: str) -> None:
    """Outcome, reachability, whether weights may have been touched, and how often the call arrived: fault by fault."""
    actual: dict[str, Known] = {}
    async with in_between(Obedient(dialect)) as (proxy, _):
        for fault in FAULTS:
            engine = ENGINES[dialect](proxy.url)
            actual[fault] = await known_after(proxy, engine, request_, fault)
            await engine.aclose()
    assert {fault: expected(dialect, request_, fault) for fault in FAULTS} == actual


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
@pytest.mark.parametrize("request_", REQUESTS)
async def test_without_a_fault_every_request_is_done_by_one_call(dialect: str, request_: str) -> None:
    """The table is about faults: the server behind the proxy would have done it."""
    async with in_between(Obedient(dialect)) as (proxy, _):
        engine = ENGINES[dialect](proxy.url)
        asked = REQUESTS[request_]
        if asked.request is None:
            assert (await engine.generate(REQUEST, timeout=LONG)).output_ids == (7,)
        else:
            assert (await engine.perform(asked.request, FACTS, timeout=LONG)).done
        assert len(proxy.requests(asked.routes[dialect])) == 1
        await engine.aclose()


def test_the_exceptions_name_rows_of_the_table() -> None:
    """An exception that no row has would be dead, and one that says what the rules say would be none."""
    for dialect, request, fault in EXCEPTIONS:
        assert dialect in ENGINES
        assert request in REQUESTS
        assert fault in FAULTS


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", ENGINES)
async def test_no_request_waits_for_the_connection_of_another(dialect: str) -> None:
    """There is no pool to run out of: sixty calls are all with the server before any of them is answered."""
    calls = 30
    async with in_between(Obedient(dialect)) as (proxy, _):
        engine = ENGINES[dialect](proxy.url)
        control, generation = (REQUESTS[name].routes[dialect] for name in ("abort", "generate"))
        go = anyio.Event()
        proxy.always(control, Delay(go)).always(generation, Delay(go))
        async with anyio.create_task_group() as tasks:
            for _ in range(calls):
                tasks.start_soon(_done, engine)
                tasks.start_soon(_generated, engine)
            await proxy.until(calls, control)
            await proxy.until(calls, generation)
            go.set()
        await engine.aclose()


async def _done(engine: HttpEngine) -> None:
    assert (await engine.perform(e.AbortGeneration(), FACTS, timeout=LONG)).done


async def _generated(engine: HttpEngine) -> None:
    assert (await engine.generate(REQUEST, timeout=LONG)).output_ids == (7,)
