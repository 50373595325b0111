"""The bookkeeper on what probes tell, and on engines that come and go."""

from typing import Any

import pytest

from lifecycle import FleetPolicy, Outcome, Standing
from lifecycle import events as e
from lifecycle.fleet import NEW_PROCESS
from lifecycle.ports import Acknowledgement, EngineReport

from .workbench import EVERY_MODE, RISKY, Workbench, publication_of, serving_cohort, workbench


def _probe(bench: Workbench, **report: Any) -> None:
    found = EngineReport(kind="scripted", **{"incarnation": "1", **report})
    bench.exchange(e.ProbeEngine, Outcome.DONE, report=found)


def test_a_probe_tells_what_an_engine_is() -> None:
    """Incarnation, version, scheduler, memory and ranks are as reported; a stale engine is not promoted by it."""
    bench = workbench()
    bench.cohort.fleet.update("left", standing=Standing.STALE)
    _probe(bench, label="run:7", paused=True, asleep=True, world_size=4)
    facts = bench.left
    assert (facts.incarnation, facts.version, facts.paused, facts.asleep, facts.world_size, facts.standing) == (
        "1", 7, True, True, 4, Standing.STALE,
    )  # fmt: skip
    [fact] = bench.told(e.EngineProbed)
    assert (fact.label, fact.paused, fact.incarnation) == ("run:7", True, "1")


@pytest.mark.parametrize("outcome", [Outcome.NOT_DONE, Outcome.UNKNOWN])
def test_an_engine_that_does_not_answer_a_probe_is_lost(outcome: Outcome) -> None:
    """Silence is not service."""
    bench = workbench()
    bench.exchange(e.ProbeEngine, outcome, detail="no answer within 1 s")
    assert (bench.left.standing, bench.left.reason) == (
        Standing.LOST,
        "no answer within 1 s",
    )


def test_an_answer_without_a_report_is_no_answer() -> None:
    """A probe that learns nothing proves nothing."""
    bench = workbench()
    bench.exchange(e.ProbeEngine, Outcome.DONE)
    assert (bench.left.standing, bench.left.reason) == (
        Standing.LOST,
        "does not answer",
    )


@pytest.mark.parametrize("paused", [False, None])
def test_a_restarted_engine_is_a_new_one(paused: bool | None) -> None:
    """Nothing is remembered about a process that is no more: no debt, no dirt, no session, no idleness."""
    bench = workbench()
    bench.exchange(e.PauseGeneration, Outcome.DONE, stopped=True, idle=True)
    bench.books.dirty("left", "weights are being written")
    bench.cohort.fleet.update("left", session=True, touched=True)
    _probe(bench, incarnation="2", label=None, paused=paused)
    facts = bench.left
    assert (facts.incarnation, facts.version, facts.dirty, facts.session, facts.touched, facts.idle, facts.paused) == (
        "2", None, False, False, False, False, paused,
    )  # fmt: skip
    assert bench.cohort.ledger.owed("left") is None
    assert [fact.reason for fact in bench.told(e.DebtSettled)] == ["the server process is a new one"]
    assert [fact.engine for fact in bench.told(e.EngineCleaned)] == ["left"]
    assert (facts.standing, facts.unfit) == (
        Standing.STALE,
        NEW_PROCESS,
    )


def test_a_pause_may_have_landed_in_the_process_that_came_after() -> None:
    """A restarted engine that says that it is paused was paused by us, before anybody knew: the debt stays."""
    bench = workbench()
    bench.exchange(e.PauseGeneration, Outcome.DONE, stopped=True, idle=True)
    _probe(bench, incarnation="2", label=None, paused=True)
    assert bench.cohort.ledger.owed("left") is not None
    assert (bench.told(e.DebtSettled), bench.left.dirty) == ([], False)


@pytest.mark.parametrize(
    ("met", "whole", "trusted", "dirty"),
    [
        (True, None, False, False),
        (False, None, False, True),
        (False, True, False, False),
        (False, None, True, False),
    ],
)
def test_a_pause_that_nobody_asked_for_is_a_debt_as_soon_as_a_probe_tells_of_it(
    met: bool, whole: bool | None, trusted: bool, dirty: bool
) -> None:
    """Of a process that was never met it may hide half an update; of one that was, it is known what was written."""
    bench = workbench()
    bench.cohort.policy = FleetPolicy(trust_paused=trusted)
    bench.cohort.fleet.update("left", incarnation="1" if met else None)
    _probe(bench, paused=True, whole=whole)
    debt = bench.cohort.ledger.owed("left")
    assert debt is not None
    assert (debt.certain, bench.left.dirty) == (True, dirty)


def test_a_continue_under_way_leaves_nothing_known_of_the_pause() -> None:
    """Until its reply comes an engine counts neither as paused nor as idle: it may generate already."""
    bench = workbench()
    bench.exchange(e.PauseGeneration, Outcome.DONE, stopped=True, idle=True)
    bench.exchange(e.ContinueGeneration, Outcome.UNKNOWN)
    assert (bench.left.paused, bench.left.idle) == (None, False)


