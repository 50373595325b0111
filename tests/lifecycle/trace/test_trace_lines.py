"""Lines that are missing, moved or too many are accused: of the right thing, where they are."""

from functools import cache

import pytest
from attrs import evolve

from lifecycle import Outcome, Standing, State, Trigger, errors, events
from lifecycle.events import Event
from lifecycle.testing import Refuse
from lifecycle.trace import verify

from .forging import accusations, index_of, index_of_after, inserted, moved, renumbered, show, verdict_of, without
from .recordings import SCENARIOS, Stage, record, recording

UNDETECTABLE = {
    "RolloutConsumed": "the rollout may as well be in the buffer where the trace ends",
    "RolloutDiscarded": "as above; where capacity is tight, an admission gives it away",
    "RolloutSettled": "the rollout may as well be running; where it is consumed, or capacity is tight, it shows",
    "SegmentReceived": "the request may as well be in flight: nothing waits for its end",
}
"""What a trace need not show. Nothing of it is a debt, a transition, a standing, a version, or a ticket twice."""


# -------------------------------------------------------------------------------------------------------- lines missing


def _needed(name: str) -> list[tuple[int, Event]]:
    """Return the events of a recording that something follows from, with their indices."""
    trace = recording(name)
    ends = {index - 1 for index, event in enumerate(trace) if isinstance(event, events.LifecycleOpened)}
    # The last line before the end, or before a kill, is one that a killed trainer would not have written.
    ends.add(len(trace) - 1)
    return [(index, event) for index, event in enumerate(trace) if index not in ends]


@cache
def _unseen(name: str) -> dict[str, str]:
    """Return the lines of a recording that can be taken out unseen, and their kinds."""
    trace = recording(name)
    needed = _needed(name)
    return {str(i + 1): type(event).__name__ for i, event in needed if verdict_of(without(trace, i)).sound}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_line_can_be_taken_out_unseen(name: str) -> None:
    """Whatever line is missing, a violation tells, even where numbers and times were mended to hide the gap."""
    unseen = {line: kind for line, kind in _unseen(name).items() if kind not in UNDETECTABLE}
    assert unseen == {}, show(recording(name))


