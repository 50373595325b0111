"""The vocabulary of the machine: states, triggers, and the three-valued outcome of a request."""

from enum import Enum


class State(Enum):
    """What is *proven* about the cohort. `LifecycleMachine.in_flight` names what is being attempted."""

    RUNNING = "RUNNING"
    """Submission is open and every serving engine generates."""
    SUSPENDED = "SUSPENDED"
    """Submission is closed; engines generate, so rollouts in progress can finish."""
    PAUSED = "PAUSED"
    """Generation has stopped in every reachable engine. Nothing tells when somebody else continues one: BEGIN_UPDATE
    proves it again."""
    UPDATING = "UPDATING"
    """Engines are open to new weights; what they hold may be partly written."""
    FAULTED = "FAULTED"
    """Fewer engines are left than the policy asks for; `recover()` is the way out."""
    CLOSED = "CLOSED"
    """Before ATTACH and after CLOSE: no engine is ours."""


class Trigger(Enum):
    """What can be attempted. Each is a transaction: guards, requests, proofs, commit."""

    ATTACH = "ATTACH"
    RESUME = "RESUME"
    SUSPEND = "SUSPEND"
    ADMIT = "ADMIT"
    PAUSE_GENERATION = "PAUSE_GENERATION"
    CONTINUE_GENERATION = "CONTINUE_GENERATION"
    BEGIN_UPDATE = "BEGIN_UPDATE"
    TRANSFER = "TRANSFER"
    FINISH_UPDATE = "FINISH_UPDATE"
    ABANDON_UPDATE = "ABANDON_UPDATE"
    FAULT = "FAULT"
    RECOVER = "RECOVER"
    CLOSE = "CLOSE"


class PauseMode(Enum):
    """What a pause does with the requests in flight. Which modes exist is the server's affair."""

    ABORT = "abort"
    """End them with the tokens made so far (SGLang `abort`, vLLM `abort`)."""
    WAIT = "wait"
    """Let them finish first (vLLM `wait`)."""
    KEEP = "keep"
    """Freeze them and recompute their KV cache on continue (vLLM `keep` with `clear_cache=true`)."""
    IN_PLACE = "in_place"
    """Freeze them with their KV cache, which stays that of the old weights (SGLang `in_place`)."""
    RETRACT = "retract"
    """Freeze them, drop their KV cache, recompute it on continue (SGLang `retract`)."""

    @property
    def keeps_requests(self) -> bool:
        """Whether requests survive the pause inside the engine and go on after it."""
        return self in {PauseMode.KEEP, PauseMode.IN_PLACE, PauseMode.RETRACT}


class Outcome(Enum):
    """What is known after a request to an engine."""

    DONE = "DONE"
    NOT_DONE = "NOT_DONE"
    UNKNOWN = "UNKNOWN"
    """The reply was lost or late: it may have happened, and it may still happen."""


class Standing(Enum):
    """An engine's place in the fleet. Stale and lost together are *fenced*."""

    SERVING = "SERVING"
    """Routed to."""
    STALE = "STALE"
    """Reachable, takes part in publications, not routed to until one completes on it."""
    LOST = "LOST"
    """Unreachable or blocked; takes part in nothing until a probe answers."""


class OnStale(Enum):
    """What becomes of an accepted rollout that is older than the bound when training would take it."""

    DROP = "drop"
    """It is discarded; its capacity is free at once, so that another one starts."""
    MASK = "mask"
    """It is taken; training leaves its stale tokens out of the loss, see `StalenessBudget.mask()`."""
    KEEP = "keep"
    """It is taken as it is."""
    WAIT = "wait"
    """Training waits for older rollouts before it takes younger ones, so that none grows older than the bound. What is
    too old all the same, since batches were smaller than `batch_size`, is dropped."""


class MeasuredFrom(Enum):
    """Which version staleness is counted from."""

    ADMISSION = "admission"
    """The version that was published when the rollout was admitted."""
    OLDEST_TOKEN = "oldest_token"  # noqa: S105 - no password
    """The oldest version that made one of its tokens; that at admission where it has none."""
