"""What must hold on the way: for requests that go to engines, for what is made of replies, and for what is recorded."""

from typing import Any

from attrs import define, field

from lifecycle import events as e
from lifecycle.fleet import EngineFacts
from lifecycle.ledger import Debt
from lifecycle.states import Outcome, Standing, State, Trigger

from .predicates import Moment
from .truth import Truth

# -------------------------------------------------------------------------------------------------------- on requests


def no_dirty_engine_is_continued(request: e.Request, before: Truth, facts: EngineFacts) -> str | None:
    """An engine whose weights are, or may be, partly written is never continued, whatever comes of the request."""
    if not isinstance(request, e.ContinueGeneration) or not before.alive:
        return None
    if facts.dirty:
        return f"{facts.name} is dirty and is continued"
    return None if before.whole else f"{facts.name} is partly written and is continued"


def no_weights_meet_generation(request: e.Request, before: Truth, facts: EngineFacts) -> str | None:
    """No update begins and no weight is written while the engine generates, unless nobody could have told us.

    BEGIN_UPDATE proves the pause again: what happened before it could have been told.
    """
    if not isinstance(request, (e.BeginUpdate, e.TransferWeights)) or before.paused or not before.alive:
        return None
    untold = before.untold > (1 if isinstance(request, e.BeginUpdate) else 0)
    return None if untold else f"{facts.name} generates and gets {type(request).__name__}"


ON_REQUEST = (no_dirty_engine_is_continued, no_weights_meet_generation)


def breached_by_request(request: e.Request, before: Truth, facts: EngineFacts) -> list[str]:
    """Return every predicate that a request does not keep, with how."""
    reasons = ((predicate, predicate(request, before, facts)) for predicate in ON_REQUEST)
    return [f"{predicate.__name__}: {reason}" for predicate, reason in reasons if reason is not None]


# --------------------------------------------------------------------------------------------------------- on replies


def no_continue_settles_what_may_still_land(request: e.Request, before: Debt | None, after: Debt | None) -> str | None:
    """A pause that may still happen is not settled by a continue: a probe must say that the engine runs."""
    settles = before is not None and not before.certain and after is None
    if isinstance(request, e.ContinueGeneration) and settles:
        return f"the uncertain pause of {request.engine} is settled by a continue"
    return None


ON_REPLY = (no_continue_settles_what_may_still_land,)


def breached_by_reply(request: e.Request, before: Debt | None, after: Debt | None) -> list[str]:
    """Return every predicate that the consequences of a reply do not keep; the debts are those before and after."""
    reasons = ((predicate, predicate(request, before, after)) for predicate in ON_REPLY)
    return [f"{predicate.__name__}: {reason}" for predicate, reason in reasons if reason is not None]


# ---------------------------------------------------------------------------------------------------------- on events


@define
class History:
    """What the events of one operation have said so far."""

    canaries: set[str] = field(factory=set)


def the_version_only_grows(event: Any, now: Moment, _: History) -> str | None:
    """The version never goes back."""
    if not isinstance(event, e.VersionAdvanced) or event.previous is None or event.version is None:
        return None
    back = event.version < event.previous
    return f"the version goes back from {event.previous} to {event.version}" if back else None


def the_version_advances_with_the_engines(event: Any, now: Moment, _: History) -> str | None:
    """When the version advances, enough engines hold it, whole, but for those that nobody could have told us of."""
    if not isinstance(event, e.VersionAdvanced):
        return None
    truths = now.truths.values()
    held = sum((t.whole and t.holds == event.version) or not t.alive or t.untold > 0 for t in truths)
    return None if held >= now.cohort.required else f"the version is {event.version}, and {held} engines hold it"


def a_canary_comes_before_serving(event: Any, now: Moment, history: History) -> str | None:
    """After a publication an engine is routed to only once it has generated."""
    publishes = now.machine.in_flight is Trigger.FINISH_UPDATE
    if isinstance(event, e.CanaryAnswered) and event.outcome is Outcome.DONE:
        history.canaries.add(event.engine)
    serves = isinstance(event, e.StandingChanged) and event.after is Standing.SERVING
    if serves and publishes and event.engine not in history.canaries:
        return f"{event.engine} serves, and no canary has answered"
    return None


def faulted_is_left_by_recovering(event: Any, now: Moment, _: History) -> str | None:
    """FAULTED is left by RECOVER and by CLOSE only."""
    commits = isinstance(event, e.TransitionCommitted) and event.source is State.FAULTED
    if commits and event.trigger not in {Trigger.RECOVER, Trigger.CLOSE}:
        return f"{event.trigger.name} leaves FAULTED"
    return None


ON_EVENT = (
    the_version_only_grows,
    the_version_advances_with_the_engines,
    a_canary_comes_before_serving,
    faulted_is_left_by_recovering,
)
WATCHED = frozenset({e.VersionAdvanced, e.CanaryAnswered, e.StandingChanged, e.TransitionCommitted})
"""The kinds of events that `ON_EVENT` looks at."""
