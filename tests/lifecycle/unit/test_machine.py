"""The machine, transition by transition: built from the table, so that a new row is tested when it is written."""

from typing import Any

import pytest

from lifecycle import TRANSITIONS, LifecycleMachine, State, Transition, Trigger
from lifecycle.cohort import Cohort, Intent
from lifecycle.errors import Busy, IllegalTransition, TransitionRefused
from lifecycle.guards import Condition
from lifecycle.machine import Attempt
from lifecycle.table import rows

from .conditions import REFUSE, ready_for
from .workbench import everything_about

ENDS = (Trigger.CLOSE, Trigger.FAULT)


def _named(row: Transition, *more: Any) -> str:
    return "-".join((row.trigger.name, row.target.name if row.target else "internal", *more))


EVERY_ROW = [
    pytest.param(row, source, id=_named(row, "from", source.name)) for row in TRANSITIONS for source in row.source
]
EVERY_GUARD = [
    pytest.param(row, source, guard, id=_named(row, "from", source.name, guard.__name__))
    for row in TRANSITIONS
    for source in row.source
    for guard in row.guards
]
EVERY_PROOF = [
    pytest.param(row, source, proof, id=_named(row, "from", source.name, proof.__name__))
    for row in TRANSITIONS
    for source in row.source
    for proof in row.proofs
]
EVERY_END = [
    pytest.param(row, source, end, id=_named(row, "from", source.name, end.trigger.name))
    for row in TRANSITIONS
    for source in row.source
    for end in TRANSITIONS
    if end.trigger in ENDS and source in end.source
]
ILLEGAL = [
    pytest.param(trigger, state, id=f"{trigger.name}-in-{state.name}")
    for trigger in Trigger
    for state in State
    if not rows(trigger, state)
]


def _machine_for(row: Transition, source: State) -> tuple[LifecycleMachine, Intent]:
    cohort, intent = ready_for(row)
    return LifecycleMachine(cohort, state=source), intent


def _begun(row: Transition, source: State) -> tuple[LifecycleMachine, Attempt]:
    machine, intent = _machine_for(row, source)
    return machine, machine.begin(row.trigger, intent)


@pytest.mark.parametrize(("row", "source"), EVERY_ROW)
def test_a_row_commits_where_its_guards_and_proofs_hold(row: Transition, source: State) -> None:
    """The attempt is in flight while it lasts, and its commit moves the machine to the row's target."""
    machine, intent = _machine_for(row, source)
    attempt = machine.begin(row.trigger, intent)
    assert (machine.state, machine.in_flight) == (source, row.trigger)
    target = row.target or source
    assert machine.commit(attempt, row) is target
    assert (machine.state, machine.in_flight) == (target, None)


@pytest.mark.parametrize(("row", "source"), EVERY_ROW)
def test_neither_begin_nor_commit_changes_the_cohort(row: Transition, source: State) -> None:
    """The machine decides and performs nothing: facts are the bookkeeper's."""
    machine, intent = _machine_for(row, source)
    before = everything_about(machine.cohort)
    machine.commit(machine.begin(row.trigger, intent), row)
    assert everything_about(machine.cohort) == before


@pytest.mark.parametrize(("row", "source", "guard"), EVERY_GUARD)
def test_each_guard_refuses_with_its_reason_and_changes_nothing(
    row: Transition, source: State, guard: Condition
) -> None:
    """A guard that does not hold is named, says why, and leaves state and cohort as they were."""
    machine, intent = _machine_for(row, source)
    reason = _broken(machine.cohort, guard)
    before = everything_about(machine.cohort)
    with pytest.raises(TransitionRefused) as refused:
        machine.begin(row.trigger, intent)
    error = refused.value
    assert (error.trigger, error.state, error.condition, error.reason) == (
        row.trigger, source, guard.__name__, reason,
    )  # fmt: skip
    assert str(error) == f"{row.trigger.name} refused in {source.name}: {reason} ({guard.__name__})"
    assert (machine.state, machine.in_flight) == (source, None)
    assert everything_about(machine.cohort) == before
    assert machine.why_not(row.trigger, intent) == reason


@pytest.mark.parametrize(("row", "source", "proof"), EVERY_PROOF)
def test_each_proof_refuses_with_its_reason_and_the_state_stays(
    row: Transition, source: State, proof: Condition
) -> None:
    """A proof that does not hold keeps the machine where it is, with the attempt still to be rolled back."""
    machine, attempt = _begun(row, source)
    reason = _broken(machine.cohort, proof)
    with pytest.raises(TransitionRefused) as refused:
        machine.commit(attempt, row)
    assert (refused.value.condition, refused.value.reason) == (proof.__name__, reason)
    assert (machine.state, machine.in_flight) == (source, row.trigger)
    machine.roll_back(attempt)
    assert (machine.state, machine.in_flight) == (source, None)


