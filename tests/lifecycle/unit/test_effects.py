"""Requests performed: each ends in exactly one outcome, whatever the engine, the clock or the caller does."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lifecycle import Deadlines, Outcome, PauseMode
from lifecycle import events as e
from lifecycle.errors import EngineFailure
from lifecycle.fleet import EngineFacts
from lifecycle.ports import Acknowledgement
from lifecycle.testing import Answer, Delay, LoseReply, Refuse, ScriptedEngine, Silence

from .crowd import a_few_turns, until
from .workbench import Workbench, publication_of, workbench

pytestmark = pytest.mark.anyio

SOON = 0.05
"""Seconds: a deadline that is meant to pass."""
TO_ENGINES = sorted(
    (kind for kind in e.all_events().values() if issubclass(kind, e.Request) and kind.fact is not None),
    key=lambda kind: kind.__name__,
)


def _bench(*steps: Any, on: type[e.Request] = e.PauseGeneration, **fields: Any) -> Workbench:
    """Put two engines together, the first of which meets requests with `steps`."""
    return workbench(ScriptedEngine("left").on(on, *steps), ScriptedEngine("right"), **fields)


def _outcomes(bench: Workbench, kind: type[e.Request]) -> dict[str, Outcome]:
    assert kind.fact is not None
    facts = bench.told(kind.fact)
    assert len({fact.engine for fact in facts}) == len(facts)
    return {fact.engine: fact.outcome for fact in facts}


async def test_a_request_reaches_every_named_engine_at_once() -> None:
    """Engines do not wait for each other, and each outcome is told once, answering its own request."""
    bench = _bench(Delay(3600))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.effects.fan_out, e.PauseGeneration, ["left", "right"])
        await until(lambda: [engine.kinds for engine in bench.engines.values()] == [["PauseGeneration"]] * 2)
        await until(lambda: [fact.engine for fact in bench.told(e.EnginePaused)] == ["right"])
        tasks.cancel_scope.cancel()
    requests = {request.engine: request.seq for request in bench.told(e.PauseGeneration)}
    assert {fact.engine: fact.request for fact in bench.told(e.EnginePaused)} == requests


async def test_the_result_names_what_each_engine_said() -> None:
    """Acknowledgements by name, and one failure for each request that is not known to be done."""
    bench = _bench(Refuse("not now"), on=e.FlushCache)
    result = await bench.effects.fan_out(e.FlushCache, ["left", "right"])
    assert {name: ack.outcome for name, ack in result.acknowledgements.items()} == {
        "left": Outcome.NOT_DONE,
        "right": Outcome.DONE,
    }
    [failure] = result.failures
    assert isinstance(failure, EngineFailure)
    assert (failure.engine, failure.request, failure.outcome, failure.detail) == (
        "left", "FlushCache", Outcome.NOT_DONE, "not now",
    )  # fmt: skip


async def test_nobody_asked_is_nobody_failed() -> None:
    """A request to no engine sends nothing and succeeds."""
    bench = _bench()
    result = await bench.effects.fan_out(e.PauseGeneration, [])
    assert (result.acknowledgements, result.failures, bench.events) == ({}, (), [])


@pytest.mark.parametrize("kind", TO_ENGINES, ids=lambda kind: kind.__name__)
async def test_an_engine_that_does_not_answer_in_time_counts_as_unknown(kind: type[e.Request]) -> None:
    """The deadline ends the wait, not the doubt; the other engine is not concerned."""
    bench = _bench(*[Silence()] * 20, on=kind)
    publication_of(bench.cohort)
    result = await bench.effects.fan_out(kind, ["left", "right"], timeout=SOON)
    assert _outcomes(bench, kind)["left"] is Outcome.UNKNOWN
    assert "no answer within" in result.acknowledgements["left"].detail
    assert result.acknowledgements["right"].outcome is not Outcome.UNKNOWN


async def test_the_deadline_is_that_of_the_kind_where_none_is_given() -> None:
    """`Deadlines` says how long an engine is waited for."""
    bench = _bench(*[Silence()] * 20, on=e.BeginUpdate, deadlines=Deadlines(begin=SOON))
    publication_of(bench.cohort)
    await bench.effects.fan_out(e.BeginUpdate, ["left"])
    assert _outcomes(bench, e.BeginUpdate) == {"left": Outcome.UNKNOWN}


@pytest.mark.parametrize("kind", TO_ENGINES, ids=lambda kind: kind.__name__)
async def test_only_idempotent_requests_are_sent_again(kind: type[e.Request]) -> None:
    """A lost reply is answered by asking again where that does no harm, and by a doubt where it might."""
    bench = _bench(LoseReply(applied=False), on=kind)
    publication_of(bench.cohort)
    bench.engines["left"].label = "run:1"
    fields: dict[str, Any] = {"label": "run:1"} if kind is e.VerifyWeights else {}
    await bench.effects.fan_out(kind, ["left"], **fields)
    again = kind.idempotent
    assert bench.engines["left"].kinds == [kind.__name__] * (2 if again else 1)
    assert _outcomes(bench, kind) == {"left": Outcome.DONE if again else Outcome.UNKNOWN}


@pytest.mark.parametrize("answer", [Refuse(), Answer(Acknowledgement(outcome=Outcome.DONE))])
async def test_a_known_outcome_is_not_asked_for_again(answer: Any) -> None:
    """Done is done and refused is refused, idempotent or not."""
    bench = _bench(answer, on=e.ContinueGeneration)
    await bench.effects.fan_out(e.ContinueGeneration, ["left"])
    assert bench.engines["left"].kinds == ["ContinueGeneration"]


@pytest.mark.parametrize("applied", [True, False])
async def test_a_refusal_after_a_lost_reply_leaves_a_pause_in_doubt(applied: bool) -> None:
    """The first pause may have landed: that the second was refused does not make it undone, and the debt stands."""
    bench = _bench(LoseReply(applied=applied), Refuse("already paused"))
    result = await bench.effects.fan_out(e.PauseGeneration, ["left"])
    detail = "already paused (2 attempts, 30 s allowed)"
    assert result.acknowledgements["left"] == Acknowledgement(outcome=Outcome.UNKNOWN, detail=detail)
    assert bench.cohort.ledger.owed("left") is not None


async def test_a_refusal_at_once_is_no_debt() -> None:
    """Nothing was lost on the way, so that nothing can have happened."""
    bench = _bench(Refuse())
    await bench.effects.fan_out(e.PauseGeneration, ["left"])
    assert (bench.cohort.ledger.owed("left"), _outcomes(bench, e.PauseGeneration)) == (None, {"left": Outcome.NOT_DONE})


class Broken(ScriptedEngine):
    """An engine whose adapter has a bug."""

    async def perform(
        self, request: e.Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = lambda: None
    ) -> Acknowledgement:
        """Raise what no adapter should raise.

        Cancellation: nothing to leave behind.
        """
        raise KeyError("a bug of the adapter")


async def test_an_adapter_that_raises_tells_nothing_of_the_engine() -> None:
    """A bug is an unknown outcome with its error in the detail, not an exception in the middle of a hand-over."""
    bench = workbench(Broken("left"), ScriptedEngine("right"))
    result = await bench.effects.fan_out(e.BeginUpdate, ["left", "right"])
    assert result.acknowledgements["left"] == Acknowledgement(
        outcome=Outcome.UNKNOWN, detail="adapter error: KeyError('a bug of the adapter')"
    )
    assert result.acknowledgements["right"].outcome is Outcome.DONE


async def test_a_cancelled_caller_leaves_every_request_with_an_outcome() -> None:
    """What was answered stays answered; the rest is unknown, and a pause among it a debt."""
    bench = _bench(Silence())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.effects.fan_out, e.PauseGeneration, ["left", "right"])
        await until(lambda: bool(bench.told(e.EnginePaused)))
        tasks.cancel_scope.cancel()
    assert _outcomes(bench, e.PauseGeneration) == {"left": Outcome.UNKNOWN, "right": Outcome.DONE}
    assert {debt.engine: debt.certain for debt in bench.cohort.ledger.outstanding} == {"left": False, "right": True}


async def test_an_engine_is_not_lost_because_a_caller_stopped_waiting_for_its_probe() -> None:
    """Being given up is the caller's doing, and says nothing about the engine."""
    bench = _bench(Silence(), on=e.ProbeEngine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.effects.fan_out, e.ProbeEngine, ["left"])
        await a_few_turns()
        tasks.cancel_scope.cancel()
    assert (bench.left.serving, _outcomes(bench, e.ProbeEngine)) == (True, {"left": Outcome.UNKNOWN})


