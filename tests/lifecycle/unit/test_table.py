"""The transition table: what it says, and what it refuses to be."""

from typing import Any

import pytest
from attrs import evolve

from lifecycle import TRANSITIONS, State, Transition, Trigger
from lifecycle import events as e
from lifecycle import guards as g
from lifecycle.table import OnFailure, rows, validate

R, S, P, U, F, C = (
    State.RUNNING,
    State.SUSPENDED,
    State.PAUSED,
    State.UPDATING,
    State.FAULTED,
    State.CLOSED,
)

FINISH = "FinishUpdate VerifyWeights CommitVersion FlushCache LabelVersion ContinueGeneration ReleaseGeneration Canary"
SETTLE = "StopTransfer AbandonUpdate ProbeEngine Settle"

# trigger, from, to, guards, requests in order, proofs, when it fails, compensation: a second writing, not a copy.
EXPECTED = [
    ("ATTACH", "C", "S", "at_least_one_engine", "ProbeEngine Settle", "enough_reachable pauses_matched",
     "COMPENSATE", "ContinueGeneration"),
    ("RESUME", "S", "R", "pauses_matched enough_serving", "ResumeSubmission", "submission_open", "STAY", ""),
    ("SUSPEND", "R", "S", "", "SuspendSubmission", "submission_closed", "STAY", ""),
    ("ADMIT", "R", "", "staleness_capacity", "", "", "WAIT", ""),
    ("PAUSE_GENERATION", "S", "P", "enough_reachable", "HoldGeneration Drain AbortGeneration PauseGeneration",
     "enough_reachable stopped", "COMPENSATE", "ContinueGeneration ReleaseGeneration"),
    ("CONTINUE_GENERATION", "P", "S", "enough_serving", "ContinueGeneration ReleaseGeneration", "pauses_matched",
     "ROLL_FORWARD", ""),
    ("BEGIN_UPDATE", "P", "U", "version_advances enough_reachable memory_awake", "ProvePaused OpenTransfer BeginUpdate",
     "session_open", "COMPENSATE", "StopTransfer AbandonUpdate"),
    ("TRANSFER", "U", "", "session_open", "TransferWeights", "bucket_acknowledged", "ABANDON", ""),
    ("FINISH_UPDATE", "U", "R", "every_bucket_acknowledged", f"{FINISH} ResumeSubmission",
     "versions_agree pauses_matched enough_serving", "ABANDON", ""),
    ("FINISH_UPDATE", "U", "S", "every_bucket_acknowledged", FINISH, "versions_agree pauses_matched", "ABANDON", ""),
    ("ABANDON_UPDATE", "U", "P", "", "StopTransfer AbandonUpdate", "sessions_closed", "ROLL_FORWARD", ""),
    ("FAULT", "RSPU", "F", "too_few_left", "SuspendSubmission", "", "NOTHING", ""),
    ("RECOVER", "SPF", "S", "", f"{SETTLE} ReleaseGeneration", "pauses_matched enough_serving", "NEXT_ROW", ""),
    ("RECOVER", "SPF", "P", "", f"{SETTLE} HoldGeneration PauseGeneration", "only_a_publication_cures stopped",
     "FAULT", ""),
    ("CLOSE", "RSPUF", "C", "", "StopTransfer AbandonUpdate ContinueGeneration CloseTransfer", "", "ROLL_FORWARD", ""),
]  # fmt: skip


def _written(row: Transition) -> tuple[str, ...]:
    return (
        row.trigger.name,
        "".join(state.name[0] for state in row.source),
        row.target.name[0] if row.target else "",
        " ".join(condition.__name__ for condition in row.guards),
        " ".join(request.__name__ for request in row.requests),
        " ".join(condition.__name__ for condition in row.proofs),
        row.on_failure.name,
        " ".join(request.__name__ for request in row.compensation),
    )


def test_the_table_is_the_one_of_the_design() -> None:
    """Every row says what the design says, and there is no other row."""
    assert [_written(row) for row in TRANSITIONS] == EXPECTED


def test_the_intent_chooses_between_the_two_rows_of_finish_update() -> None:
    """FINISH_UPDATE leads to RUNNING, or to SUSPENDED where submission is to stay closed."""
    assert [[row.target for row in rows(Trigger.FINISH_UPDATE, U, resume=resume)] for resume in (True, False)] == [
        [R],
        [S],
    ]


@pytest.mark.parametrize("state", [S, P, F])
def test_recover_tries_suspended_before_paused(state: State) -> None:
    """What engines answer decides where RECOVER leads, and a whole fleet comes first."""
    assert [row.target for row in rows(Trigger.RECOVER, state)] == [S, P]


@pytest.mark.parametrize("trigger", Trigger)
@pytest.mark.parametrize("state", State)
def test_rows_are_those_of_the_trigger_that_start_in_the_state(trigger: Trigger, state: State) -> None:
    """`rows` returns exactly the rows of one trigger in one state, in the order of the table."""
    own = [row for row in TRANSITIONS if row.trigger is trigger and state in row.source]
    assert list(rows(trigger, state)) == [row for row in own if row.resume is not False]


