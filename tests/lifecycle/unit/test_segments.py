"""Generation requests on their way: where they go, when they wait, and which version made which token."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lifecycle import Generation, GenerationRequest, PauseMode, Standing, State
from lifecycle import events as e
from lifecycle.errors import LifecycleClosed, LifecycleError, LifecycleFaulted
from lifecycle.generation import VersionSpan
from lifecycle.ports import Capabilities
from lifecycle.testing import ScriptedEngine

from .crowd import a_few_turns, until
from .workbench import Workbench, a_ticket, serving_cohort, workbench

pytestmark = pytest.mark.anyio

REPORTING = Capabilities(pause_modes=frozenset(PauseMode), reports_versions=True)


def _request(new: int = 4, **fields: Any) -> GenerationRequest:
    return GenerationRequest(input_ids=(1, 2), max_new_tokens=new, **fields)


def _manual(*names: str, **fields: Any) -> Workbench:
    """Put together engines that make a token only when the test says so."""
    return workbench(*(ScriptedEngine(name, manual=True, **fields) for name in names or ("left", "right")))


class Asking:
    """Generations under way in a task group."""

    def __init__(self, bench: Workbench, tasks: anyio.abc.TaskGroup) -> None:
        self.bench = bench
        self.tasks = tasks
        self.results: list[Generation] = []

    async def start(self, request: GenerationRequest) -> None:
        """Ask, and return once the request has reached an engine, or waits."""
        self.tasks.start_soon(self._ask, request)
        await a_few_turns()

    async def _ask(self, request: GenerationRequest) -> None:
        self.results.append(await self.bench.segments.generate(request, a_ticket()))


def _load(bench: Workbench) -> list[int]:
    return [engine.in_flight for engine in bench.engines.values()]


async def test_a_request_goes_to_the_engine_with_the_fewest_in_flight() -> None:
    """Load is spread evenly, and follows what comes back."""
    bench = _manual("a", "b", "c")
    async with anyio.create_task_group() as tasks:
        asking = Asking(bench, tasks)
        for _ in range(4):
            await asking.start(_request())
        assert (_load(bench), bench.segments.in_flight) == ([2, 1, 1], 4)
        bench.engines["a"].produce(4)
        await until(lambda: len(asking.results) == 2)
        await asking.start(_request())
        assert _load(bench) == [1, 1, 1]
        tasks.cancel_scope.cancel()
    assert bench.segments.in_flight == 0


async def test_requests_of_a_session_stay_with_their_engine_while_it_serves() -> None:
    """A conversation keeps its cache, whatever the load; when its engine is fenced it moves, and stays there."""
    bench = _manual()
    async with anyio.create_task_group() as tasks:
        asking = Asking(bench, tasks)
        for _ in range(3):
            await asking.start(_request(session="chat"))
        assert _load(bench) == [3, 0]
        bench.cohort.fleet.update("left", standing=Standing.STALE)
        await asking.start(_request(session="chat"))
        bench.cohort.fleet.update("left", standing=Standing.SERVING)
        await asking.start(_request(session="chat"))
        assert _load(bench) == [3, 2]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("fenced", [Standing.STALE, Standing.LOST])
async def test_nothing_is_routed_to_an_engine_that_does_not_serve(fenced: Standing) -> None:
    """A fenced engine gets no request, and neither does one whose pause is not matched."""
    bench = _manual("fenced", "owing", "serving")
    bench.cohort.fleet.update("fenced", standing=fenced)
    bench.cohort.ledger.owe("owing", mode=PauseMode.ABORT, epoch=1)
    async with anyio.create_task_group() as tasks:
        asking = Asking(bench, tasks)
        for _ in range(2):
            await asking.start(_request())
        assert _load(bench) == [0, 0, 2]
        tasks.cancel_scope.cancel()


def _hold(bench: Workbench) -> None:
    bench.cohort.generation_held = True


def _release(bench: Workbench) -> None:
    bench.cohort.generation_held = False


def _fence_all(bench: Workbench) -> None:
    for name in bench.cohort.fleet:
        bench.cohort.fleet.update(name, standing=Standing.STALE)


def _serve_one(bench: Workbench) -> None:
    bench.cohort.fleet.update("right", standing=Standing.SERVING)


@pytest.mark.parametrize(("close", "reopen"), [(_hold, _release), (_fence_all, _serve_one)])
async def test_a_request_waits_while_it_cannot_go_and_leaves_when_told(
    close: Callable[[Workbench], None], reopen: Callable[[Workbench], None]
) -> None:
    """While generation is held, or nobody serves, nothing leaves; it wakes by the signal, not by looking again."""
    bench = _manual()
    close(bench)
    async with anyio.create_task_group() as tasks:
        asking = Asking(bench, tasks)
        await asking.start(_request())
        reopen(bench)
        await a_few_turns()
        assert (_load(bench), bench.told(e.GenerationSent)) == ([0, 0], [])
        bench.segments.changed.give()
        await until(lambda: bench.segments.in_flight == 1)
        assert len(bench.told(e.GenerationSent)) == 1
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("state", "error"), [(State.FAULTED, LifecycleFaulted), (State.CLOSED, LifecycleClosed)])
async def test_a_held_request_is_told_when_it_waits_in_vain(state: State, error: type[LifecycleError]) -> None:
    """A fault or the end reaches requests that are held, and those that come after."""
    bench = _manual()
    _hold(bench)
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(error):
                await bench.segments.generate(_request(), a_ticket())

        tasks.start_soon(ask)
        await a_few_turns()
        bench.move(state)
    await ask()


async def test_tokens_carry_the_version_pinned_when_their_request_was_sent() -> None:
    """Where the engine reports nothing: the version at sending; inexact where a publication fell within."""
    bench = _manual("left")
    async with anyio.create_task_group() as tasks:
        asking = Asking(bench, tasks)
        await asking.start(_request(new=4))
        bench.engines["left"].produce(2)
        bench.cohort.version = 1
        bench.engines["left"].produce(2)
    [segment] = asking.results[0].segments
    assert (segment.engine, segment.versions, segment.exact) == ("left", (0, 0, 0, 0), False)


async def test_an_abort_between_two_versions_gives_each_token_its_own() -> None:
    """Tokens before the publication are of the old version, tokens after it of the new one, each segment exact."""
    bench = _manual("left")
    async with anyio.create_task_group() as tasks:
        asking = Asking(bench, tasks)
        await asking.start(_request(new=4))
        bench.engines["left"].produce(3)
        _hold(bench)
        bench.engines["left"]._abort()
        await until(lambda: bench.segments.in_flight == 0)
        bench.cohort.version, bench.cohort.epoch = 1, 1
        _release(bench)
        bench.segments.changed.give()
        await until(lambda: bench.segments.in_flight == 1)
        bench.engines["left"].produce(1)
    generation = asking.results[0]
    assert (generation.versions, [s.exact for s in generation.segments]) == ((0, 0, 0, 1), [True, True])
    assert [(f.tokens, f.finish_reason) for f in bench.told(e.SegmentReceived)] == [(3, "abort"), (1, "length")]


async def test_spans_that_the_engine_reports_become_versions() -> None:
    """Each token is of the label the engine says made it, over publications within one request."""
    bench = _manual("left", capabilities=REPORTING, label="run:3")
    bench.cohort.version = 3
    async with anyio.create_task_group() as tasks:
        asking = Asking(bench, tasks)
        await asking.start(_request(new=4))
        engine = bench.engines["left"]
        for label, tokens in (("run:3", 2), ("run:4", 1), ("other:9", 1)):
            engine.label = label
            engine.produce(tokens)
    [segment] = asking.results[0].segments
    assert segment.spans == (
        VersionSpan(label="run:3", start=0, end=2),
        VersionSpan(label="run:4", start=2, end=3),
        VersionSpan(label="other:9", start=3, end=4),
    )
    assert (segment.versions, segment.exact) == ((3, 3, 4, None), True)


async def test_landed_returns_when_the_last_request_is_back() -> None:
    """A drain waits for every request in flight, and for none at all where there is none."""
    bench = _manual()
    await bench.segments.landed()
    landed: list[bool] = []

    async def wait() -> None:
        await bench.segments.landed()
        landed.append(True)

    async with anyio.create_task_group() as tasks:
        asking = Asking(bench, tasks)
        for _ in range(2):
            await asking.start(_request())
        tasks.start_soon(wait)
        bench.engines["left"].produce(4)
        await until(lambda: len(asking.results) == 1)
        await a_few_turns()
        assert landed == []
        bench.engines["right"].produce(4)
    assert landed == [True]


async def test_a_cancelled_caller_leaves_nothing_in_flight() -> None:
    """The engine sees the connection close; the loss is told as a segment that ended in an error."""
    bench = _manual("left")
    async with anyio.create_task_group() as tasks:
        await Asking(bench, tasks).start(_request())
        tasks.cancel_scope.cancel()
    assert (bench.segments.in_flight, _load(bench)) == (0, [0])
    assert [(f.tokens, f.finish_reason) for f in bench.told(e.SegmentReceived)] == [(0, "error")]


async def test_the_versions_of_a_fleet_without_any_are_none() -> None:
    """Before the first publication tokens have no version to carry."""
    bench = workbench(ScriptedEngine("left"), cohort=serving_cohort("left", version=None))
    assert (await bench.segments.generate(_request(new=2), a_ticket())).versions == (None, None)
