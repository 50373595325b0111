"""Guards and proofs: pure functions over what is known. Each returns `None`, or a sentence that says why it refuses.

A guard is asked before anything is sent, a proof before the state changes. Both are named in the transition table.
"""

from collections.abc import Callable

from .cohort import Cohort, Intent
from .states import PauseMode

Condition = Callable[[Cohort, Intent], str | None]


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def at_least_one_engine(cohort: Cohort, _: Intent) -> str | None:
    """There is something to control: agreement among no engines is no agreement."""
    return None if len(cohort.fleet) else "the fleet has no engine"


def enough_reachable(cohort: Cohort, _: Intent) -> str | None:
    """Enough engines are serving or stale to take part."""
    lost = [f"{e.name} ({e.reason})" for e in cohort.fleet.values() if not e.reachable]
    if (left := len(cohort.fleet.reachable)) >= cohort.required:
        return None
    return f"{left} of {cohort.required} required engines are reachable; lost: {_listed(lost)}"


def enough_serving(cohort: Cohort, _: Intent) -> str | None:
    """Enough engines hold whole weights of the published version."""
    fenced = [f"{e.name} ({e.reason})" for e in cohort.fleet.values() if not e.serving]
    if (left := len(cohort.fleet.serving)) >= cohort.required:
        return None
    return f"{left} of {cohort.required} required engines are serving; fenced: {_listed(fenced)}"


def pauses_matched(cohort: Cohort, _: Intent) -> str | None:
    """Every pause of a serving engine was matched by a continue. A fenced engine keeps its debt on record."""
    owing = [e.name for e in cohort.fleet.serving if cohort.ledger.owed(e.name)]
    return f"pauses of {_listed(owing)} are not matched by a continue" if owing else None


def staleness_capacity(cohort: Cohort, _: Intent) -> str | None:
    """The staleness budget has place for another rollout."""
    capacity = cohort.budget.capacity()
    return None if capacity >= 1 else f"staleness capacity is {capacity} at version {cohort.version}"


def submission_open(cohort: Cohort, _: Intent) -> str | None:
    """The submission gate is open."""
    return None if cohort.submission_open else "the submission gate is closed"


def submission_closed(cohort: Cohort, _: Intent) -> str | None:
    """The submission gate is closed."""
    return "the submission gate is open" if cohort.submission_open else None


def stopped(cohort: Cohort, _: Intent) -> str | None:
    """Every reachable engine has stopped, by what the pause mode asks for.

    ABORT and WAIT: no request is left in the engine. Modes that keep requests: the scheduler has stopped.
    """
    if cohort.mode in {PauseMode.ABORT, PauseMode.WAIT}:
        busy = [e.name for e in cohort.fleet.reachable if not e.idle]
        return f"{_listed(busy)} may still hold requests after a pause in mode {cohort.mode.value}" if busy else None
    going = [e.name for e in cohort.fleet.reachable if not e.paused]
    return f"{_listed(going)} may still be generating after a pause in mode {cohort.mode.value}" if going else None


def version_advances(cohort: Cohort, intent: Intent) -> str | None:
    """The version grows; it may stay the same where an engine has to catch up."""
    target, published = intent.target, cohort.version
    if target is None:
        return None
    behind = any(e.version != published or e.dirty or e.unfit for e in cohort.fleet.reachable)
    if published is not None and (target < published or (target == published and not behind)):
        return f"version {target} does not advance beyond the published {published}"
    # A budget that is further on, or shared by two, would refuse the version after the commit point.
    if target < cohort.budget.version:
        return f"version {target} is behind the staleness budget's {cohort.budget.version}"
    return None


def memory_awake(cohort: Cohort, _: Intent) -> str | None:
    """Every reachable engine has its weights in memory."""
    asleep = [e.name for e in cohort.fleet.reachable if e.asleep]
    return f"{_listed(asleep)} sleep, so that weights have nowhere to go; wake them first" if asleep else None


def session_open(cohort: Cohort, _: Intent) -> str | None:
    """Every engine of the publication has its update session open."""
    if cohort.publication is None:
        return "no update session is open"
    closed = [name for name in cohort.publication.members if name not in cohort.publication.opened]
    return f"no update session is open at {_listed(closed)}" if closed else None


def bucket_acknowledged(cohort: Cohort, _: Intent) -> str | None:
    """Every bucket sent so far was acknowledged by every engine of the publication."""
    if cohort.publication is None:
        return "no update session is open"
    missing = cohort.publication.sent - cohort.publication.acknowledged
    return f"{missing} of {cohort.publication.sent} buckets are not acknowledged by every engine" if missing else None


def every_bucket_acknowledged(cohort: Cohort, intent: Intent) -> str | None:
    """The whole version was sent and acknowledged."""
    if (reason := bucket_acknowledged(cohort, intent)) is not None:
        return reason
    complete = cohort.publication is not None and cohort.publication.complete
    return None if complete else "the last bucket of the version has not been transferred"


def versions_agree(cohort: Cohort, _: Intent) -> str | None:
    """Every serving engine holds the published version, whole."""
    odd = [e.name for e in cohort.fleet.serving if e.version != cohort.version or e.dirty]
    return f"{_listed(odd)} do not hold version {cohort.version}" if odd else None


def sessions_closed(cohort: Cohort, _: Intent) -> str | None:
    """No reachable engine has an update session open."""
    left = [e.name for e in cohort.fleet.reachable if e.session]
    return f"update sessions are still open at {_listed(left)}" if left else None


def only_a_publication_cures(cohort: Cohort, intent: Intent) -> str | None:
    """Enough engines are reachable, but not enough of them hold whole weights of the published version."""
    if (reason := enough_reachable(cohort, intent)) is not None:
        return reason
    return "enough engines are serving" if enough_serving(cohort, intent) is None else None


def too_few_left(cohort: Cohort, intent: Intent) -> str | None:
    """Fewer engines are left than the policy asks for."""
    if enough_reachable(cohort, intent) is not None:
        return None
    if _goes_on_without_one(cohort, intent):
        return None
    return f"{len(cohort.fleet.reachable)} engines are reachable and {cohort.required} are required"


def _goes_on_without_one(cohort: Cohort, intent: Intent) -> bool:
    """Whether a fleet that must be whole generates with an engine missing.

    While generation is held or an update is open, engines are fenced because their weights are on the way, not because
    they failed; and before the first version nobody serves.
    """
    if cohort.policy.on_engine_failure != "fault" or cohort.version is None:
        return False
    between = cohort.generation_held or cohort.publication is not None
    return not between and enough_serving(cohort, intent) is not None
