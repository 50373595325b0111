"""What must hold, each stated once, as a named predicate: a docstring that says it, and a sentence where it does not.

Here is what holds between operations; `conduct` has what holds on the way. The true engines are the measure; what the
lifecycle believes is compared with them.
"""

from collections.abc import Callable, Mapping

from attrs import define

from lifecycle.cohort import Cohort, Intent
from lifecycle.errors import LifecycleError
from lifecycle.fleet import EngineFacts
from lifecycle.gate import SubmissionGate
from lifecycle.guards import enough_reachable, enough_serving
from lifecycle.machine import LifecycleMachine
from lifecycle.states import State

from .truth import Truth

_GENERATING = (State.RUNNING, State.SUSPENDED)
_ANY = Intent()


@define(kw_only=True)
class Moment:
    """All there is at one moment."""

    cohort: Cohort
    machine: LifecycleMachine
    gate: SubmissionGate
    truths: Mapping[str, Truth]

    @property
    def state(self) -> State:
        """What the machine says."""
        return self.machine.state

    def acquainted(self) -> list[tuple[EngineFacts, Truth]]:
        """Return the engines that live, and are still the process that the lifecycle knows."""
        pairs = [(facts, self.truths[facts.name]) for facts in self.cohort.fleet.values()]
        return [(f, t) for f, t in pairs if t.alive and f.incarnation == str(t.incarnation)]


# ------------------------------------------------------------------------------------------------- between operations


def every_pause_is_on_record(now: Moment) -> str | None:
    """An engine that is paused owes a continue, unless it was paused by what nobody could have told us."""
    for facts, truth in now.acquainted():
        if truth.paused and now.cohort.ledger.owed(facts.name) is None and not truth.untold:
            return f"{facts.name} is paused, and no debt is on record"
    return None


def every_pause_is_matched(now: Moment) -> str | None:
    """In RUNNING, and at the end, a debt is left only at an engine that is fenced."""
    if now.state not in {State.RUNNING, State.CLOSED}:
        return None
    owing = [f.name for f in now.cohort.fleet.serving if now.cohort.ledger.owed(f.name) is not None]
    return f"{owing[0]} serves and owes a continue" if owing else None


def no_dirty_engine_serves(now: Moment) -> str | None:
    """An engine whose weights may be partly written is not routed to, and one whose weights are is known to be."""
    for facts in now.cohort.fleet.serving:
        if facts.dirty:
            return f"{facts.name} serves and is dirty"
    for facts, truth in now.acquainted():
        if not truth.whole and not facts.dirty:
            return f"{facts.name} is partly written and counts as whole"
    return None


def who_serves_holds_the_published_version(now: Moment) -> str | None:
    """A serving engine holds the published version, whole, is labelled with it, and uses no caches of other weights.

    Where pauses keep requests, these may keep their caches: that is what the mode is chosen for.
    """
    version = now.cohort.version
    for facts, truth in now.acquainted():
        if facts.serving and (facts.version, truth.holds, truth.label) != (version, version, version):
            return (
                f"{facts.name} serves at version {version}, holds {truth.holds}, and is labelled {truth.label}"
                f" (believed: {facts.version})"
            )
        if facts.serving and truth.old_cache and not now.cohort.mode.keeps_requests:
            return f"{facts.name} serves with caches of other weights"
    return None


def who_is_routed_to_generates(now: Moment) -> str | None:
    """In RUNNING and SUSPENDED no engine is paused that serves and owes nothing, unless nobody could have told us."""
    for facts, truth in now.acquainted():
        routed = facts.serving and now.state in _GENERATING and now.cohort.ledger.owed(facts.name) is None
        if routed and truth.paused and not truth.untold:
            return f"{facts.name} is routed to and is paused"
    return None


def running_means_enough_serving(now: Moment) -> str | None:
    """RUNNING: enough engines serve."""
    return enough_serving(now.cohort, _ANY) if now.state is State.RUNNING else None


def paused_means_stopped(now: Moment) -> str | None:
    """In PAUSED and UPDATING every reachable engine is paused, unless nobody could have told us.

    In PAUSED one may be known to generate, since BEGIN_UPDATE has found it so, and has refused.
    """
    if now.state not in {State.PAUSED, State.UPDATING}:
        return None
    for facts, truth in now.acquainted():
        found_out = now.state is State.PAUSED and facts.paused is False
        if facts.reachable and not truth.paused and not truth.untold and not found_out:
            return f"{facts.name} generates in {now.state.name}"
    return None


def too_few_means_faulted(now: Moment) -> str | None:
    """Where fewer engines are reachable than the policy asks for, the lifecycle is FAULTED, or over."""
    return None if now.state in {State.FAULTED, State.CLOSED} else enough_reachable(now.cohort, _ANY)


def only_running_admits(now: Moment) -> str | None:
    """A rollout is admitted in RUNNING and nowhere else; there submission is open."""
    if now.state is State.CLOSED:
        return None
    running = now.state is State.RUNNING
    if admits(now.gate) is not running:
        return f"the gate {'refuses' if running else 'admits'} in {now.state.name}"
    if now.cohort.submission_open is not running:
        return f"submission_open is {now.cohort.submission_open} in {now.state.name}"
    return None


def nothing_is_left_in_between(now: Moment) -> str | None:
    """No trigger is in flight, a publication is open in UPDATING only, and generation is held in pauses only."""
    state, cohort = now.state, now.cohort
    if now.machine.in_flight is not None:
        return f"{now.machine.in_flight.name} is still in flight"
    if cohort.publication is not None and state not in {State.UPDATING, State.FAULTED}:
        return f"a publication is open in {state.name}"
    if cohort.publication is None and state is State.UPDATING:
        return "no publication is open in UPDATING"
    if state not in {State.FAULTED, State.CLOSED} and cohort.generation_held is (state in _GENERATING):
        return f"generation_held is {cohort.generation_held} in {state.name}"
    return None


def the_ledger_adds_up(now: Moment) -> str | None:
    """Pauses minus matched pauses are the debts outstanding."""
    ledger = now.cohort.ledger
    left = len(ledger.outstanding)
    return None if ledger.pauses - ledger.matched == left else f"{ledger.pauses} - {ledger.matched} is not {left}"


def who_is_fenced_has_a_reason(now: Moment) -> str | None:
    """An engine that does not serve says why."""
    mute = [f.name for f in now.cohort.fleet.values() if not f.serving and not f.reason]
    return f"{mute[0]} is fenced without a reason" if mute else None


AT_REST: tuple[Callable[[Moment], str | None], ...] = (
    every_pause_is_on_record,
    every_pause_is_matched,
    no_dirty_engine_serves,
    who_serves_holds_the_published_version,
    who_is_routed_to_generates,
    running_means_enough_serving,
    paused_means_stopped,
    too_few_means_faulted,
    only_running_admits,
    nothing_is_left_in_between,
    the_ledger_adds_up,
    who_is_fenced_has_a_reason,
)


def admits(gate: SubmissionGate) -> bool:
    """Whether somebody who comes to the gate now is let through. Whoever is goes back at once."""
    coming = gate.acquire()
    try:
        coming.send(None)
    except StopIteration as admitted:
        admitted.value.reject()
        return True
    except LifecycleError:
        return False
    coming.close()
    gate.wake()  # which takes whoever has gone out of the queue
    return False
