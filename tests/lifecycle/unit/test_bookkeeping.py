"""The bookkeeper: what each request and each outcome makes true of an engine."""

import pytest

from lifecycle import Outcome, PauseMode, Standing
from lifecycle import events as e
from lifecycle.ports import Acknowledgement

from .workbench import publication_of, workbench

TO_ENGINES = sorted(
    (kind for kind in e.all_events().values() if issubclass(kind, e.Request) and kind.fact is not None),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", TO_ENGINES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_of_every_request_is_told_as_one_fact(kind: type[e.Request], outcome: Outcome) -> None:
    """The fact names the engine, the request it answers, its outcome, the detail and the seconds it took."""
    bench = workbench()
    publication_of(bench.cohort, sent=1)
    request = bench.send(kind)
    bench.books.record(request, Acknowledgement(outcome=outcome, detail="so it is"), 0.5)
    assert kind.fact is not None
    [fact] = bench.told(kind.fact)
    assert (fact.engine, fact.outcome, fact.detail, fact.request, fact.seconds) == (
        "left", outcome, "so it is", request.seq, 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("kind", TO_ENGINES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("outcome", [Outcome.NOT_DONE, Outcome.UNKNOWN])
def test_an_engine_that_cannot_be_reached_is_lost(kind: type[e.Request], outcome: Outcome) -> None:
    """No connection, whatever for, takes the engine out of the fleet until a probe answers."""
    bench = workbench()
    publication_of(bench.cohort, sent=1)
    bench.exchange(kind, outcome, unreachable=True, detail="connection refused")
    assert (bench.left.standing, bench.left.reason) == (
        Standing.LOST,
        "connection refused",
    )


@pytest.mark.parametrize("kind", [e.Settle, e.Drain, e.CommitVersion])
def test_requests_that_name_no_engine_are_not_kept_books_about(kind: type[e.Request]) -> None:
    """What the lifecycle does by itself has no outcome at an engine."""
    bench = workbench()
    with pytest.raises(ValueError, match="names no engine"):
        bench.books.sending(kind())
    with pytest.raises(ValueError, match="is not a request to an engine"):
        bench.books.record(kind(), Acknowledgement(outcome=Outcome.DONE), 0.0)


def test_a_long_detail_is_cut() -> None:
    """A page of a server's error does not become an event."""
    bench = workbench()
    bench.exchange(e.FlushCache, Outcome.UNKNOWN, detail="x" * 5000)
    assert len(bench.told(e.CacheFlushed)[0].detail) == 500


def test_a_pause_that_is_sent_is_owed_before_it_is_answered() -> None:
    """From the moment a pause goes out nothing is known of the engine's scheduler, and the debt stands."""
    bench = workbench()
    bench.cohort.epoch = 3
    bench.cohort.fleet.update("left", paused=False, idle=True)
    bench.send(e.PauseGeneration, mode=PauseMode.KEEP)
    debt = bench.cohort.ledger.owed("left")
    assert debt is not None
    assert (debt.mode, debt.epoch, debt.certain) == (PauseMode.KEEP, 3, False)
    assert (bench.left.paused, bench.left.idle) == (None, False)


@pytest.mark.parametrize(
    ("outcome", "owed", "certain", "paused", "idle"),
    [
        (Outcome.DONE, True, True, True, True),
        (Outcome.NOT_DONE, False, None, None, False),
        (Outcome.UNKNOWN, True, False, None, False),
    ],
)
def test_a_pause_has_three_outcomes(
    outcome: Outcome, owed: bool, certain: bool | None, paused: bool | None, idle: bool
) -> None:
    """Done is a certain debt, refused is none, and unknown is a debt like any other. None of them dirties."""
    bench = workbench()
    bench.exchange(e.PauseGeneration, outcome, stopped=True, idle=True)
    debt = bench.cohort.ledger.owed("left")
    assert (debt is not None, debt.certain if debt else None) == (owed, certain)
    facts = bench.left
    assert (facts.paused, facts.idle, facts.dirty, facts.standing) == (paused, idle, False, Standing.SERVING)
    assert [fact.reason for fact in bench.told(e.DebtSettled)] == ([] if owed else ["the pause did not happen"])


@pytest.mark.parametrize("first", [Outcome.DONE, Outcome.UNKNOWN])
def test_a_refused_second_pause_leaves_the_debt_of_the_first(first: Outcome) -> None:
    """A refusal tells of one request, not of the one before it, which may still stand or land."""
    bench = workbench()
    bench.exchange(e.PauseGeneration, first)
    bench.exchange(e.PauseGeneration, Outcome.NOT_DONE)
    assert (bench.cohort.ledger.owed("left") is not None, bench.told(e.DebtSettled)) == (True, [])


@pytest.mark.parametrize(
    ("paused_for", "continued", "settled"),
    [
        (Outcome.DONE, Outcome.DONE, True),
        (Outcome.DONE, Outcome.UNKNOWN, False),
        (Outcome.DONE, Outcome.NOT_DONE, False),
        (Outcome.UNKNOWN, Outcome.DONE, False),
        (Outcome.UNKNOWN, Outcome.UNKNOWN, False),
    ],
)
def test_only_an_acknowledged_continue_of_a_certain_pause_settles_it(
    paused_for: Outcome, continued: Outcome, settled: bool
) -> None:
    """Hope settles nothing: not a lost reply, and not a continue that the pause may still follow."""
    bench = workbench()
    bench.exchange(e.PauseGeneration, paused_for, stopped=True, idle=True)
    bench.exchange(e.ContinueGeneration, continued)
    assert (bench.cohort.ledger.owed("left") is None, len(bench.told(e.DebtSettled))) == (settled, int(settled))
    if continued is Outcome.DONE:
        assert (bench.left.paused, bench.left.idle) == (False, False)


def test_a_dirty_engine_is_never_continued() -> None:
    """Whoever tries it has a bug: nothing goes out."""
    bench = workbench()
    bench.books.dirty("left", "weights are being written")
    with pytest.raises(RuntimeError, match="left is dirty and must not be continued"):
        bench.send(e.ContinueGeneration)


@pytest.mark.parametrize(("outcome", "paused", "idle"), [(Outcome.DONE, True, True), (Outcome.UNKNOWN, False, False)])
def test_a_proof_of_the_pause_says_how_the_engine_stands_now(outcome: Outcome, paused: bool, idle: bool) -> None:
    """What the engine proves replaces what was remembered; without an answer nothing changes."""
    bench = workbench()
    bench.cohort.fleet.update("left", paused=False, idle=False)
    bench.exchange(e.ProvePaused, outcome, stopped=True, idle=True)
    assert (bench.left.paused, bench.left.idle) == (paused, idle)
