"""`can` and `why_not` over cohorts about which anything may be known: they look, and that is all."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from lifecycle import TRANSITIONS, LifecycleMachine, State, Trigger
from lifecycle.cohort import Cohort, Intent
from lifecycle.errors import IllegalTransition, TransitionRefused
from tests.strategies import QUICK, cohorts, intents

from .workbench import everything_about


@QUICK
@given(cohorts(), intents, st.sampled_from(State))
def test_asking_changes_nothing_and_never_raises(cohort: Cohort, intent: Intent, state: State) -> None:
    """Every trigger may be asked about in every state, whatever is known, without a trace."""
    machine = LifecycleMachine(cohort, state=state)
    before = copy.deepcopy(everything_about(cohort))
    answers = [machine.why_not(trigger, intent) for trigger in Trigger]
    assert all(answer is None or answer for answer in answers)
    assert [machine.can(trigger, intent) for trigger in Trigger] == [answer is None for answer in answers]
    assert (everything_about(cohort), machine.state, machine.in_flight) == (before, state, None)


@QUICK
@given(cohorts(), intents, st.sampled_from(State), st.sampled_from(Trigger))
def test_what_can_begin_begins_and_what_cannot_says_the_same_reason(
    cohort: Cohort, intent: Intent, state: State, trigger: Trigger
) -> None:
    """`why_not` tells beforehand exactly what `begin` does."""
    machine = LifecycleMachine(cohort, state=state)
    answer = machine.why_not(trigger, intent)
    assert _what_begin_says(machine, trigger, intent) == answer


def _what_begin_says(machine: LifecycleMachine, trigger: Trigger, intent: Intent) -> str | None:
    try:
        machine.begin(trigger, intent)
    except TransitionRefused as refused:
        return refused.reason
    except IllegalTransition as illegal:
        return str(illegal)
    return None


@QUICK
@given(cohorts(), intents)
def test_conditions_are_pure_and_speak_in_short_sentences(cohort: Cohort, intent: Intent) -> None:
    """A condition gives the same answer twice, changes nothing, and refuses in under 500 characters."""
    before = copy.deepcopy(everything_about(cohort))
    for condition in {c for row in TRANSITIONS for c in (*row.guards, *row.proofs)}:
        reason = condition(cohort, intent)
        assert condition(cohort, intent) == reason
        assert reason is None or 0 < len(reason) < 500
    assert everything_about(cohort) == before


def test_asking_while_an_attempt_is_in_flight_leaves_it_alone() -> None:
    """Looking is possible at any time."""
    machine = LifecycleMachine(state=State.RUNNING)
    attempt = machine.begin(Trigger.SUSPEND)
    for trigger in Trigger:
        machine.why_not(trigger)
    assert machine.in_flight is Trigger.SUSPEND
    assert machine.commit(attempt) is State.SUSPENDED
