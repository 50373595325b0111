"""Every guard and proof on its own: when it holds, and the sentence with which it refuses."""

from collections.abc import Callable

import pytest

from lifecycle import TRANSITIONS, FleetPolicy, PauseMode, StalenessBudget, Standing
from lifecycle import guards as g
from lifecycle.cohort import Cohort, Intent
from lifecycle.fleet import Fleet
from lifecycle.guards import Condition

from .conditions import REFUSE, make_hold
from .workbench import publication_of, serving_cohort

ANY = Intent()
CONDITIONS = sorted({c for row in TRANSITIONS for c in (*row.guards, *row.proofs)}, key=lambda c: c.__name__)


def _prepared(condition: Condition) -> Cohort:
    budget = StalenessBudget(batch_size=2, max_staleness=0, version=1)
    cohort = serving_cohort(version=1, budget=budget)
    make_hold(condition, cohort)
    return cohort


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: c.__name__)
def test_each_condition_holds_and_refuses(condition: Condition) -> None:
    """Every condition of the table passes where it should, and refuses with its own sentence where it should not."""
    cohort, intent = _prepared(condition), Intent(target=2)
    passed = condition(cohort, intent)
    change, reason = REFUSE[condition.__name__]
    change(cohort)
    assert (passed, condition(cohort, intent)) == (None, reason)


@pytest.mark.parametrize(
    ("policy", "lost", "refusal"),
    [
        (FleetPolicy(), 0, None),
        (FleetPolicy(), 1, "2 of 3 required engines are reachable; lost: a (gone)"),
        (FleetPolicy(min_engines=2), 1, None),
        (FleetPolicy(min_engines=2), 2, "1 of 2 required engines are reachable; lost: a (gone), b (gone)"),
        (FleetPolicy(min_engines=9), 1, "2 of 3 required engines are reachable; lost: a (gone)"),
        (FleetPolicy(min_engines=1, on_engine_failure="fault"), 1,
         "2 of 3 required engines are reachable; lost: a (gone)"),
    ],
)  # fmt: skip
def test_how_many_engines_are_enough_is_the_policys_affair(policy: FleetPolicy, lost: int, refusal: str | None) -> None:
    """`min_engines` says how many must be reachable: all by default, all where failures are faults, never too many."""
    cohort = serving_cohort("a", "b", "c", policy=policy)
    for name in ("a", "b")[:lost]:
        cohort.fleet.update(name, standing=Standing.LOST, reason="gone")
    assert g.enough_reachable(cohort, ANY) == refusal


def test_a_stale_engine_is_reachable_but_does_not_serve() -> None:
    """A fenced engine still takes part in publications, so that an all-dirty fleet can be cured."""
    cohort = serving_cohort()
    for name in cohort.fleet:
        cohort.fleet.update(name, standing=Standing.STALE, reason="behind")
    assert g.enough_reachable(cohort, ANY) is None
    assert g.enough_serving(cohort, ANY) == "0 of 2 required engines are serving; fenced: left (behind), right (behind)"


def test_agreement_among_no_engines_is_no_agreement() -> None:
    """An empty fleet is refused as such; the counting guards alone would find nothing missing."""
    cohort = Cohort(fleet=Fleet(()))
    assert g.at_least_one_engine(cohort, ANY) == "the fleet has no engine"


@pytest.mark.parametrize("standing", [Standing.STALE, Standing.LOST])
def test_a_fenced_engine_keeps_its_debt_without_holding_up_the_fleet(standing: Standing) -> None:
    """Pauses are matched when no serving engine owes; the debt of a fenced one stays on record."""
    cohort = serving_cohort()
    cohort.ledger.owe("left", mode=PauseMode.ABORT, epoch=1)
    cohort.fleet.update("left", standing=standing)
    assert g.pauses_matched(cohort, ANY) is None
    assert [debt.engine for debt in cohort.ledger.outstanding] == ["left"]


def test_staleness_capacity_counts_what_may_be_admitted() -> None:
    """One place is enough, none is not."""
    cohort = serving_cohort(budget=StalenessBudget(batch_size=1, max_staleness=1))
    cohort.budget.admit()
    assert g.staleness_capacity(cohort, ANY) is None
    cohort.budget.admit()
    assert g.staleness_capacity(cohort, ANY) == "staleness capacity is 0 at version 0"


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("paused", [True, False, None])
@pytest.mark.parametrize("idle", [True, False])
def test_stopped_asks_for_what_the_mode_promises(mode: PauseMode, paused: bool | None, idle: bool) -> None:
    """ABORT and WAIT are proven by an idle engine; the modes that keep requests, by a scheduler that stands."""
    cohort = serving_cohort("only")
    cohort.mode = mode
    cohort.fleet.update("only", paused=paused, idle=idle)
    proven = bool(paused) if mode.keeps_requests else idle
    assert (g.stopped(cohort, ANY) is None) is proven


def test_stopped_does_not_ask_engines_that_cannot_be_reached() -> None:
    """A lost engine proves nothing and is asked for nothing."""
    cohort = serving_cohort()
    cohort.fleet.update("left", paused=True, idle=True)
    assert g.stopped(cohort, ANY) == "right may still hold requests after a pause in mode abort"
    cohort.fleet.update("right", standing=Standing.LOST)
    assert g.stopped(cohort, ANY) is None


