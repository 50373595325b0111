"""The bookkeeper during an update: when weights are at risk, and what gives an engine back what it had."""

import pytest

from lifecycle import Outcome, Standing
from lifecycle import events as e
from lifecycle.ports import Acknowledgement

from .workbench import RISKY, Workbench, publication_of, workbench


def _updating(*, at_risk_from_begin: bool = False, standing: Standing = Standing.SERVING) -> Workbench:
    bench = workbench(capabilities=lambda _: RISKY) if at_risk_from_begin else workbench()
    bench.cohort.fleet.update("left", standing=standing)
    publication_of(bench.cohort)
    return bench


@pytest.mark.parametrize("at_risk", [True, False])
def test_weights_are_at_risk_from_where_the_dialect_says(at_risk: bool) -> None:
    """Some engines may be partly written once the update is begun, others only once weights are sent."""
    bench = _updating(at_risk_from_begin=at_risk)
    bench.send(e.BeginUpdate)
    begun = bench.left
    assert (begun.session, begun.dirty) == (True, at_risk)
    bench.send(e.TransferWeights)
    sent = bench.left
    assert (sent.dirty, sent.touched, sent.standing) == (True, True, Standing.STALE)


def test_another_kind_of_channel_is_another_risk() -> None:
    """A kind of channel that the dialect does not name puts nothing at risk when the update begins."""
    bench = _updating(at_risk_from_begin=True)
    bench.books.sending(bench.recorder.emit(e.BeginUpdate, engine="left", kind="disk"))
    assert bench.left.dirty is False


@pytest.mark.parametrize(
    ("outcome", "opened", "session", "dirty", "standing"),
    [
        (Outcome.DONE, {"left"}, True, True, Standing.STALE),
        (Outcome.NOT_DONE, set(), True, False, Standing.SERVING),
        (Outcome.UNKNOWN, set(), True, True, Standing.STALE),
    ],
)
def test_a_begin_opens_the_session_or_proves_that_nothing_happened(
    outcome: Outcome, opened: set[str], session: bool, dirty: bool, standing: Standing
) -> None:
    """A refused begin gives the standing back; what session the engine may have is left to be closed."""
    bench = _updating(at_risk_from_begin=True)
    facts = bench.exchange(e.BeginUpdate, outcome)
    assert bench.cohort.publication is not None
    assert bench.cohort.publication.opened == opened
    assert (facts.session, facts.dirty, facts.standing) == (session, dirty, standing)


def test_a_late_answer_to_a_begin_without_a_publication_changes_nothing() -> None:
    """An update that was given up is not opened by its own late reply."""
    bench = _updating()
    request = bench.recorder.emit(e.BeginUpdate, engine="left")
    bench.books.sending(request)
    bench.cohort.publication = None
    bench.books.record(request, Acknowledgement(outcome=Outcome.DONE), 0.0)
    assert bench.left.session is True


@pytest.mark.parametrize("outcome", Outcome)
def test_weights_that_were_sent_are_at_risk_whatever_the_answer(outcome: Outcome) -> None:
    """An acknowledged bucket is not a version, and a refused one proves nothing by itself."""
    bench = _updating()
    facts = bench.exchange(e.TransferWeights, outcome)
    assert (facts.dirty, facts.touched, facts.standing) == (True, True, Standing.STALE)


@pytest.mark.parametrize(("buckets_before", "touched"), [(0, False), (1, True)])
def test_only_the_first_bucket_can_be_proven_not_to_have_touched_anything(buckets_before: int, touched: bool) -> None:
    """A refusal that proves the weights untouched speaks of its own bucket, not of those before it."""
    bench = _updating()
    for _ in range(buckets_before):
        bench.exchange(e.TransferWeights, Outcome.DONE)
    assert bench.exchange(e.TransferWeights, Outcome.NOT_DONE, untouched=True).touched is touched


@pytest.mark.parametrize("untouched_first", [True, False])
def test_an_abandoned_update_gives_the_standing_back_only_to_untouched_engines(untouched_first: bool) -> None:
    """Closing the session restores an engine that no weight reached; any other stays dirty until it is published to."""
    bench = _updating(at_risk_from_begin=True)
    bench.exchange(e.BeginUpdate, Outcome.DONE)
    if not untouched_first:
        bench.exchange(e.TransferWeights, Outcome.DONE)
    facts = bench.exchange(e.AbandonUpdate, Outcome.DONE, untouched=True)
    expected = (False, False, Standing.SERVING) if untouched_first else (False, True, Standing.STALE)
    assert (facts.session, facts.dirty, facts.standing) == expected


