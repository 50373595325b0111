"""The transition table: the one page to read first.

Every transition is a transaction. *Guards* are asked before anything is sent; the *requests* are performed in order;
*proofs* are asked before the state changes. What does not commit is compensated. The machine, the diagrams, the
documentation, the tests, and the trace verifier are all built from this table; nothing else says what is legal.
"""

import itertools
from collections.abc import Iterable
from enum import Enum
from functools import cache

from attrs import frozen

from . import events as e
from . import guards as g
from .states import State, Trigger

_OPEN = (State.RUNNING, State.SUSPENDED, State.PAUSED, State.UPDATING, State.FAULTED)


class OnFailure(Enum):
    """What becomes of a transition that does not commit."""

    STAY = "stays"
    """Nothing was changed that needs undoing."""
    COMPENSATE = "compensates, and stays"
    """The row's `compensation` is performed."""
    ABANDON = "before the commit point: ABANDON_UPDATE; after it: rolls forward"
    ROLL_FORWARD = "rolls forward: an engine that cannot follow is fenced"
    NEXT_ROW = "tries the next row of the same trigger"
    FAULT = "FAULT"
    WAIT = "the caller waits"
    NOTHING = "cannot fail"


@frozen(kw_only=True)
class Transition:
    """One row."""

    trigger: Trigger
    source: tuple[State, ...]
    target: State | None
    """`None`: the state does not change."""
    guards: tuple[g.Condition, ...] = ()
    requests: tuple[type[e.Request], ...] = ()
    proofs: tuple[g.Condition, ...] = ()
    on_failure: OnFailure = OnFailure.STAY
    compensation: tuple[type[e.Request], ...] = ()
    resume: bool | None = None
    """Where a trigger has two rows: the value of `Intent.resume` that chooses this one. `None`: either."""


_FINISH = (
    e.FinishUpdate,
    e.VerifyWeights,
    e.CommitVersion,
    e.FlushCache,
    e.LabelVersion,
    e.ContinueGeneration,
    e.ReleaseGeneration,
    e.Canary,
)
_RECOVER = (e.StopTransfer, e.AbandonUpdate, e.ProbeEngine, e.Settle)
_RECOVERABLE = (State.SUSPENDED, State.PAUSED, State.FAULTED)

TRANSITIONS: tuple[Transition, ...] = (
    Transition(
        trigger=Trigger.ATTACH,
        source=(State.CLOSED,),
        target=State.SUSPENDED,
        guards=(g.at_least_one_engine,),
        requests=(e.ProbeEngine, e.Settle),
        proofs=(g.enough_reachable, g.pauses_matched),
        on_failure=OnFailure.COMPENSATE,
        compensation=(e.ContinueGeneration,),
    ),
    Transition(
        trigger=Trigger.RESUME,
        source=(State.SUSPENDED,),
        target=State.RUNNING,
        guards=(g.pauses_matched, g.enough_serving),
        requests=(e.ResumeSubmission,),
        proofs=(g.submission_open,),
    ),
    Transition(
        trigger=Trigger.SUSPEND,
        source=(State.RUNNING,),
        target=State.SUSPENDED,
        requests=(e.SuspendSubmission,),
        proofs=(g.submission_closed,),
    ),
    Transition(
        trigger=Trigger.ADMIT,
        source=(State.RUNNING,),
        target=None,
        guards=(g.staleness_capacity,),
        on_failure=OnFailure.WAIT,
    ),
    Transition(
        trigger=Trigger.PAUSE_GENERATION,
        source=(State.SUSPENDED,),
        target=State.PAUSED,
        guards=(g.enough_reachable,),
        requests=(e.HoldGeneration, e.Drain, e.AbortGeneration, e.PauseGeneration),
        proofs=(g.enough_reachable, g.stopped),
        on_failure=OnFailure.COMPENSATE,
        compensation=(e.ContinueGeneration, e.ReleaseGeneration),
    ),
    Transition(
        trigger=Trigger.CONTINUE_GENERATION,
        source=(State.PAUSED,),
        target=State.SUSPENDED,
        guards=(g.enough_serving,),
        requests=(e.ContinueGeneration, e.ReleaseGeneration),
        proofs=(g.pauses_matched,),
        on_failure=OnFailure.ROLL_FORWARD,
    ),
    Transition(
        trigger=Trigger.BEGIN_UPDATE,
        source=(State.PAUSED,),
        target=State.UPDATING,
        guards=(g.version_advances, g.enough_reachable, g.memory_awake),
        requests=(e.ProvePaused, e.OpenTransfer, e.BeginUpdate),
        proofs=(g.session_open,),
        on_failure=OnFailure.COMPENSATE,
        compensation=(e.StopTransfer, e.AbandonUpdate),
    ),
    Transition(
        trigger=Trigger.TRANSFER,
        source=(State.UPDATING,),
        target=None,
        guards=(g.session_open,),
        requests=(e.TransferWeights,),
        proofs=(g.bucket_acknowledged,),
        on_failure=OnFailure.ABANDON,
    ),
    Transition(
        trigger=Trigger.FINISH_UPDATE,
        source=(State.UPDATING,),
        target=State.RUNNING,
        guards=(g.every_bucket_acknowledged,),
        requests=(*_FINISH, e.ResumeSubmission),
        proofs=(g.versions_agree, g.pauses_matched, g.enough_serving),
        on_failure=OnFailure.ABANDON,
        resume=True,
    ),
    Transition(
        trigger=Trigger.FINISH_UPDATE,
        source=(State.UPDATING,),
        target=State.SUSPENDED,
        guards=(g.every_bucket_acknowledged,),
        requests=_FINISH,
        proofs=(g.versions_agree, g.pauses_matched),
        on_failure=OnFailure.ABANDON,
        resume=False,
    ),
    Transition(
        trigger=Trigger.ABANDON_UPDATE,
        source=(State.UPDATING,),
        target=State.PAUSED,
        requests=(e.StopTransfer, e.AbandonUpdate),
        proofs=(g.sessions_closed,),
        on_failure=OnFailure.ROLL_FORWARD,
    ),
    Transition(
        trigger=Trigger.FAULT,
        source=_OPEN[:-1],
        target=State.FAULTED,
        guards=(g.too_few_left,),
        requests=(e.SuspendSubmission,),
        on_failure=OnFailure.NOTHING,
    ),
    Transition(
        trigger=Trigger.RECOVER,
        source=_RECOVERABLE,
        target=State.SUSPENDED,
        requests=(*_RECOVER, e.ReleaseGeneration),
        proofs=(g.pauses_matched, g.enough_serving),
        on_failure=OnFailure.NEXT_ROW,
    ),
    Transition(
        trigger=Trigger.RECOVER,
        source=_RECOVERABLE,
        target=State.PAUSED,
        requests=(*_RECOVER, e.HoldGeneration, e.PauseGeneration),
        proofs=(g.only_a_publication_cures, g.stopped),
        on_failure=OnFailure.FAULT,
    ),
    Transition(
        trigger=Trigger.CLOSE,
        source=_OPEN,
        target=State.CLOSED,
        requests=(e.StopTransfer, e.AbandonUpdate, e.ContinueGeneration, e.CloseTransfer),
        on_failure=OnFailure.ROLL_FORWARD,
    ),
)


