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