def test_an_abandoned_update_that_proves_nothing_restores_nothing() -> None:
    """Without the engine's own word that it is untouched, it counts as dirty."""
    bench = _updating(at_risk_from_begin=True)
    bench.exchange(e.BeginUpdate, Outcome.DONE)
    facts = bench.exchange(e.AbandonUpdate, Outcome.DONE)
    assert (facts.session, facts.dirty, facts.standing) == (False, True, Standing.STALE)


@pytest.mark.parametrize("outcome", [Outcome.NOT_DONE, Outcome.UNKNOWN])
def test_a_session_that_was_not_closed_stays_on_record(outcome: Outcome) -> None:
    """Only an acknowledged abandon closes a session."""
    bench = _updating()
    bench.exchange(e.BeginUpdate, Outcome.DONE)
    assert bench.exchange(e.AbandonUpdate, outcome, untouched=True).session is True


def test_an_untouched_engine_stands_as_it_stood() -> None:
    """An engine that was stale before the publication does not come to serve by its failing."""
    bench = _updating(at_risk_from_begin=True, standing=Standing.STALE)
    bench.exchange(e.BeginUpdate, Outcome.DONE)
    facts = bench.exchange(e.AbandonUpdate, Outcome.DONE, untouched=True)
    assert (facts.dirty, facts.standing) == (False, Standing.STALE)


def test_an_engine_that_was_dirty_before_is_not_cleaned_by_an_abandoned_update() -> None:
    """What an earlier publication left half-written stays so: this one has proven nothing about it."""
    bench = _updating(at_risk_from_begin=True)
    bench.cohort.fleet.update("left", dirty=True, standing=Standing.STALE)
    bench.exchange(e.BeginUpdate, Outcome.DONE)
    facts = bench.exchange(e.AbandonUpdate, Outcome.DONE, untouched=True)
    assert (facts.dirty, facts.standing) == (True, Standing.STALE)


def test_an_engine_lost_meanwhile_is_not_restored_to_service() -> None:
    """It is whole, but it does not answer."""
    bench = _updating(at_risk_from_begin=True)
    bench.exchange(e.BeginUpdate, Outcome.DONE)
    bench.books.fence("left", Standing.LOST, "gone")
    facts = bench.exchange(e.AbandonUpdate, Outcome.DONE, untouched=True)
    assert (facts.dirty, facts.standing) == (False, Standing.LOST)


@pytest.mark.parametrize(
    ("outcome", "finished", "session"),
    [(Outcome.DONE, {"left"}, False), (Outcome.NOT_DONE, set(), True), (Outcome.UNKNOWN, set(), True)],
)
def test_an_acknowledged_finish_closes_the_session_and_cleans_nothing(
    outcome: Outcome, finished: set[str], session: bool
) -> None:
    """Finished is not verified: the engine is dirty until the commit point."""
    bench = _updating()
    bench.exchange(e.BeginUpdate, Outcome.DONE)
    bench.exchange(e.TransferWeights, Outcome.DONE)
    facts = bench.exchange(e.FinishUpdate, outcome)
    assert bench.cohort.publication is not None
    assert (bench.cohort.publication.finished, facts.session, facts.dirty) == (finished, session, True)


@pytest.mark.parametrize(
    ("outcome", "verified"), [(Outcome.DONE, {"left"}), (Outcome.NOT_DONE, set()), (Outcome.UNKNOWN, set())]
)
def test_only_acknowledged_evidence_verifies(outcome: Outcome, verified: set[str]) -> None:
    """An engine that cannot show the version does not count among those that hold it."""
    bench = _updating()
    bench.exchange(e.VerifyWeights, outcome)
    assert bench.cohort.publication is not None
    assert bench.cohort.publication.verified == verified


@pytest.mark.parametrize("kind", [e.OpenTransfer, e.FlushCache, e.LabelVersion, e.Canary, e.CloseTransfer])
@pytest.mark.parametrize("outcome", Outcome)
def test_what_follows_from_other_requests_is_the_procedures_affair(kind: type[e.Request], outcome: Outcome) -> None:
    """These outcomes are recorded and change no fact by themselves."""
    bench = _updating()
    before = dict(bench.cohort.fleet)
    bench.exchange(kind, outcome)
    assert (dict(bench.cohort.fleet), bench.cohort.ledger.outstanding) == (before, ())
