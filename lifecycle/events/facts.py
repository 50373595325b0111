"""Facts: what happened."""

from attrs import frozen

from lifecycle.states import MeasuredFrom, OnStale, Outcome, PauseMode, Standing, State, Trigger

from .base import Event


@frozen(kw_only=True)
class Fact(Event):
    """Something that happened."""


@frozen(kw_only=True)
class EngineFact(Fact):
    """The outcome of one request at one engine."""

    engine: str
    outcome: Outcome
    detail: str = ""
    request: int = 0
    """`seq` of the request it answers."""
    seconds: float = 0.0
    """Between the request and this fact."""


@frozen(kw_only=True)
class EngineProbed(EngineFact):
    """An engine told, or did not tell, what it is and how it stands."""

    paused: bool | None = None
    whole: bool | None = None
    label: str | None = None
    incarnation: str | None = None


@frozen(kw_only=True)
class GenerationAborted(EngineFact):
    """An engine was told to end every request in flight."""


@frozen(kw_only=True)
class EnginePaused(EngineFact):
    """A pause was asked for. An unknown outcome is a debt like a pause that is done."""

    mode: PauseMode = PauseMode.ABORT
    stopped: bool | None = None
    idle: bool | None = None


@frozen(kw_only=True)
class EngineContinued(EngineFact):
    """A continue was asked for."""


@frozen(kw_only=True)
class PauseProven(EngineFact):
    """An engine was asked whether it is paused, whatever is remembered."""

    stopped: bool | None = None
    idle: bool | None = None


@frozen(kw_only=True)
class TransferOpened(EngineFact):
    """An engine joined the transfer's channel, or did not."""


@frozen(kw_only=True)
class UpdateBegun(EngineFact):
    """An engine opened a weight-update session, or did not."""


@frozen(kw_only=True)
class WeightsTransferred(EngineFact):
    """An engine took one bucket, or did not."""

    index: int = 0


@frozen(kw_only=True)
class UpdateFinished(EngineFact):
    """An engine put the new weights in place, or did not."""


@frozen(kw_only=True)
class WeightsVerified(EngineFact):
    """An engine was asked for evidence that it holds the new weights."""


@frozen(kw_only=True)
class CacheFlushed(EngineFact):
    """An engine was told to drop the KV and prefix caches of the old weights."""


@frozen(kw_only=True)
class VersionLabelled(EngineFact):
    """An engine was labelled with its weight version."""


@frozen(kw_only=True)
class CanaryAnswered(EngineFact):
    """A tiny generation proved, or failed to prove, that the engine generates again."""


@frozen(kw_only=True)
class UpdateAbandoned(EngineFact):
    """An engine closed an unfinished update, or did not."""


@frozen(kw_only=True)
class TransferClosed(EngineFact):
    """An engine left the transfer's channel, or did not."""


@frozen(kw_only=True)
class LifecycleOpened(Fact):
    """The head of a lifecycle's history: the bounds it will keep."""

    name: str
    engines: tuple[str, ...]
    min_engines: int
    batch_size: int | None = None
    """`None`: no staleness budget."""
    max_staleness: int | None = None
    max_concurrent: int | None = None
    accepted: int = 0
    """Accepted rollouts that count against the budget already."""
    addresses: tuple[str, ...] = ()
    """Where the engines are, in the order of `engines`; empty strings for those that have no address."""
    on_stale: OnStale = OnStale.DROP
    """What becomes of rollouts older than the bound."""
    measured_from: MeasuredFrom = MeasuredFrom.ADMISSION
    """Which version staleness is counted from."""


@frozen(kw_only=True)
class EngineRecalled(Fact):
    """What the lifecycle before, which ended or was killed, knew of an engine, is taken over from its journal."""

    engine: str
    incarnation: str | None = None
    """Of the process that it was about; of another one nothing is known."""
    dirty: bool = False
    unfit: str = ""
    """Why it may not serve the version that it holds."""
    debt: PauseMode | None = None
    """Mode of its pause that no continue has matched."""
    certain: bool = False
    """That pause was acknowledged."""
    continued: bool = False
    """A continue was acknowledged since, and a probe must still say that the engine runs."""


