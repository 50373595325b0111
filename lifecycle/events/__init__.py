"""Events: requests that adapters must act on, and facts that record what happened.

A request names an engine where one must act, and none where the lifecycle acts by itself. Every request to an engine
is followed by exactly one fact that carries its outcome. Both are written to the journal, the request before it goes
out. No event holds a prompt, a tensor or a secret; fields marked `journal=False` stay in the process.
"""

from typing import Any

from .base import Event
from .facts import (
    CacheFlushed,
    CanaryAnswered,
    DebtSettled,
    EngineCleaned,
    EngineContinued,
    EngineDirtied,
    EngineFact,
    EnginePaused,
    EngineProbed,
    Fact,
    GenerationAborted,
    GenerationHeld,
    GenerationReleased,
    GenerationSent,
    LifecycleOpened,
    PauseProven,
    RolloutAdmitted,
    RolloutConsumed,
    RolloutSettled,
    SegmentReceived,
    StandingChanged,
    SubmissionResumed,
    SubmissionSuspended,
    TransferClosed,
    TransferOpened,
    TransitionBegun,
    TransitionCommitted,
    TransitionRolledBack,
    UpdateAbandoned,
    UpdateBegun,
    UpdateFinished,
    VersionAdvanced,
    VersionLabelled,
    WeightsTransferred,
    WeightsVerified,
)
from .requests import (
    AbandonUpdate,
    AbortGeneration,
    BeginUpdate,
    Canary,
    CloseTransfer,
    CommitVersion,
    ContinueGeneration,
    Drain,
    FinishUpdate,
    FlushCache,
    HoldGeneration,
    LabelVersion,
    OpenTransfer,
    PauseGeneration,
    ProbeEngine,
    ProvePaused,
    ReleaseGeneration,
    Request,
    ResumeSubmission,
    Settle,
    StopTransfer,
    SuspendSubmission,
    TransferWeights,
    VerifyWeights,
)

__all__ = [
    "AbandonUpdate",
    "AbortGeneration",
    "BeginUpdate",
    "CacheFlushed",
    "Canary",
    "CanaryAnswered",
    "CloseTransfer",
    "CommitVersion",
    "ContinueGeneration",
    "DebtSettled",
    "Drain",
    "EngineCleaned",
    "EngineContinued",
    "EngineDirtied",
    "EngineFact",
    "EnginePaused",
    "EngineProbed",
    "Event",
    "Fact",
    "FinishUpdate",
    "FlushCache",
    "GenerationAborted",
    "GenerationHeld",
    "GenerationReleased",
    "GenerationSent",
    "HoldGeneration",
    "LabelVersion",
    "LifecycleOpened",
    "OpenTransfer",
    "PauseGeneration",
    "PauseProven",
    "ProbeEngine",
    "ProvePaused",
    "ReleaseGeneration",
    "Request",
    "ResumeSubmission",
    "RolloutAdmitted",
    "RolloutConsumed",
    "RolloutSettled",
    "SegmentReceived",
    "Settle",
    "StandingChanged",
    "StopTransfer",
    "SubmissionResumed",
    "SubmissionSuspended",
    "SuspendSubmission",
    "TransferClosed",
    "TransferOpened",
    "TransferWeights",
    "TransitionBegun",
    "TransitionCommitted",
    "TransitionRolledBack",
    "UpdateAbandoned",
    "UpdateBegun",
    "UpdateFinished",
    "VerifyWeights",
    "VersionAdvanced",
    "VersionLabelled",
    "WeightsTransferred",
    "WeightsVerified",
    "all_events",
]


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
