"""For every guard and proof: how to make it hold, and how to make it refuse, in a cohort of two engines."""

from collections.abc import Callable

from lifecycle import PauseMode, Standing, Transition
from lifecycle.cohort import Cohort, Intent
from lifecycle.fleet import Fleet
from lifecycle.guards import Condition
from lifecycle.staleness import StalenessBudget

from .workbench import publication_of, serving_cohort

Change = Callable[[Cohort], object]


def ready_for(row: Transition) -> tuple[Cohort, Intent]:
    """Return a cohort and an intent for which every guard and every proof of `row` holds at once."""
    cohort = serving_cohort(version=1, budget=StalenessBudget(batch_size=2, max_staleness=0, version=1))
    for condition in (*row.guards, *row.proofs):
        make_hold(condition, cohort)
    resume = row.resume is not False
    return cohort, Intent(mode=PauseMode.ABORT, target=2, resume=resume)


def make_hold(condition: Condition, cohort: Cohort) -> None:
    """Change a cohort of two serving engines so that `condition` holds; for most there is nothing to do."""
    if condition.__name__ in HOLD:
        HOLD[condition.__name__](cohort)


def _open_submission(cohort: Cohort) -> None:
    cohort.submission_open = True


def _close_submission(cohort: Cohort) -> None:
    cohort.submission_open = False


def _stop(cohort: Cohort) -> None:
    for name in cohort.fleet:
        cohort.fleet.update(name, paused=True, idle=True)


def _acknowledge(cohort: Cohort) -> None:
    publication_of(cohort, 2, opened=set(cohort.fleet), sent=2, acknowledged=2, complete=True)


def _fence(cohort: Cohort) -> None:
    cohort.fleet.update("left", standing=Standing.STALE, reason="its weights may be partly written", dirty=True)


def _lose(cohort: Cohort) -> None:
    cohort.fleet.update("left", standing=Standing.LOST, reason="does not answer")


def _owe(cohort: Cohort) -> None:
    cohort.ledger.owe("left", mode=PauseMode.ABORT, epoch=1, certain=True)


def _fill(cohort: Cohort) -> None:
    cohort.budget.accepted = 4


def _leave_a_bucket(cohort: Cohort) -> None:
    if cohort.publication is not None:
        cohort.publication.sent += 1


def _stay_incomplete(cohort: Cohort) -> None:
    if cohort.publication is not None:
        cohort.publication.complete = False


def _leave_closed(cohort: Cohort) -> None:
    if cohort.publication is not None:
        cohort.publication.opened.discard("left")


def _without_engines(cohort: Cohort) -> None:
    cohort.fleet = Fleet(())


HOLD: dict[str, Change] = {
    "submission_open": _open_submission,
    "submission_closed": _close_submission,
    "stopped": _stop,
    "session_open": _acknowledge,
    "bucket_acknowledged": _acknowledge,
    "every_bucket_acknowledged": _acknowledge,
    "only_a_publication_cures": _fence,
    "too_few_left": _lose,
}

REFUSE: dict[str, tuple[Change, str]] = {
    "at_least_one_engine": (_without_engines, "the fleet has no engine"),
    "enough_reachable": (_lose, "1 of 2 required engines are reachable; lost: left (does not answer)"),
    "enough_serving": (
        _fence,
        "1 of 2 required engines are serving; fenced: left (its weights may be partly written)",
    ),
    "pauses_matched": (_owe, "pauses of left are not matched by a continue"),
    "staleness_capacity": (_fill, "staleness capacity is 0 at version 1"),
    "submission_open": (_close_submission, "the submission gate is closed"),
    "submission_closed": (_open_submission, "the submission gate is open"),
    "stopped": (
        lambda cohort: cohort.fleet.update("left", paused=True, idle=False),
        "left may still hold requests after a pause in mode abort",
    ),
    "version_advances": (
        lambda cohort: _published(cohort, 2),
        "version 2 does not advance beyond the published 2",
    ),
    "memory_awake": (
        lambda cohort: cohort.fleet.update("left", asleep=True),
        "left sleep, so that weights have nowhere to go; wake them first",
    ),
    "session_open": (_leave_closed, "no update session is open at left"),
    "bucket_acknowledged": (_leave_a_bucket, "1 of 3 buckets are not acknowledged by every engine"),
    "every_bucket_acknowledged": (_stay_incomplete, "the last bucket of the version has not been transferred"),
    "versions_agree": (lambda cohort: cohort.fleet.update("left", version=0), "left do not hold version 1"),
    "sessions_closed": (
        lambda cohort: cohort.fleet.update("left", session=True),
        "update sessions are still open at left",
    ),
    "only_a_publication_cures": (
        lambda cohort: cohort.fleet.update("left", standing=Standing.SERVING, dirty=False, reason=""),
        "enough engines are serving",
    ),
    "too_few_left": (
        lambda cohort: cohort.fleet.update("left", standing=Standing.SERVING, reason=""),
        "2 engines are reachable and 2 are required",
    ),
}
"""By condition: what makes it refuse where it held, and the sentence that it then says."""


def _published(cohort: Cohort, version: int) -> None:
    cohort.version = version
    for name in cohort.fleet:
        cohort.fleet.update(name, version=version)