def _behind(cohort: Cohort) -> None:
    cohort.fleet.update("left", version=None)


def _dirty(cohort: Cohort) -> None:
    cohort.fleet.update("left", dirty=True)


def _lost_and_behind(cohort: Cohort) -> None:
    cohort.fleet.update("left", version=2, standing=Standing.LOST)


@pytest.mark.parametrize(
    ("target", "published", "change", "allowed"),
    [
        (0, None, None, True),
        (4, 3, None, True),
        (9, 3, None, True),
        (3, 3, None, False),
        (3, 3, _behind, True),
        (3, 3, _dirty, True),
        (3, 3, _lost_and_behind, False),
        (2, 3, None, False),
        (2, 3, _behind, False),
    ],
)
def test_the_version_only_grows_but_for_a_catch_up(
    target: int, published: int | None, change: Callable[[Cohort], None] | None, allowed: bool
) -> None:
    """A publication goes forward, or repeats the published version where a reachable engine does not hold it whole."""
    cohort = serving_cohort(version=published)
    if change is not None:
        change(cohort)
    refusal = None if allowed else f"version {target} does not advance beyond the published {published}"
    assert g.version_advances(cohort, Intent(target=target)) == refusal


@pytest.mark.parametrize("condition", [g.session_open, g.bucket_acknowledged, g.every_bucket_acknowledged])
def test_without_a_publication_no_session_is_open(condition: Condition) -> None:
    """What is asked about an update refuses where there is none."""
    assert condition(serving_cohort(), ANY) == "no update session is open"


def test_a_version_is_whole_when_its_last_bucket_is_acknowledged() -> None:
    """All buckets so far are not yet the version."""
    cohort = serving_cohort()
    publication = publication_of(cohort, sent=1)
    assert g.every_bucket_acknowledged(cohort, ANY) == "1 of 1 buckets are not acknowledged by every engine"
    publication.acknowledged = 1
    assert g.bucket_acknowledged(cohort, ANY) is None
    assert g.every_bucket_acknowledged(cohort, ANY) == "the last bucket of the version has not been transferred"
    publication.complete = True
    assert g.every_bucket_acknowledged(cohort, ANY) is None


def test_a_dirty_engine_does_not_agree_on_any_version() -> None:
    """A label is not enough: the weights must be whole."""
    cohort = serving_cohort(version=3)
    cohort.fleet.update("right", dirty=True)
    assert g.versions_agree(cohort, ANY) == "right do not hold version 3"


def test_sessions_of_lost_engines_are_not_waited_for() -> None:
    """Sessions are closed when no reachable engine has one."""
    cohort = serving_cohort()
    cohort.fleet.update("left", session=True, standing=Standing.LOST)
    assert g.sessions_closed(cohort, ANY) is None


def test_only_a_publication_cures_needs_engines_to_publish_to() -> None:
    """Where too few engines answer, no publication cures anything."""
    cohort = serving_cohort()
    cohort.fleet.update("left", standing=Standing.LOST, reason="gone")
    assert g.only_a_publication_cures(cohort, ANY) == "1 of 2 required engines are reachable; lost: left (gone)"


STRICT = FleetPolicy(on_engine_failure="fault")


def _fenced(policy: FleetPolicy, version: int | None = 3) -> Cohort:
    cohort = serving_cohort(version=version, policy=policy)
    cohort.fleet.update("left", standing=Standing.STALE, reason="did not continue")
    return cohort


def test_a_fenced_engine_is_a_fault_only_where_the_policy_is_strict() -> None:
    """`"fence"` goes on without an engine while enough are reachable; `"fault"` never does."""
    assert g.too_few_left(_fenced(FleetPolicy()), ANY) == "2 engines are reachable and 2 are required"
    assert g.too_few_left(_fenced(STRICT), ANY) is None


def test_engines_fenced_for_a_publication_are_no_fault() -> None:
    """While generation is held, or an update is open, a strict fleet waits for its weights like any other."""
    held = _fenced(STRICT)
    held.generation_held = True
    updating = _fenced(STRICT)
    publication_of(updating, 4)
    unpublished = _fenced(STRICT, version=None)
    assert [g.too_few_left(cohort, ANY) for cohort in (held, updating, unpublished)] == [
        "2 engines are reachable and 2 are required"
    ] * 3


def test_a_lost_engine_is_a_fault_at_any_time_where_all_are_required() -> None:
    """An engine that cannot be reached is missing, also in the middle of a publication."""
    cohort = _fenced(STRICT)
    cohort.generation_held = True
    cohort.fleet.update("left", standing=Standing.LOST)
    assert g.too_few_left(cohort, ANY) is None


@pytest.mark.parametrize("minimum", [0, -1])
def test_a_fleet_of_none_cannot_be_asked_for(minimum: int) -> None:
    """`min_engines` below 1 would make agreement among no engines an agreement."""
    with pytest.raises(ValueError, match="min_engines must be at least 1"):
        FleetPolicy(min_engines=minimum)


def test_a_policy_must_be_one_that_exists() -> None:
    """A mistyped policy is refused where it is written."""
    with pytest.raises(ValueError, match='must be "fence" or "fault", got \'ignore\''):
        FleetPolicy(on_engine_failure="ignore")
