"""Collectives: the trainer's half and the engines' halves, and what becomes of one when the other fails."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from lifecycle import Deadlines, Outcome
from lifecycle import events as e
from lifecycle.effects import Result
from lifecycle.errors import EngineFailure, TransferFailed
from lifecycle.fleet import EngineFacts
from lifecycle.ports import Acknowledgement
from lifecycle.testing import Refuse, ScriptedEngine

from .crowd import a_few_turns, until
from .workbench import Workbench, publication_of, workbench

pytestmark = pytest.mark.anyio

SOON = 0.05
"""Seconds: a deadline that is meant to pass."""


class Receiving(ScriptedEngine):
    """An engine that writes its request, and answers, when the test lets it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.may_write = anyio.Event()
        self.may_answer = anyio.Event()

    async def perform(
        self, request: e.Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = lambda: None
    ) -> Acknowledgement:
        """Write, then answer.

        Cancellation: the request was written, or was not.
        """
        await self.may_write.wait()
        sent()
        await self.may_answer.wait()
        return await super().perform(request, facts, timeout=timeout)


class Trainer:
    """The trainer's half of a bucket."""

    def __init__(self, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.may_end = anyio.Event()
        self.error = error

    async def send(self) -> None:
        """Take part until the test lets it end."""
        self.log.append("begins")
        if self.error is not None:
            raise self.error
        await self.may_end.wait()
        self.log.append("ends")

    async def cut(self) -> None:
        """Free whatever is blocked."""
        self.log.append("cut")


def _bench(**fields: Any) -> tuple[Workbench, Receiving, Receiving]:
    left, right = Receiving("left"), Receiving("right")
    bench = workbench(left, right, **fields)
    publication_of(bench.cohort, sent=1)
    for engine in (left, right):
        engine.session = True
    return bench, left, right


async def _transfer(bench: Workbench, trainer: Trainer, results: list[Result], timeout: float = 5) -> None:
    results.append(
        await bench.effects.fan_out(
            e.TransferWeights, ["left", "right"], trainer=trainer.send, cut=trainer.cut, timeout=timeout
        )
    )


async def test_the_trainer_enters_the_collective_once_every_request_is_written() -> None:
    """Not before: an engine that was not asked to receive would leave the trainer blocked."""
    bench, left, right = _bench()
    trainer, results = Trainer(), list[Result]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_transfer, bench, trainer, results)
        left.may_write.set()
        await a_few_turns()
        assert trainer.log == []
        right.may_write.set()
        await until(lambda: trainer.log == ["begins"])
        trainer.may_end.set()
        left.may_answer.set()
        right.may_answer.set()
    assert (trainer.log, results[0].failures) == (["begins", "ends"], ())


async def test_an_engine_that_refuses_frees_the_trainer_at_once() -> None:
    """The trainer's half is cut, and the other engine is waited for only a little longer."""
    bench, left, right = _bench(deadlines=Deadlines(grace=SOON))
    left.on(e.TransferWeights, Refuse("no session"))
    trainer, results = Trainer(), list[Result]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_transfer, bench, trainer, results)
        for event in (left.may_write, right.may_write, left.may_answer):
            event.set()
    assert trainer.log in (["begins", "cut"], ["cut"])
    assert {name: ack.outcome for name, ack in results[0].acknowledgements.items()} == {
        "left": Outcome.NOT_DONE,
        "right": Outcome.UNKNOWN,
    }
    assert [f.engine for f in results[0].failures if isinstance(f, EngineFailure)] == ["left", "right"]


async def test_an_engine_that_refuses_before_all_are_written_keeps_the_trainer_out() -> None:
    """An early error means that the collective will never be whole."""
    bench, left, _ = _bench(deadlines=Deadlines(grace=SOON))
    left.on(e.TransferWeights, Refuse())
    trainer, results = Trainer(), list[Result]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_transfer, bench, trainer, results)
        left.may_write.set()
        left.may_answer.set()
    assert trainer.log == ["cut"]


async def test_a_trainer_that_fails_leaves_engines_a_little_time_to_answer() -> None:
    """Its error is among the failures; an engine that answers within the grace is heard, the other is unknown."""
    bench, left, right = _bench(deadlines=Deadlines(grace=SOON))
    trainer, results = Trainer(TransferFailed("the group broke")), list[Result]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_transfer, bench, trainer, results)
        left.may_write.set()
        right.may_write.set()
        await until(lambda: "cut" in trainer.log)
        left.may_answer.set()
    assert trainer.log == ["begins", "cut"]
    assert {name: ack.outcome for name, ack in results[0].acknowledgements.items()} == {
        "left": Outcome.DONE,
        "right": Outcome.UNKNOWN,
    }
    assert results[0].failures[-1] is trainer.error


async def test_a_trainer_that_hangs_is_cut_at_the_deadline() -> None:
    """The deadline covers the trainer's half too."""
    bench, left, right = _bench(deadlines=Deadlines(grace=SOON))
    trainer, results = Trainer(), list[Result]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_transfer, bench, trainer, results, SOON)
        for event in (left.may_write, right.may_write, left.may_answer, right.may_answer):
            event.set()
    assert trainer.log == ["begins", "cut"]
    assert [type(failure) for failure in results[0].failures] == [TransferFailed]


async def test_a_cancelled_caller_cuts_the_trainer_and_leaves_the_engines_unknown() -> None:
    """Neither half is left behind."""
    bench, left, right = _bench()
    trainer, results = Trainer(), list[Result]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_transfer, bench, trainer, results)
        left.may_write.set()
        right.may_write.set()
        await until(lambda: trainer.log == ["begins"])
        tasks.cancel_scope.cancel()
    assert (trainer.log, results) == (["begins", "cut"], [])
    assert [fact.outcome for fact in bench.told(e.WeightsTransferred)] == [Outcome.UNKNOWN] * 2
    assert [facts.dirty for facts in bench.cohort.fleet.values()] == [True, True]


async def test_the_trainer_has_its_half_also_without_engines() -> None:
    """A collective of one is performed at once."""
    bench, _, _ = _bench()
    trainer = Trainer()
    trainer.may_end.set()
    result = await bench.effects.fan_out(e.OpenTransfer, [], trainer=trainer.send, cut=trainer.cut)
    assert (trainer.log, result.failures) == (["begins", "ends"], ())