@frozen(kw_only=True)
class TransitionBegun(Fact):
    """The guards of a trigger passed; its requests follow."""

    trigger: Trigger
    source: State


@frozen(kw_only=True)
class TransitionCommitted(Fact):
    """A trigger's proofs held; the machine is in `target`."""

    trigger: Trigger
    source: State
    target: State


@frozen(kw_only=True)
class TransitionRolledBack(Fact):
    """A trigger failed; the machine stays in `source`. What the row says about failures follows."""

    trigger: Trigger
    source: State
    reason: str


@frozen(kw_only=True)
class SubmissionResumed(Fact):
    """New rollouts may start."""


@frozen(kw_only=True)
class SubmissionSuspended(Fact):
    """No new rollout starts."""


@frozen(kw_only=True)
class GenerationHeld(Fact):
    """No generation request leaves the trainer."""


@frozen(kw_only=True)
class GenerationReleased(Fact):
    """Generation requests leave the trainer again."""

    seconds: float = 0.0
    """How long they were held: the pause as rollouts feel it."""


@frozen(kw_only=True)
class VersionAdvanced(Fact):
    """The commit point of a publication: `version` is the new one."""

    previous: int | None = None
    consumed: int | None = None
    """Accepted rollouts that training took since the version before; `None`: as many as were seen to be consumed, and
    a batch a version where none ever were."""


@frozen(kw_only=True)
class StandingChanged(Fact):
    """An engine was fenced, or serves again."""

    engine: str
    before: Standing
    after: Standing
    reason: str


@frozen(kw_only=True)
class EngineDirtied(Fact):
    """From here on the engine's weights may be partly written."""

    engine: str


@frozen(kw_only=True)
class EngineCleaned(Fact):
    """The engine's weights are one complete version again."""

    engine: str
    reason: str = ""


@frozen(kw_only=True)
class DebtSettled(Fact):
    """A debt is matched: by an acknowledged continue, by proof that no pause happened, or by a new incarnation."""

    engine: str
    reason: str = ""


@frozen(kw_only=True)
class BudgetChanged(Fact):
    """The staleness budget has other bounds from here on."""

    batch_size: int
    max_staleness: int
    max_concurrent: int | None = None


@frozen(kw_only=True)
class RolloutAdmitted(Fact):
    """A ticket was given out."""

    ticket: int
    evaluation: bool = False
    group_size: int = 1
    """Rollouts that it stands for."""


@frozen(kw_only=True)
class RolloutSettled(Fact):
    """A ticket came back."""

    ticket: int
    accepted: bool
    admitted: int | None = None
    """Version at admission."""
    evaluation: bool = False
    members: int | None = None
    """Rollouts of the group that were accepted; `None`: one, if it was accepted."""


@frozen(kw_only=True)
class RolloutConsumed(Fact):
    """A training step took an accepted rollout."""

    ticket: int
    staleness: int
    """Version at consumption minus version at admission."""
    by_token: int | None = None
    """The same by the oldest token; `None` where staleness is not counted so."""


@frozen(kw_only=True)
class RolloutDiscarded(Fact):
    """An accepted rollout left the buffer without being trained on; its capacity is free again."""

    ticket: int
    staleness: int
    by_token: int | None = None


@frozen(kw_only=True)
class GenerationSent(Fact):
    """A generation request left for an engine."""

    ticket: int
    engine: str


@frozen(kw_only=True)
class SegmentReceived(Fact):
    """A generation request ended."""

    ticket: int
    engine: str
    tokens: int
    finish_reason: str
    """`stop`, `length`, `abort`, or `error` when no reply came."""