def _broken(cohort: Cohort, condition: Condition) -> str:
    change, reason = REFUSE[condition.__name__]
    change(cohort)
    return reason


@pytest.mark.parametrize(("trigger", "state"), ILLEGAL)
def test_an_illegal_trigger_is_refused_and_told_what_is_possible(trigger: Trigger, state: State) -> None:
    """A trigger that the table does not have in a state raises `IllegalTransition`, which names those it has."""
    machine = LifecycleMachine(state=state)
    asked_for = [trigger for trigger in Trigger if trigger is not Trigger.FAULT]
    possible = tuple(t for t in asked_for if any(row.trigger is t and state in row.source for row in TRANSITIONS))
    with pytest.raises(IllegalTransition) as illegal:
        machine.begin(trigger)
    assert (illegal.value.trigger, illegal.value.state, illegal.value.allowed) == (trigger, state, possible)
    names = ", ".join(t.name for t in possible)
    assert str(illegal.value) == f"{trigger.name} is not possible in {state.name}; possible here: {names}"
    assert machine.why_not(trigger) == str(illegal.value)
    assert (machine.state, machine.in_flight) == (state, None)


@pytest.mark.parametrize("trigger", [trigger for trigger in Trigger if trigger not in ENDS])
@pytest.mark.parametrize(("row", "source"), EVERY_ROW)
def test_nothing_else_begins_while_an_attempt_is_in_flight(row: Transition, source: State, trigger: Trigger) -> None:
    """A second attempt is `Busy`, naming what is in flight, whether or not the table would have it."""
    machine, attempt = _begun(row, source)
    with pytest.raises(Busy) as busy:
        machine.begin(trigger, attempt.intent)
    assert busy.value.in_flight is row.trigger
    assert machine.commit(attempt, row) is (row.target or source)


@pytest.mark.parametrize(("row", "source", "end"), EVERY_END)
def test_close_and_fault_replace_an_attempt_in_flight(row: Transition, source: State, end: Transition) -> None:
    """The attempt that is replaced can neither commit nor take its successor down with its roll-back."""
    machine, attempt = _begun(row, source)
    machine.cohort, intent = ready_for(end)
    replacement = machine.begin(end.trigger, intent)
    with pytest.raises(Busy):
        machine.commit(attempt, row)
    machine.roll_back(attempt)
    assert (machine.state, machine.in_flight) == (source, end.trigger)
    assert machine.commit(replacement) is end.target


@pytest.mark.parametrize(("row", "source"), EVERY_ROW)
def test_a_rolled_back_attempt_is_over_and_may_be_made_again(row: Transition, source: State) -> None:
    """Rolling back frees the machine in its old state; the old attempt cannot be committed any more."""
    machine, attempt = _begun(row, source)
    machine.roll_back(attempt)
    machine.roll_back(attempt)
    with pytest.raises(Busy):
        machine.commit(attempt, row)
    again = machine.begin(row.trigger, attempt.intent)
    assert machine.commit(again, row) is (row.target or source)


def test_a_committed_attempt_cannot_be_committed_again() -> None:
    """One attempt moves the machine once."""
    row = rows(Trigger.SUSPEND, State.RUNNING)[0]
    machine, attempt = _begun(row, State.RUNNING)
    machine.commit(attempt)
    with pytest.raises(Busy):
        machine.commit(attempt)
    assert machine.state is State.SUSPENDED


def test_proving_does_not_move() -> None:
    """`prove` asks a row's proofs and leaves everything as it is."""
    first, second = rows(Trigger.RECOVER, State.FAULTED)
    machine, attempt = _begun(first, State.FAULTED)
    machine.prove(attempt, first)
    with pytest.raises(TransitionRefused, match="only_a_publication_cures"):
        machine.prove(attempt, second)
    assert (machine.state, machine.in_flight) == (State.FAULTED, Trigger.RECOVER)


def test_a_machine_begins_closed_and_without_engines() -> None:
    """A machine made of nothing is in CLOSED, and ATTACH tells why it cannot begin."""
    machine = LifecycleMachine()
    assert (machine.state, machine.in_flight, machine.allowed) == (State.CLOSED, None, (Trigger.ATTACH,))
    assert machine.why_not(Trigger.ATTACH) == "the fleet has no engine"


def test_machines_share_no_state() -> None:
    """The graph behind the machines is one; where each of them stands is its own."""
    row = rows(Trigger.SUSPEND, State.RUNNING)[0]
    machine, attempt = _begun(row, State.RUNNING)
    other, _ = _machine_for(row, State.RUNNING)
    machine.commit(attempt)
    assert (machine.state, other.state, other.in_flight) == (State.SUSPENDED, State.RUNNING, None)
