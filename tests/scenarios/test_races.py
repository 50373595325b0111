"""Pauses, aborts and updates that race: with stragglers, with each other, and with what others do to an engine."""

from typing import Any

import anyio
import pytest

from lifecycle import PauseMode, State, errors, events
from lifecycle.events import Request
from lifecycle.ports import Bucket
from lifecycle.testing import Delay, LandLate, ScriptedTransfer
from tests.lifecycle.driver.driver_rig import SOURCE, Engine, Rig, prompt, rig, start
from tests.lifecycle.driver.invariants import check

from .stage import EMPTYING, KEEPING, admit_late, facts, generating, produce_all

pytestmark = pytest.mark.anyio


class FrontEnds(Engine):
    """Four front ends behind one URL, each with a pause flag of its own; requests reach them in turn."""

    _turn = 0
    _flags: tuple[PauseMode | None, ...] = (None,) * 4

    def _act(self, request: Request) -> Any:
        self._turn = (self._turn + 1) % 4
        self.paused = self._flags[self._turn]
        acknowledgement = super()._act(request)
        flags = list(self._flags)
        flags[self._turn] = self.paused
        self._flags = tuple(flags)
        return acknowledgement


async def test_a_pause_that_reached_one_of_several_front_ends_is_no_pause() -> None:
    """They answer differently when asked again: no update begins, and the error says that the engine runs."""
    stage = rig(2)
    stage["E2"].__class__ = FrontEnds
    async with stage.lifecycle as lifecycle:
        with pytest.raises(errors.PublicationFailed) as failure:
            await lifecycle.publish(SOURCE, version=1)
        assert "E2 may still hold requests" in str(failure.value)
        assert stage.of(events.BeginUpdate) == []
        assert lifecycle.version == 0


def wake_at(stage: Rig, name: str, kind: type[Request]) -> None:
    """Let somebody else continue the engine, once, right after it has acted on `kind`."""

    def act(engine: Engine, request: Request) -> None:
        if isinstance(request, kind):
            engine.acted = None
            engine.resume_from_outside()

    stage[name].acted = act


@pytest.mark.parametrize("slow", [events.AbortGeneration, events.PauseGeneration])
@pytest.mark.parametrize("woken", [events.AbortGeneration, events.PauseGeneration])
async def test_a_late_wake_meets_no_update(woken: type[Request], slow: type[Request]) -> None:
    """While E3 is still being stopped E2 is woken: before the pause that is made good by it, after it found out."""
    stage = rig()
    async with stage.lifecycle as lifecycle:
        wake_at(stage, "E2", woken)
        stage["E3"].on(slow, Delay(0.4))
        if woken is events.PauseGeneration:
            with pytest.raises(errors.PublicationFailed) as failure:
                await lifecycle.publish(SOURCE, version=1)
            assert "E2" in str(failure.value)
            assert stage.of(events.BeginUpdate) == []
        else:
            await lifecycle.publish(SOURCE, version=1)
        stopped = max((event.seq for event in stage.of(events.EnginePaused)), default=0)
        assert all(event.seq > stopped for event in stage.of(events.BeginUpdate))
        assert [engine.paused for engine in stage.engines] == [None] * 3
        check(stage)


async def test_requests_on_their_way_into_an_engine_are_ended_by_its_pause() -> None:
    """Accepted by the server and not yet in its scheduler, they escape the abort: they are made anew, whole."""
    stage = rig(2, manual=True)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        for engine in stage.engines:
            admit_late(engine, {number: 0.05 + number / 20 for number in range(8)})
        later = [start(tasks, lambda: lifecycle.generate(prompt())) for _ in range(16)]
        await anyio.sleep(0.12)
        assert 0 < sum(engine.in_flight for engine in stage.engines) < 16
        await lifecycle.suspend()
        await lifecycle.pause_generation()
        await anyio.wait_all_tasks_blocked()
        assert lifecycle._context.segments.in_flight == 0
        assert [engine.in_flight for engine in stage.engines] == [0, 0]
        await lifecycle.publish(SOURCE, version=1)
        await lifecycle.continue_generation()
        await produce_all(stage, later)
        assert [one.value.versions for one in later] == [(1,) * 4] * 16
        check(stage)


async def test_stragglers_that_come_after_an_abort_are_not_waited_for() -> None:
    """Two reach the engine after the abort and one ignores it: the pause is reached, and none counts as completed."""
    stage = rig(1, manual=True)
    odd = stage["E1"]
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        admit_late(odd, {1: 0.3, 2: 0.35})
        later = await generating(stage, tasks, 3)
        (deaf,) = odd._generating
        odd._unfinished = lambda: [one for one in odd._generating if one is not deaf and one.reason is None]  # type: ignore[method-assign]
        await lifecycle.suspend()
        begun = anyio.current_time()
        await lifecycle.pause_generation()
        assert anyio.current_time() - begun <= 2 * lifecycle.deadlines.abort
        await anyio.wait_all_tasks_blocked()
        assert (odd.in_flight, [one.done for one in later]) == (0, [False] * 3)
        await lifecycle.continue_generation()
        await produce_all(stage, later)
        assert [len(one.value.output_ids) for one in later] == [4] * 3
        check(stage)


