"""A trainer that is killed at any line of its journal, and the lifecycle that comes after it."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import pytest

from lifecycle import FleetPolicy, Lifecycle, Outcome, PauseMode, Standing, State, errors, events
from lifecycle.events import Event, Request
from lifecycle.fleet import EngineFacts
from lifecycle.history import History
from lifecycle.journal import Journal, read
from lifecycle.ports import Acknowledgement, Capabilities, EngineReport
from lifecycle.testing import LandLate, LoseReply, ScriptedEngine, ScriptedTransfer
from lifecycle.trace import verify_file

from .driver_rig import DEADLINES, NAMES, RUN, SOURCE

pytestmark = pytest.mark.anyio

_VLLM = Capabilities(pause_modes=frozenset(PauseMode), at_risk_from_begin=frozenset({"broadcast"}))


class Killed(BaseException):
    """What a process feels of SIGKILL: nothing runs any more."""


class MortalJournal(Journal):
    """A journal whose process is killed at a line: before it is written, or right after."""

    def __init__(self, path: Path, line: int | None, *, after: bool) -> None:
        super().__init__(path)
        self.lines, self._line, self._after, self.dead = 0, line, after, False

    def write(self, event: Event) -> None:
        self._die_at(0 if self._after else 1)
        super().write(event)
        self.lines += 1
        self._die_at(0)

    def _die_at(self, ahead: int) -> None:
        self.dead = self.dead or self.lines + ahead == self._line
        if self.dead:
            raise Killed


class Engine(ScriptedEngine):
    """An engine that a dead trainer cannot reach."""

    journal: MortalJournal | None = None

    async def perform(
        self, request: Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = lambda: None
    ) -> Acknowledgement:
        if self.journal is not None and self.journal.dead:
            raise Killed
        return await super().perform(request, facts, timeout=timeout, sent=sent)


async def a_life(lifecycle: Lifecycle, engines: list[Engine], transfer: ScriptedTransfer) -> None:
    """Publish, fail to publish, lose replies, be cured, pause and continue: a bit of everything."""
    async with lifecycle:
        await lifecycle.publish(SOURCE, version=1)
        await lifecycle.suspend()
        engines[0].on(events.PauseGeneration, *[LoseReply(applied=True)] * 9)
        with pytest.raises(errors.PauseFailed):
            await lifecycle.pause_generation()
        engines[0]._script.clear()
        transfer.fail_on = "send"
        with pytest.raises(errors.PublicationFailed):
            await lifecycle.publish(SOURCE, version=2)
        transfer.fail_on = None
        await lifecycle.publish(SOURCE, version=2)
        await lifecycle.resume()
        await lifecycle.publish(SOURCE, version=3)


async def live(path: Path, line: int | None, *, after: bool, capabilities: Capabilities | None) -> list[Engine]:
    """Let a lifecycle live until it is killed; return the engines as it left them."""
    journal = MortalJournal(path, line, after=after)
    engines = [Engine(name, capabilities=capabilities) for name in NAMES[:2]]
    for engine in engines:
        engine.journal = journal
    transfer = ScriptedTransfer(buckets=2)
    lifecycle = Lifecycle(engines, transfer=transfer, deadlines=DEADLINES, name=RUN, journal=journal)
    await _unless_killed(lambda: a_life(lifecycle, engines, transfer))
    journal.close()
    for engine in engines:
        engine.journal = None
        engine._script.clear()
    return engines


async def _unless_killed(life: Callable[[], Awaitable[None]]) -> None:
    try:
        await life()
    except BaseException as error:
        if not _is_death(error):
            raise


def _is_death(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_death(inner) for inner in error.exceptions)
    return isinstance(error, Killed)


def told(path: Path) -> History:
    """Return what a journal tells."""
    return History.of(event for _, event in read(path))


def successor(engines: list[Engine], path: Path, **options: object) -> Lifecycle:
    """Return the lifecycle that comes after, over the same engines and journal."""
    chosen = {"transfer": ScriptedTransfer(buckets=2), "deadlines": DEADLINES, "name": RUN, **options}
    return Lifecycle(engines, journal=path, **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capabilities", "after"), [(None, False), (_VLLM, True)], ids=["before a line", "after a line, at risk from begin"]
)
async def test_whoever_comes_after_settles_what_a_killed_trainer_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    anyio_backend_name: str,
    capabilities: Capabilities | None,
    after: bool,
) -> None:
    """Killed at any line: no whole engine stays paused, no dirty one is continued, and a publication cures the rest."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the page cache outlives a process
    await live(tmp_path / "whole.jsonl", None, after=False, capabilities=capabilities)
    lines = len((tmp_path / "whole.jsonl").read_text().splitlines())
    assert lines > 150
    # One backend sees every line, the other some: what is on disk does not depend on it.
    for line in range(1, lines + 1, 1 if anyio_backend_name == "asyncio" else 7):
        path = tmp_path / f"{line}.jsonl"
        engines = await live(path, line, after=after, capabilities=capabilities)
        await _settled(engines, path, line)