class FullDisk:
    """A journal whose device is full."""

    last_seq = 0

    def write(self, event: e.Event) -> None:
        """Lose the event."""

    def sync(self) -> None:
        """Tell."""
        raise OSError("no space left on device")

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("kind", [e.PauseGeneration, e.BeginUpdate, e.TransferWeights])
async def test_what_could_not_be_recorded_is_not_sent(kind: type[e.Request]) -> None:
    """Before a pause or weights go out they are on disk; where that fails nothing goes out and nothing is owed."""
    bench = _bench(sink=FullDisk())
    publication = publication_of(bench.cohort, sent=int(kind is e.TransferWeights))
    with pytest.raises(OSError, match="no space left on device"):
        await bench.effects.fan_out(kind, ["left", "right"])
    assert [engine.requests for engine in bench.engines.values()] == [[], []]
    assert _outcomes(bench, kind) == {"left": Outcome.NOT_DONE, "right": Outcome.NOT_DONE}
    assert (bench.cohort.ledger.outstanding, publication.opened, bench.left.touched) == ((), set(), False)


@pytest.mark.parametrize("kind", [e.ProbeEngine, e.ContinueGeneration, e.FinishUpdate, e.AbandonUpdate])
async def test_the_way_out_does_not_depend_on_the_disk(kind: type[e.Request]) -> None:
    """Continues and clean-up go out although nothing can be recorded any more."""
    bench = _bench(sink=FullDisk())
    await bench.effects.fan_out(kind, ["left"])
    assert bench.engines["left"].kinds == [kind.__name__]


async def test_fields_travel_with_the_request() -> None:
    """What is asked for is the same at every engine."""
    bench = _bench()
    await bench.effects.fan_out(e.PauseGeneration, ["left", "right"], mode=PauseMode.KEEP)
    assert [engine.paused for engine in bench.engines.values()] == [PauseMode.KEEP] * 2