@cache
def rows(trigger: Trigger, state: State, *, resume: bool = True) -> tuple[Transition, ...]:
    """Return the rows of `trigger` in `state`, in the order in which they are tried."""
    return _rows_of(TRANSITIONS, trigger, state, resume=resume)


def _rows_of(table: tuple[Transition, ...], trigger: Trigger, state: State, *, resume: bool) -> tuple[Transition, ...]:
    return tuple(
        row for row in table if row.trigger is trigger and state in row.source and row.resume in {None, resume}
    )


def validate(table: Iterable[Transition], *, initial: State = State.CLOSED) -> None:
    """Raise `ValueError` for a table that could not work. `transitions` itself finds a bad row only when it fires.

    Checked: every trigger has a row; every state can be entered from `initial` and leads back to it; every condition
    and request is what it should be; a row that compensates says how; where a trigger has several rows in one state,
    either the intent chooses among them or each but the last goes on to the next.
    """
    table = tuple(table)
    for row in table:
        _validate_row(row)
    if missing := set(Trigger) - {row.trigger for row in table}:
        raise ValueError(f"triggers without a row: {sorted(t.name for t in missing)}")
    edges = {(source, row.target) for row in table if row.target for source in row.source}
    reached = {initial}
    while step := {target for source, target in edges if source in reached} - reached:
        reached |= step
    if unreachable := set(State) - reached:
        raise ValueError(f"states that cannot be entered: {sorted(s.name for s in unreachable)}")
    returning = {initial}
    while step := {source for source, target in edges if target in returning} - returning:
        returning |= step
    if traps := set(State) - returning:
        raise ValueError(f"states that cannot be left for good: {sorted(s.name for s in traps)}")
    for trigger, state, resume in itertools.product(Trigger, State, (True, False)):
        _validate_choice(_rows_of(table, trigger, state, resume=resume))


def _validate_choice(candidates: tuple[Transition, ...]) -> None:
    """Rows among which nothing but their proofs decides: begun alike, and tried one after the other."""
    for row, following in itertools.zip_longest(candidates, candidates[1:]):
        if (row.on_failure is OnFailure.NEXT_ROW) is not (following is not None):
            raise ValueError(f"{row.trigger.name}: a row goes on to the next exactly where there is one")
        if following is not None and row.guards != following.guards:
            raise ValueError(f"{row.trigger.name}: rows tried one after the other must have the same guards")


def _validate_row(row: Transition) -> None:
    name = row.trigger.name
    if not row.source or len(set(row.source)) != len(row.source):
        raise ValueError(f"{name}: sources must be given, each once")
    if not all(condition.__doc__ for condition in (*row.guards, *row.proofs)):
        raise ValueError(f"{name}: guards and proofs must be documented functions")
    if not all(issubclass(request, e.Request) for request in (*row.requests, *row.compensation)):
        raise ValueError(f"{name}: requests must be Request classes")
    if bool(row.compensation) is not (row.on_failure is OnFailure.COMPENSATE):
        raise ValueError(f"{name}: a compensation belongs to rows that compensate, and to no others")


validate(TRANSITIONS)