@pytest.mark.parametrize(("paused", "idle"), [(True, True), (None, True), (False, False)])
def test_idleness_lasts_until_an_engine_says_that_it_runs(paused: bool | None, idle: bool) -> None:
    """A proof of idleness holds while the pause may stand."""
    bench = workbench()
    bench.exchange(e.PauseGeneration, Outcome.DONE, stopped=True, idle=True)
    _probe(bench, paused=paused)
    assert bench.left.idle is idle


@pytest.mark.parametrize(
    ("paused_for", "continued", "settled"),
    [(Outcome.DONE, False, True), (Outcome.UNKNOWN, False, False), (Outcome.UNKNOWN, True, True)],
)
def test_a_probe_that_sees_an_engine_run_settles_what_cannot_land_any_more(
    paused_for: Outcome, continued: bool, settled: bool
) -> None:
    """A certain pause is over; an uncertain one only where a continue was acknowledged before."""
    bench = workbench()
    bench.exchange(e.PauseGeneration, paused_for)
    if continued:
        bench.exchange(e.ContinueGeneration, Outcome.DONE)
    _probe(bench, paused=False)
    assert (bench.cohort.ledger.owed("left") is None) is settled


def test_an_engine_that_says_it_is_not_whole_is_dirty() -> None:
    """An update that was left half-way is found by the probe."""
    bench = workbench()
    _probe(bench, whole=False)
    facts = bench.left
    assert (facts.dirty, facts.session, facts.standing, facts.reason) == (
        True, True, Standing.STALE, "an update is open or was left half-way",
    )  # fmt: skip


def test_a_lost_engine_stays_lost_until_it_is_found() -> None:
    """Being stale is a step up from being lost, and only a probe may give it."""
    bench = workbench()
    bench.books.fence("left", Standing.LOST, "gone")
    bench.books.fence("left", Standing.STALE, "behind")
    stays = (bench.left.standing, bench.left.reason)
    bench.books.found("left", "behind")
    assert (stays, bench.left.standing) == ((Standing.LOST, "gone"), Standing.STALE)


def test_a_change_of_standing_is_told_once_with_its_reason() -> None:
    """The same standing again only renews the reason."""
    bench = workbench()
    bench.books.fence("left", Standing.STALE, "behind")
    bench.books.fence("left", Standing.STALE, "dirty")
    bench.books.serve("left")
    assert [(f.before, f.after, f.reason) for f in bench.told(e.StandingChanged)] == [
        (Standing.SERVING, Standing.STALE, "behind"),
        (Standing.STALE, Standing.SERVING, ""),
    ]
    assert (bench.left.standing, bench.left.reason) == (Standing.SERVING, "")


def test_a_serving_engine_that_comes_to_hold_another_version_is_stale() -> None:
    """An engine that somebody else loaded, or that restarted with old weights, is not routed to any more."""
    bench = workbench(cohort=serving_cohort("left", "right", version=3))
    _probe(bench, label="run:3")
    unchanged = bench.left.standing
    _probe(bench, label="run:2")
    assert (unchanged, bench.left.standing, bench.left.reason) == (
        Standing.SERVING, Standing.STALE, "does not hold version 3 any more",
    )  # fmt: skip


def test_an_unfit_engine_is_fenced_and_a_label_does_not_make_it_fit() -> None:
    """An engine that holds the version and does not work is remembered as such; a new process is not trusted either."""
    bench = workbench()
    bench.books.unfit("left", "does not generate")
    assert (bench.left.standing, bench.left.unfit) == (
        Standing.STALE,
        "does not generate",
    )
    _probe(bench, incarnation="2", label="run:0")
    assert (bench.left.standing, bench.left.unfit == NEW_PROCESS) == (Standing.STALE, True)


def test_a_request_that_nobody_waited_for_says_nothing_about_the_engine() -> None:
    """A probe that a cancelled caller gave up is told as unknown, and the engine is not lost for it."""
    bench = workbench()
    given_up = Acknowledgement(outcome=Outcome.UNKNOWN, detail="given up")
    bench.books.record(bench.send(e.ProbeEngine), given_up, 0.0, given_up=True)
    assert (bench.left.standing, [f.outcome for f in bench.told(e.EngineProbed)]) == (
        Standing.SERVING, [Outcome.UNKNOWN],
    )  # fmt: skip


def test_dirt_is_told_once_and_cleaned_once() -> None:
    """Each begins and ends one span in which the weights may be partly written."""
    bench = workbench()
    for _ in range(2):
        bench.books.dirty("left", "weights are being written")
    for _ in range(2):
        bench.books.clean("left", "holds version 1")
    assert (len(bench.told(e.EngineDirtied)), len(bench.told(e.EngineCleaned))) == (1, 1)
    assert (bench.left.dirty, bench.left.standing) == (False, Standing.STALE)


def test_the_capabilities_asked_are_the_engines_own() -> None:
    """When weights are at risk is each engine's affair."""
    bench = workbench(capabilities={"left": RISKY, "right": EVERY_MODE}.__getitem__)
    publication_of(bench.cohort)
    for name in ("left", "right"):
        bench.books.sending(bench.recorder.emit(e.BeginUpdate, engine=name, kind="broadcast"))
    assert [facts.dirty for facts in bench.cohort.fleet.values()] == [True, False]