def test_every_publication_passes_through_paused() -> None:
    """No row enters UPDATING but from PAUSED, so that nothing writes weights under a generating engine."""
    assert [row.source for row in TRANSITIONS if row.target is U] == [(P,)]


def test_running_is_reached_from_every_state_without_closing() -> None:
    """A lifecycle that is not closed can always get back to RUNNING, by the table."""
    leading = {R}
    edges = {(s, row.target) for row in TRANSITIONS if row.trigger is not Trigger.CLOSE for s in row.source}
    while more := {source for source, target in edges if target in leading} - leading:
        leading |= more
    assert leading == set(State)


def test_the_table_in_use_is_valid() -> None:
    """The table that the package was imported with passes its own checks."""
    validate(TRANSITIONS)


def _without(trigger: Trigger) -> list[Transition]:
    return [row for row in TRANSITIONS if row.trigger is not trigger]


def _changed(trigger: Trigger, **changes: Any) -> list[Transition]:
    return [evolve(row, **changes) if row.trigger is trigger else row for row in TRANSITIONS]


def _undocumented(_: object, __: object) -> str | None:
    return None


def _not_a_request() -> list[Transition]:
    return _changed(Trigger.SUSPEND, requests=(e.SubmissionSuspended,))


def _state_without_entry() -> list[Transition]:
    return [evolve(row, target=S) if row.target is P else row for row in TRANSITIONS]


def _pair_of_traps() -> list[Transition]:
    # UPDATING and PAUSED lead to each other, and to nothing else.
    kept = [row for row in TRANSITIONS if row.trigger not in {Trigger.FINISH_UPDATE, Trigger.CONTINUE_GENERATION}]
    kept += [
        Transition(trigger=Trigger.FINISH_UPDATE, source=(U,), target=P, on_failure=OnFailure.ABANDON),
        Transition(trigger=Trigger.CONTINUE_GENERATION, source=(P,), target=None),
    ]
    leaving = {Trigger.FAULT, Trigger.RECOVER, Trigger.CLOSE}
    return [
        evolve(row, source=tuple(s for s in row.source if s not in {U, P})) if row.trigger in leaving else row
        for row in kept
    ]


BAD_TABLES = {
    **{
        f"no row for {trigger.name}": (_without(trigger), rf"triggers without a row: \['{trigger.name}'\]")
        for trigger in Trigger
    },
    "PAUSED is never entered": (_state_without_entry(), r"cannot be entered: \['PAUSED', 'UPDATING'\]"),
    "FAULTED is never left": (
        [evolve(row, source=tuple(s for s in row.source if s is not F)) for row in TRANSITIONS],
        r"cannot be left for good: \['FAULTED'\]",
    ),
    "two states lead only to each other": (_pair_of_traps(), r"cannot be left for good: \['PAUSED', 'UPDATING'\]"),
    "an undocumented guard": (_changed(Trigger.RESUME, guards=(_undocumented,)), "documented functions"),
    "an undocumented proof": (_changed(Trigger.SUSPEND, proofs=(_undocumented,)), "documented functions"),
    "a fact in place of a request": (_not_a_request(), "SUSPEND: requests must be Request classes"),
    "a fact in place of a compensation": (
        _changed(Trigger.ATTACH, compensation=(e.EngineContinued,)),
        "ATTACH: requests must be Request classes",
    ),
    "a compensation where nothing is compensated": (
        _changed(Trigger.RESUME, compensation=(e.SuspendSubmission,)),
        "RESUME: a compensation belongs",
    ),
    "a row that compensates and does not say how": (
        _changed(Trigger.PAUSE_GENERATION, compensation=()),
        "PAUSE_GENERATION: a compensation belongs",
    ),
    "a row without a source": (_changed(Trigger.RESUME, source=()), "RESUME: sources must be given, each once"),
    "a source given twice": (_changed(Trigger.RESUME, source=(S, S)), "RESUME: sources must be given, each once"),
    "two rows among which nothing chooses": (
        [*TRANSITIONS, evolve(rows(Trigger.RESUME, S)[0], target=P)],
        "RESUME: a row goes on to the next exactly where there is one",
    ),
    "a next row that is not there": (
        _changed(Trigger.SUSPEND, on_failure=OnFailure.NEXT_ROW),
        "SUSPEND: a row goes on to the next exactly where there is one",
    ),
    "alternative rows that do not begin alike": (
        [evolve(row, guards=(g.enough_reachable,)) if row.target is P else row for row in TRANSITIONS],
        "RECOVER: rows tried one after the other must have the same guards",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_table_that_could_not_work_is_refused(case: str) -> None:
    """A bad table is refused when it is made, with a sentence that says what is wrong."""
    table, complaint = BAD_TABLES[case]
    with pytest.raises(ValueError, match=complaint):
        validate(table)