def test_the_list_of_what_cannot_be_seen_is_honest() -> None:
    """Each kind that is listed as undetectable is so in some trace: the list excuses nothing that could be found."""
    assert {kind for name in SCENARIOS for kind in _unseen(name).values()} == set(UNDETECTABLE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_gap_in_the_numbers_is_seen_where_it_is(name: str) -> None:
    """A line that is missing is told by the number of the line after it."""
    trace = recording(name)
    for index in range(1, len(trace) - 1):
        assert (index + 1, "gapless-seq") in accusations([*trace[:index], *trace[index + 1 :]])


def test_the_first_line_cannot_be_missing() -> None:
    """Without its head a history has no bounds to keep, and says so in its first lines."""
    trace = recording("several publications")
    assert accusations(list(trace[1:]))[0] == (1, "gapless-seq")
    assert accusations(without(trace, 0))[0] == (1, "legal-transition")


@pytest.mark.parametrize("name", SCENARIOS)
def test_lines_swapped_are_seen_where_they_are(name: str) -> None:
    """Two lines that changed places are told by their numbers, and by their times where the numbers were mended."""
    trace = recording(name)
    for index in range(1, len(trace) - 1):
        swapped = [*trace[:index], trace[index + 1], trace[index], *trace[index + 2 :]]
        assert (index + 1, "gapless-seq") in accusations(swapped)
        if events.LifecycleOpened in {type(trace[index]), type(trace[index + 1])}:
            continue  # another process, with a clock of its own
        mended = [evolve(event, seq=number) for number, event in enumerate(swapped, 1)]
        assert (index + 2, "time-order") in accusations(mended)


# --------------------------------------------------------------------------------------------- lines swapped and forged


def test_an_answer_does_not_come_before_its_request() -> None:
    """A fact whose request comes later answers nothing."""
    trace = recording("several publications")
    request = index_of(trace, events.PauseGeneration, engine="E2")
    answer = index_of(trace, events.EnginePaused, engine="E2")
    forged = moved(trace, answer, request - answer)
    assert (request + 1, "one-fact-a-request") in accusations(forged)


def test_generation_is_held_before_it_is_stopped() -> None:
    """HoldGeneration comes first in its row: after it nothing new reaches an engine that is being stopped."""
    trace = recording("several publications")
    hold = index_of(trace, events.GenerationHeld)
    assert (hold + 2, "legal-order") in accusations(moved(trace, hold, 1))


def test_generation_is_released_after_the_continue() -> None:
    """ReleaseGeneration follows ContinueGeneration: a request to a paused engine would hang."""
    trace = recording("several publications")
    release = index_of(trace, events.GenerationReleased)
    asked = index_of(trace, events.ContinueGeneration)
    forged = moved(trace, release, asked - release)
    assert (asked + 2, "legal-order") in accusations(forged)


def test_the_version_advances_after_the_proof() -> None:
    """A version is published when enough engines have passed verification, and not before."""
    trace = recording("several publications")
    advanced = index_of(trace, events.VersionAdvanced)
    proven = index_of(trace, events.WeightsVerified)
    forged = moved(trace, advanced, proven - advanced)
    assert (proven + 1, "verified-before-commit") in accusations(forged)


def test_an_engine_serves_after_its_canary() -> None:
    """An engine that does not generate is not put into service, whatever it acknowledged."""
    trace = recording("several publications")
    answered = index_of(trace, events.CanaryAnswered, engine="E1")
    serves = index_of(trace, events.StandingChanged, engine="E1", after=Standing.SERVING, version=1)
    forged = list(trace)
    forged[answered] = evolve(trace[answered], outcome=Outcome.UNKNOWN)  # type: ignore[call-arg]
    assert (serves + 1, "fit-to-serve") in accusations(forged)


def test_a_rollout_starts_in_running() -> None:
    """A rollout admitted before RUNNING is committed passed a closed gate."""
    trace = recording("several publications")
    admitted = index_of(trace, events.RolloutAdmitted)
    running = index_of(trace, events.TransitionCommitted, target=State.RUNNING)
    forged = moved(trace, admitted, running - admitted)
    assert (running + 1, "admission") in accusations(forged)


# ------------------------------------------------------------------------------------------------------ lines inserted


def test_a_second_pause_in_one_transition_is_seen() -> None:
    """An engine that acknowledged its pause is not paused again in the same transition."""
    trace = recording("several publications")
    end = index_of(trace, events.TransitionCommitted, target=State.PAUSED)
    again = [events.PauseGeneration(engine="E1"), events.EnginePaused(engine="E1", outcome=Outcome.DONE, idle=True)]
    assert (end + 1, "pause-once") in accusations(inserted(trace, end, again))


def test_a_dirty_engine_that_is_continued_is_seen() -> None:
    """Continuing an engine that may be partly written serves half-written weights: the worst of all."""
    trace = recording("closed while dirty")
    end = len(trace) - 1
    wake = [events.ContinueGeneration(engine="E1"), events.EngineContinued(engine="E1", outcome=Outcome.DONE)]
    assert (end + 1, "dirty-never-continued") in accusations(inserted(trace, end, wake))


def test_a_debt_that_nothing_settles_is_seen() -> None:
    """Saying that a debt is settled does not settle it."""
    trace = recording("closed while dirty")
    end = len(trace) - 1
    assert (end + 1, "pauses-matched") in accusations(inserted(trace, end, [events.DebtSettled(engine="E1")]))


def test_a_pause_that_is_never_matched_is_seen() -> None:
    """Where every word of a continue is missing, RUNNING gives it away."""
    trace = recording("several publications")
    committed = index_of(trace, events.TransitionCommitted, trigger=Trigger.FINISH_UPDATE)
    kinds = (events.ContinueGeneration, events.EngineContinued, events.DebtSettled)
    kept = [e for i, e in enumerate(trace) if i > committed or not (isinstance(e, kinds) and e.engine == "E1")]
    assert (committed + 1 - 3, "pauses-matched") in accusations(renumbered(kept))


def test_an_engine_left_paused_at_the_end_is_seen() -> None:
    """CLOSE asks every engine that is whole and owes a continue, or is accused of leaving it paused."""
    trace = recording("step by step")
    paused = index_of(trace, events.TransitionCommitted, 1, target=State.PAUSED)
    ends = [
        events.TransitionBegun(trigger=Trigger.CLOSE, source=State.PAUSED),
        events.TransitionCommitted(trigger=Trigger.CLOSE, source=State.PAUSED, target=State.CLOSED),
    ]
    forged = inserted(trace[: paused + 1], paused + 1, ends)
    assert accusations(forged) == [(paused + 3, "pauses-matched")] * 2


@pytest.mark.parametrize(
    ("state", "evaluation", "accused"),
    [
        (State.SUSPENDED, False, True),
        (State.SUSPENDED, True, False),
        (State.PAUSED, False, True),
        (State.PAUSED, True, True),
        (State.UPDATING, True, True),
    ],
)
def test_an_admission_where_none_may_be_is_seen(state: State, evaluation: bool, accused: bool) -> None:
    """Rollouts start in RUNNING, evaluations in SUSPENDED too, and nothing starts elsewhere."""
    trace = recording("failed transfer")
    there = index_of(trace, events.TransitionCommitted, -1, target=state) + 1
    admission = events.RolloutAdmitted(ticket=-5 if evaluation else 99, evaluation=evaluation)
    seen = (there + 1, "admission") in accusations(inserted(trace, there, [admission]))
    assert seen is accused


def test_a_generation_while_generation_is_held_is_seen() -> None:
    """Between hold and release no generation request leaves, and none reaches an engine that owes a continue."""
    trace = recording("several publications")
    held = index_of(trace, events.GenerationHeld) + 1
    paused = index_of(trace, events.EnginePaused, engine="E1") + 1
    sent = events.GenerationSent(ticket=1, engine="E1")
    assert accusations(inserted(trace, held, [sent])) == [(held + 1, "held")]
    assert accusations(inserted(trace, paused, [sent])) == [(paused + 1, "held"), (paused + 1, "routing")]


def test_a_gate_that_moves_without_moving_is_seen() -> None:
    """Opening what is open, or holding what is held, shows that something in between is missing."""
    trace = recording("several publications")
    closed = index_of(trace, events.SubmissionSuspended)
    held = index_of(trace, events.GenerationHeld)
    assert (closed + 2, "submission") in accusations(inserted(trace, closed + 1, [events.SubmissionSuspended()]))
    assert (held + 2, "held") in accusations(inserted(trace, held + 1, [events.GenerationHeld()]))


def test_a_trigger_that_does_not_exist_there_is_seen() -> None:
    """What the table has no row for does not even begin."""
    trace = recording("several publications")
    between = index_of(trace, events.TransitionCommitted, trigger=Trigger.RESUME) + 1
    begun = events.TransitionBegun(trigger=Trigger.RESUME, source=State.RUNNING)
    assert (between + 1, "legal-transition") in accusations(inserted(trace, between, [begun]))


def test_weights_that_are_at_risk_unsaid_are_seen() -> None:
    """From the first transfer on an engine may be partly written, and that must be on record."""
    trace = recording("several publications")
    forged = without(trace, index_of(trace, events.EngineDirtied, engine="E1"))
    told = index_of(tuple(forged), events.WeightsTransferred, engine="E1")
    assert (told + 1, "dirty") in accusations(forged)
    between = index_of(trace, events.TransitionCommitted, trigger=Trigger.RESUME) + 1
    assert accusations(inserted(trace, between, [events.EngineCleaned(engine="E1")])) == [(between + 1, "dirty")]


def test_weights_for_a_bystander_are_seen() -> None:
    """Weights go to the engines of the update, which are those that it was begun in."""
    trace = recording("several publications")
    begun = index_of(trace, events.BeginUpdate, engine="E2")
    answered = index_of(trace, events.UpdateBegun, engine="E2")
    forged = renumbered([event for i, event in enumerate(trace) if i not in {begun, answered}])
    for kind in (events.TransferWeights, events.FinishUpdate):
        asked = index_of(tuple(forged), kind, engine="E2")
        assert (asked + 1, "session-open") in accusations(forged)


def test_a_failed_pause_that_is_not_made_good_is_seen() -> None:
    """After a pause that failed, whoever paused is continued before anything else begins."""

    async def twice(stage: Stage) -> None:
        await stage.lifecycle.suspend()
        stage.engines[0].on(events.PauseGeneration, Refuse())
        with pytest.raises(errors.PauseFailed):
            await stage.lifecycle.pause_generation()
        await stage.lifecycle.pause_generation()

    trace = record(twice)
    continued = index_of(tuple(trace), events.ContinueGeneration, engine="E2")
    begun = index_of_after(trace, continued, events.TransitionBegun, {})
    kinds = (events.ContinueGeneration, events.EngineContinued, events.DebtSettled)
    forged = [e for i, e in enumerate(trace) if i > begun or not (isinstance(e, kinds) and e.engine == "E2")]
    assert accusations(renumbered(forged))[0] == (begun + 1 - 3, "pauses-matched")


def test_more_rollouts_than_the_budget_holds_are_seen() -> None:
    """An admission at capacity 0 overdraws the staleness budget."""
    trace = recording("several publications")
    full = index_of(trace, events.RolloutAdmitted, ticket=6) + 1
    admission = events.RolloutAdmitted(ticket=7)
    assert (full + 1, "staleness-capacity") in accusations(inserted(trace, full, [admission]))


def test_a_rollout_that_is_too_old_is_seen() -> None:
    """Training on a rollout older than the bound breaks the promise of the budget, whoever did it."""
    trace = recording("several publications")
    old = index_of(trace, events.RolloutDiscarded)
    discarded = trace[old]
    assert isinstance(discarded, events.RolloutDiscarded)
    assert discarded.staleness == 2
    consumed = events.RolloutConsumed(ticket=discarded.ticket, staleness=2)
    assert (old + 1, "staleness") in accusations(inserted(trace, old, [consumed]))


def test_a_ticket_settled_twice_is_seen() -> None:
    """A ticket comes back once: returning its capacity twice makes counters drift."""
    trace = recording("several publications")
    settled = index_of(trace, events.RolloutSettled)
    assert (settled + 2, "ticket-once") in accusations(inserted(trace, settled + 1, [trace[settled]]))


def test_an_operation_within_another_is_seen() -> None:
    """One operation at a time holds the lifecycle."""
    trace = recording("several publications")
    within = index_of(trace, events.GenerationHeld)
    begun = events.TransitionBegun(trigger=Trigger.RECOVER, source=State.SUSPENDED)
    assert (within + 1, "one-at-a-time") in accusations(inserted(trace, within, [begun]))


def test_a_request_outside_of_every_transition_is_seen() -> None:
    """Engines are touched within transitions only; but the user may abort generation between them."""
    trace = recording("several publications")
    between = index_of(trace, events.TransitionCommitted, trigger=Trigger.RESUME) + 1
    flush = [events.FlushCache(engine="E1"), events.CacheFlushed(engine="E1", outcome=Outcome.DONE)]
    abort = [events.AbortGeneration(engine="E1"), events.GenerationAborted(engine="E1", outcome=Outcome.DONE)]
    assert accusations(inserted(trace, between, flush)) == [(between + 1, "legal-order")]
    assert accusations(inserted(trace, between, abort)) == []


def test_a_fault_without_need_is_seen() -> None:
    """FAULT follows from too few engines being left, and from nothing else."""
    trace = recording("several publications")
    between = index_of(trace, events.TransitionCommitted, trigger=Trigger.RESUME) + 1
    begun = events.TransitionBegun(trigger=Trigger.FAULT, source=State.RUNNING)
    assert (between + 1, "too-few-left") in accusations(inserted(trace, between, [begun]))


def test_a_request_to_a_lost_engine_is_seen() -> None:
    """Whoever is lost takes part in nothing until a probe answers."""
    trace = recording("crashed engine")
    lost = index_of(trace, events.StandingChanged, after=Standing.LOST)
    leave = index_of_after(list(trace), lost, events.CloseTransfer, {})
    pair = [events.CloseTransfer(engine="E1"), events.TransferClosed(engine="E1", outcome=Outcome.DONE)]
    assert (leave + 1, "lost-takes-no-part") in accusations(inserted(trace, leave, pair))


def test_an_empty_trace_is_sound_and_says_nothing() -> None:
    """No event, no accusation: whoever reads a file decides what to make of that."""
    verdict = verify([])
    assert (verdict.sound, verdict.events, verdict.closed) == (True, 0, False)