async def _settled(engines: list[Engine], path: Path, line: int) -> None:
    version = told(path).version
    lifecycle = successor(engines, path, initial_version=version)
    await lifecycle.attach()
    assert lifecycle.state is State.SUSPENDED
    for engine, view in zip(engines, lifecycle.engines, strict=True):
        assert engine.violations == [], line
        assert view.standing is not Standing.LOST
        assert engine.whole or view.dirty, f"killed at {line}: {engine.name} is partly written, and counts as whole"
        assert (engine.paused is not None) is view.dirty, f"killed at {line}: {view}"
        assert (view.debt is not None) is view.dirty, f"killed at {line}: {view}"
        if view.dirty:
            assert "a publication cures it" in view.reason
    await lifecycle.publish(SOURCE, version=(version or 0) + 1)
    await lifecycle.resume()
    assert [(e.whole, e.paused, e.violations) for e in engines] == [(True, None, [])] * 2
    await lifecycle.close()
    verdict = verify_file(path)
    assert verdict.violations == [], f"killed at {line}"
    assert verdict.unmatched == ()


async def test_a_pause_that_lands_after_the_death_is_continued(tmp_path: Path) -> None:
    """A pause whose fate the journal does not tell is a debt: continued, and looked at again."""
    path = tmp_path / "journal.jsonl"
    engine = Engine("E1").on(events.PauseGeneration, *[LandLate()] * 9)
    engine.journal = journal = MortalJournal(path, None, after=False)
    lifecycle = Lifecycle([engine], deadlines=DEADLINES, name=RUN, journal=journal)
    await lifecycle.attach()

    def die(event: Event) -> None:
        journal.dead = isinstance(event, events.EnginePaused)

    lifecycle.subscribe(die)
    await _unless_killed(lifecycle.pause_generation)
    journal.close()
    engine.journal = None
    engine._script.clear()
    engine.land()
    after = successor([engine], path)
    await after.attach()
    assert (after.state, engine.paused, after.engines[0].debt) == (State.SUSPENDED, None, None)
    await after.close()


async def test_another_process_has_no_past(tmp_path: Path) -> None:
    """What the journal tells is about one process: of another the user's word counts for what it holds."""
    path = tmp_path / "journal.jsonl"
    engines = await live(path, 150, after=True, capabilities=None)
    for engine in engines:
        engine.restart()
    lifecycle = successor(engines, path, initial_version=1)
    async with lifecycle:
        assert lifecycle.state is State.RUNNING
    assert verify_file(path).violations == []


async def test_what_kept_an_engine_from_serving_is_remembered(tmp_path: Path) -> None:
    """An engine that did not flush after its publication holds the version, and does not serve it after a restart."""
    path = tmp_path / "journal.jsonl"
    engines = [Engine(name) for name in NAMES[:2]]
    engines[0].on(events.FlushCache, *[LoseReply(applied=False)] * 20)
    policy = FleetPolicy(min_engines=1)
    transfer = ScriptedTransfer()
    before = Lifecycle(engines, transfer=transfer, deadlines=DEADLINES, name=RUN, policy=policy, journal=path)
    await before.attach()
    await before.publish(SOURCE, version=1)
    await before.close()
    engines[0]._script.clear()
    after = successor(engines, path, policy=policy, initial_version=1)
    async with after:
        assert [view.standing for view in after.engines] == [Standing.STALE, Standing.SERVING]
        assert "caches of old weights" in after.engines[0].reason
        report = await after.publish(SOURCE, version=2)
        assert report.fenced == {}
    assert verify_file(path).violations == []