@pytest.mark.parametrize("mode", KEEPING)
async def test_an_abort_reaches_requests_that_wait_in_a_paused_engine(mode: PauseMode) -> None:
    """They come back with what they have, and the continue that follows makes no more tokens for them."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, 2)
        stage["E1"].produce(1)
        await lifecycle.suspend()
        await lifecycle.pause_generation(mode)
        await lifecycle.abort_generation()
        await anyio.wait_all_tasks_blocked()
        assert [(one.value.finish_reason, len(one.value.output_ids)) for one in later] == [("abort", 1)] * 2
        await lifecycle.continue_generation()
        assert stage["E1"].in_flight == 0
        check(stage)


@pytest.mark.parametrize("kind", ["broadcast", "disk"])
@pytest.mark.parametrize("found", [State.RUNNING, State.SUSPENDED, State.PAUSED])
@pytest.mark.parametrize("mode", PauseMode)
async def test_nothing_is_aborted_and_nothing_runs_once_weights_may_move(
    mode: PauseMode, found: State, kind: str
) -> None:
    """Whatever the way there: aborts before the pause, and every pause acknowledged before the first update call."""
    stage = rig(manual=True)
    stage.transfer.kind = kind
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        if found is not State.RUNNING:
            await lifecycle.suspend()
        if found is State.PAUSED:
            await lifecycle.pause_generation(mode)
        later = await generating(stage, tasks, 3)
        publication = start(tasks, lambda: lifecycle.publish(SOURCE, version=1, mode=mode))
        await anyio.wait_all_tasks_blocked()
        await produce_all(stage, [publication] if found is State.PAUSED else [publication, *later])
        for name in ("E1", "E2", "E3"):
            paused = facts(stage, events.EnginePaused, name)[0].seq
            continued = facts(stage, events.ContinueGeneration, name)[0].seq
            moved = [event.seq for event in stage.of(events.OpenTransfer) + stage.of(events.BeginUpdate)]
            aborted = [event.seq for event in facts(stage, events.AbortGeneration, name)]
            assert all(paused < seq < continued for seq in moved if seq < continued)
            assert not [seq for seq in aborted if paused < seq < continued]
        check(stage)
        tasks.cancel_scope.cancel()


class SlowSender(ScriptedTransfer):
    """The trainer's half of the last bucket is still being sent when the engines have all they need."""

    sent = 0

    async def send(self, bucket: Bucket, *, timeout: float) -> None:
        await anyio.sleep(0.9 if bucket.last else 0.0)
        await super().send(bucket, timeout=timeout)
        self.sent += 1


async def test_an_update_is_finished_only_when_the_slowest_sender_has_sent() -> None:
    """However fast the engines acknowledge: no chunk follows the finish, and none is sent before the one before."""
    transfer = SlowSender(buckets=3)
    stage = rig(transfer=transfer)
    seen: list[tuple[type[Request], int]] = []
    async with stage.lifecycle as lifecycle:
        for engine in stage.engines:
            engine.received = lambda _, request: seen.append((type(request), transfer.sent))
        await lifecycle.publish(SOURCE, version=1)
        assert [sent for kind, sent in seen if kind is events.TransferWeights] == [0] * 3 + [1] * 3 + [2] * 3
        assert {sent for kind, sent in seen if kind is events.FinishUpdate} == {3}
        check(stage)


@pytest.mark.parametrize("state", [State.RUNNING, State.SUSPENDED])
async def test_an_update_is_never_begun_in_engines_that_generate(state: State) -> None:
    """Without a pause there is no update, whatever is in flight; and nothing is sent."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        later = await generating(stage, tasks, 2)
        if state is State.SUSPENDED:
            await lifecycle.suspend()
        asked = len(stage["E1"].requests)
        with pytest.raises(errors.IllegalTransition):
            await lifecycle.begin_update(version=1)
        assert len(stage["E1"].requests) == asked
        await produce_all(stage, later)
        assert [one.value.versions for one in later] == [(0,) * 4] * 2
        check(stage)


@pytest.mark.parametrize("whose", ["ours", "somebody else's"])
@pytest.mark.parametrize("mode", EMPTYING)
async def test_an_empty_table_is_no_proof_that_an_engine_is_idle(mode: PauseMode, whose: str) -> None:
    """An abort that is acknowledged and not carried out leaves work in the engine: only the engine proves it idle."""
    stage = rig(1, manual=True)
    odd = stage["E1"]
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        if whose == "ours":
            await generating(stage, tasks, 2)
        else:
            start(tasks, lambda: odd.generate(prompt(), timeout=1000))
            await anyio.wait_all_tasks_blocked()
        odd._abort = lambda: None  # type: ignore[method-assign]
        with pytest.raises(errors.PauseFailed):
            await lifecycle.publish(SOURCE, version=1, mode=mode)
        assert stage.of(events.BeginUpdate) == []
        assert (lifecycle.state, odd.paused) == (State.RUNNING, None)
        check(stage)
        tasks.cancel_scope.cancel()


async def test_an_abort_that_lands_in_a_later_generation_does_not_end_it() -> None:
    """An abort ends what was in flight when it was asked for; landing late it costs the next one an interruption."""
    stage = rig(1, manual=True)
    async with stage.lifecycle as lifecycle, anyio.create_task_group() as tasks:
        (first,) = await generating(stage, tasks, 1)
        stage["E1"].on(events.AbortGeneration, *[LandLate()] * 40)
        with pytest.raises(errors.OperationFailed):
            await lifecycle.abort_generation()
        stage["E1"].produce(2)
        (second,) = await generating(stage, tasks, 1)
        stage["E1"].produce(1)
        stage["E1"].land()
        await produce_all(stage, [first, second])
        assert (first.value.finish_reason, len(first.value.output_ids)) == ("abort", 3)
        assert (second.value.finish_reason, len(second.value.output_ids)) == ("length", 4)
        check(stage)
