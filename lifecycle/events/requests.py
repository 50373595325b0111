"""Requests: what must be done."""

from typing import ClassVar

from attrs import field, frozen

from lifecycle.states import PauseMode
from lifecycle.values import Bucket, Channel

from . import facts
from .base import Event

_PRIVATE = {"journal": False}


@frozen(kw_only=True)
class Request(Event):
    """Something that must be done: by the adapter of `engine`, or by the lifecycle itself where that is `None`."""

    fact: ClassVar[type[facts.EngineFact] | None] = None
    """The fact that answers it, for requests to engines."""
    idempotent: ClassVar[bool] = False
    """Whether sending it twice is the same as once, so that a lost reply may be answered by sending it again."""
    engine: str | None = None


@frozen(kw_only=True)
class ProbeEngine(Request):
    """Ask what the engine is and how it stands. Changes nothing."""

    fact = facts.EngineProbed
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

    fact = facts.GenerationAborted
    idempotent = True


@frozen(kw_only=True)
class PauseGeneration(Request):
    """Stop generation inside the engine."""

    fact = facts.EnginePaused
    idempotent = True
    mode: PauseMode = PauseMode.ABORT


@frozen(kw_only=True)
class ContinueGeneration(Request):
    """Let the engine generate again. Never sent to a dirty engine."""

    fact = facts.EngineContinued
    idempotent = True


@frozen(kw_only=True)
class ProvePaused(Request):
    """Ask the engine whether it has stopped."""

    fact = facts.PauseProven
    idempotent = True
    mode: PauseMode = PauseMode.ABORT


@frozen(kw_only=True)
class OpenTransfer(Request):
    """Join the transfer's channel."""

    fact = facts.TransferOpened
    channel: Channel | None = field(default=None, metadata=_PRIVATE)


@frozen(kw_only=True)
class BeginUpdate(Request):
    """Open a weight-update session for one version."""

    fact = facts.UpdateBegun
    target: int = 0
    """The version being published."""
    label: str = ""
    kind: str = ""
    """The channel's kind."""


@frozen(kw_only=True)
class TransferWeights(Request):
    """Receive one bucket."""

    fact = facts.WeightsTransferred
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

    fact = facts.UpdateFinished
    target: int = 0
    label: str = ""
    kind: str = ""


@frozen(kw_only=True)
class VerifyWeights(Request):
    """Ask for evidence that the engine holds the version."""

    fact = facts.WeightsVerified
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

    fact = facts.CacheFlushed
    idempotent = True
    mode: PauseMode = PauseMode.ABORT


@frozen(kw_only=True)
class LabelVersion(Request):
    """See to it that the engine is labelled with its version."""

    fact = facts.VersionLabelled
    idempotent = True
    label: str = ""


@frozen(kw_only=True)
class Canary(Request):
    """Generate a token, before anything is routed to the engine."""

    fact = facts.CanaryAnswered
    idempotent = True


@frozen(kw_only=True)
class StopTransfer(Request):
    """Cut the trainer's half of a transfer, so that nothing stays blocked in it."""


@frozen(kw_only=True)
class AbandonUpdate(Request):
    """Close an unfinished update session in the engine."""

    fact = facts.UpdateAbandoned
    kind: str = ""
    channel: Channel | None = field(default=None, metadata=_PRIVATE)


@frozen(kw_only=True)
class CloseTransfer(Request):
    """Leave the transfer's channel, in the trainer and in the engine."""

    fact = facts.TransferClosed
    channel: Channel | None = field(default=None, metadata=_PRIVATE)