async def test_a_process_that_is_not_ready_is_told_by_name(tmp_path: Path) -> None:
    """Where what a killed trainer left does not answer, attaching fails and says who."""
    path = tmp_path / "journal.jsonl"
    engines = await live(path, 60, after=True, capabilities=None)
    engines[1].crash()
    lifecycle = successor(engines, path)
    with pytest.raises(errors.AttachFailed, match="not ready: E2"):
        await lifecycle.attach()
    assert engines[0].paused is None or not engines[0].whole
    assert lifecycle.state is State.CLOSED


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_a_canary_that_did_not_answer_is_remembered(outcome: Outcome) -> None:
    """Only an engine that generated after its last publication serves again."""
    history = History.of([events.CanaryAnswered(engine="E1", outcome=outcome)])
    unfit = history.engines["E1"].unfit if "E1" in history.engines else ""
    assert bool(unfit) is (outcome is not Outcome.DONE)


async def test_anybody_may_look_while_it_lives(tmp_path: Path) -> None:
    """The history of a journal is folded from its events, whoever reads them."""
    path = tmp_path / "journal.jsonl"
    engines = await live(path, None, after=False, capabilities=None)
    history = told(path)
    assert (history.run, history.version, history.closed) == (RUN, 3, True)
    assert set(history.engines) == {engine.name for engine in engines}
    assert not any(known.dirty or known.debt for known in history.engines.values())


class Reticent(Engine):
    """An engine that does not say whether its weights are whole, as real servers do not."""

    def _report(self) -> EngineReport:
        return attrs.evolve(super()._report(), whole=None)


async def test_a_pause_that_the_journal_does_not_tell_of_is_anothers(tmp_path: Path) -> None:
    """Another trainer may have been killed with half its weights written: the journal of ours proves nothing then."""
    path = tmp_path / "journal.jsonl"
    engine = Reticent("E1")
    async with successor([engine], path):
        pass
    engine.paused, engine.whole = PauseMode.ABORT, False
    async with successor([engine], path) as lifecycle:
        (view,) = lifecycle.engines
        assert (lifecycle.state, view.standing, view.dirty) == (State.SUSPENDED, Standing.STALE, True)
        assert (engine.paused, engine.violations) == (PauseMode.ABORT, [])
    assert verify_file(path).violations == []


async def test_the_users_word_for_a_new_process_is_remembered(tmp_path: Path) -> None:
    """A restarted engine that was adopted serves in the next life, too, although nothing was published."""
    path = tmp_path / "journal.jsonl"
    engine = Engine("E1")
    async with successor([engine], path):
        engine.restart()
    for _ in range(2):
        async with successor([engine], path) as lifecycle:
            assert lifecycle.state is State.RUNNING
    assert verify_file(path).violations == []


async def test_a_label_does_not_forgive_what_an_engine_failed_to_do(tmp_path: Path) -> None:
    """An engine that may serve old caches is not adopted on the user's word for its weights."""
    path = tmp_path / "journal.jsonl"
    engine = Engine("E1").on(events.FlushCache, *[LoseReply(applied=False)] * 30)
    engine.on(events.LabelVersion, *[LoseReply(applied=False)] * 30)
    before = successor([engine], path, initial_version=None)
    await before.attach()
    await before.publish(SOURCE, version=1)
    await before.close()
    engine._script.clear()
    engine.label = None
    async with successor([engine], path, initial_version=1) as lifecycle:
        assert (lifecycle.state, lifecycle.engines[0].standing) == (State.SUSPENDED, Standing.STALE)
