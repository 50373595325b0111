"""Events: requests that adapters must act on, and facts that record what happened.

A request names an engine where one must act, and none where the lifecycle acts by itself. Every request to an engine
is followed by exactly one fact that carries its outcome. Both are written to the journal, the request before it goes
out. No event holds a prompt, a tensor or a secret; fields marked `journal=False` stay in the process.
"""

from typing import Any, ClassVar

from attrs import field, frozen

from .ports import Bucket, Channel
from .states import Outcome, PauseMode, Standing, State, Trigger

_PRIVATE = {"journal": False}


@frozen(kw_only=True)
class Event:
    """What every event has. The recorder stamps it; until then it is unnumbered."""

    seq: int = 0
    """Position in this lifecycle's history, from 1, without gaps."""
    at: float = 0.0
    """Seconds, Unix clock."""
    monotonic: float = 0.0
    """Seconds, for differences only."""
    cohort: str = ""
    epoch: int = 0
    """Counts pause-to-continue spans."""
    version: int | None = None
    """The published version at this moment; `None` before the first."""


# --------------------------------------------------------------------------------------------------------------- facts


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
    """A trigger failed; the machine stays in `source` after compensation."""

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
class RolloutAdmitted(Fact):
    """A ticket was given out."""

    ticket: int
    evaluation: bool = False


@frozen(kw_only=True)
class RolloutSettled(Fact):
    """A ticket came back."""

    ticket: int
    accepted: bool
    admitted: int | None = None
    """Version at admission."""
    evaluation: bool = False


@frozen(kw_only=True)
class RolloutConsumed(Fact):
    """A training step took an accepted rollout."""

    ticket: int
    staleness: int
    """Version at consumption minus version at admission."""


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


# ------------------------------------------------------------------------------------------------------------ requests


@frozen(kw_only=True)
class Request(Event):
    """Something that must be done: by the adapter of `engine`, or by the lifecycle itself where that is `None`."""

    fact: ClassVar[type[EngineFact] | None] = None
    """The fact that answers it, for requests to engines."""
    idempotent: ClassVar[bool] = False
    """Whether sending it twice is the same as once, so that a lost reply may be answered by sending it again."""
    engine: str | None = None


@frozen(kw_only=True)
class ProbeEngine(Request):
    """Ask what the engine is and how it stands. Changes nothing."""

    fact = EngineProbed
    idempotent = True


@frozen(kw_only=True)
class Settle(Request):
    """Decide for each probed engine: continue it, mark it stale, or count it as lost."""


@frozen(kw_only=True)
class ResumeSubmission(Request):
    """Open the submission gate."""


@frozen(kw_only=True)
class SuspendSubmission(Request):
    """Close the submission gate."""


@frozen(kw_only=True)
class HoldGeneration(Request):
    """Let no further generation request leave."""


@frozen(kw_only=True)
class ReleaseGeneration(Request):
    """Let generation requests leave again."""


@frozen(kw_only=True)
class Drain(Request):
    """Wait until the generation requests in flight have ended by themselves."""


@frozen(kw_only=True)
class AbortGeneration(Request):
    """End every request in flight in the engine, with the tokens made so far."""

    fact = GenerationAborted
    idempotent = True


@frozen(kw_only=True)
class PauseGeneration(Request):
    """Stop generation inside the engine."""

    fact = EnginePaused
    idempotent = True
    mode: PauseMode = PauseMode.ABORT


@frozen(kw_only=True)
class ContinueGeneration(Request):
    """Let the engine generate again. Never sent to a dirty engine."""

    fact = EngineContinued
    idempotent = True


@frozen(kw_only=True)
class ProvePaused(Request):
    """Ask the engine whether it has stopped."""

    fact = PauseProven
    idempotent = True
    mode: PauseMode = PauseMode.ABORT


@frozen(kw_only=True)
class OpenTransfer(Request):
    """Join the transfer's channel."""

    fact = TransferOpened
    channel: Channel | None = field(default=None, metadata=_PRIVATE)


@frozen(kw_only=True)
class BeginUpdate(Request):
    """Open a weight-update session for one version."""

    fact = UpdateBegun
    target: int = 0
    """The version being published."""
    label: str = ""
    kind: str = ""
    """The channel's kind."""


@frozen(kw_only=True)
class TransferWeights(Request):
    """Receive one bucket."""

    fact = WeightsTransferred
    target: int = 0
    label: str = ""
    index: int = 0
    nbytes: int = 0
    mode: PauseMode = PauseMode.ABORT
    """How the engine is paused: some servers cannot flush while requests are kept."""
    bucket: Bucket | None = field(default=None, metadata=_PRIVATE)
    channel: Channel | None = field(default=None, metadata=_PRIVATE)


@frozen(kw_only=True)
class FinishUpdate(Request):
    """Put the received weights in place and close the session. Never sent again on a lost reply: probe instead."""

    fact = UpdateFinished
    target: int = 0
    label: str = ""
    kind: str = ""


@frozen(kw_only=True)
class VerifyWeights(Request):
    """Ask for evidence that the engine holds the version."""

    fact = WeightsVerified
    idempotent = True
    target: int = 0
    label: str = ""
    kind: str = ""


@frozen(kw_only=True)
class CommitVersion(Request):
    """The commit point: enough engines finished and passed verification, so the version advances."""


@frozen(kw_only=True)
class FlushCache(Request):
    """Drop the KV and prefix caches that the old weights made."""

    fact = CacheFlushed
    idempotent = True
    mode: PauseMode = PauseMode.ABORT


@frozen(kw_only=True)
class LabelVersion(Request):
    """See to it that the engine is labelled with its version."""

    fact = VersionLabelled
    idempotent = True
    label: str = ""


@frozen(kw_only=True)
class Canary(Request):
    """Generate a token, before anything is routed to the engine."""

    fact = CanaryAnswered
    idempotent = True


@frozen(kw_only=True)
class StopTransfer(Request):
    """Cut the trainer's half of a transfer, so that nothing stays blocked in it."""


@frozen(kw_only=True)
class AbandonUpdate(Request):
    """Close an unfinished update session in the engine."""

    fact = UpdateAbandoned
    kind: str = ""
    channel: Channel | None = field(default=None, metadata=_PRIVATE)


@frozen(kw_only=True)
class CloseTransfer(Request):
    """Leave the transfer's channel, in the trainer and in the engine."""

    fact = TransferClosed
    channel: Channel | None = field(default=None, metadata=_PRIVATE)


def all_events() -> dict[str, type[Event]]:
    """Return every concrete event class by name: the vocabulary of a journal."""
    found: dict[str, type[Event]] = {}
    pending: list[type[Any]] = [Event]
    while pending:
        cls = pending.pop()
        subclasses = cls.__subclasses__()
        pending.extend(subclasses)
        if not subclasses:
            found[cls.__name__] = cls
    return found
