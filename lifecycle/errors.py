"""Everything this library raises.

```
LifecycleError
├── IllegalTransition        (RuntimeError)  the trigger does not exist in this state
├── TransitionRefused        (RuntimeError)  a guard refused, with its reason
├── Busy                     (RuntimeError)  another operation holds the lifecycle
├── Reentrant                (RuntimeError)  an operation was called from inside itself
├── WrongEventLoop           (RuntimeError)  called from another event loop or thread than it lives in
├── LifecycleClosed          (RuntimeError)  the lifecycle is closed, or was closed meanwhile
├── LifecycleFaulted         (RuntimeError)  too few engines are left
├── OperationFailed          (ExceptionGroup)  requests failed: one EngineFailure an engine
│   ├── AttachFailed
│   ├── PauseFailed
│   └── PublicationFailed
├── EngineFailure            what one engine did with one request
├── EngineUnavailable        an engine did not answer a generation request
├── GenerationRefused        (ValueError)    an engine refused a generation request for good
├── GenerationInterrupted    a generation was aborted too often without progress
├── TransferFailed           the trainer's half of a transfer failed
├── UnusableWeights          (ValueError)    a weight source cannot be published
├── TicketSettled            (RuntimeError)  a ticket was used after it was settled
├── NoCapacity               (RuntimeError)  the budget has no place for another rollout
├── ExecutorClosed           (RuntimeError)  the executor is closed, or was closed while the caller waited
├── NoSuchRollout            (LookupError)   nobody submitted it, or its result was taken before
├── RolloutsFailing          (RuntimeError)  so many rollouts in a row failed that going on makes no sense
├── EndOfDataset             (LookupError)   a dataset has no full batch left
└── JournalUnreadable        (ValueError)    a journal line is not what was written
```

Messages are one or two sentences; prompts, tensors and credentials never appear in them.
"""

from collections.abc import Sequence
from typing import Any, Self

from .states import Outcome, State, Trigger


class LifecycleError(Exception):
    """The root of the tree. An error whose causes can be pickled can be, too, and reaches another process as it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[LifecycleError], args: tuple[Any, ...], facts: dict[str, Any]) -> LifecycleError:
    """Make an error without `__init__`, whose arguments are facts and not the message that `args` holds."""
    error = kind.__new__(kind, *args)
    vars(error).update(facts)
    return error


class IllegalTransition(LifecycleError, RuntimeError):
    """The trigger does not exist in this state."""

    def __init__(self, trigger: Trigger, state: State, allowed: Sequence[Trigger]) -> None:
        self.trigger = trigger
        self.state = state
        self.allowed = tuple(allowed)
        names = ", ".join(t.name for t in self.allowed) or "nothing"
        super().__init__(f"{trigger.name} is not possible in {state.name}; possible here: {names}")


class TransitionRefused(LifecycleError, RuntimeError):
    """A guard or a proof refused the transition."""

    def __init__(self, trigger: Trigger, state: State, condition: str, reason: str) -> None:
        self.trigger = trigger
        self.state = state
        self.condition = condition
        self.reason = reason
        super().__init__(f"{trigger.name} refused in {state.name}: {reason} ({condition})")


class Busy(LifecycleError, RuntimeError):
    """Another operation holds the lifecycle."""

    def __init__(self, in_flight: Trigger | None) -> None:
        self.in_flight = in_flight
        super().__init__(f"another operation holds the lifecycle ({in_flight.name if in_flight else 'between steps'})")


class Reentrant(LifecycleError, RuntimeError):
    """An operation was called from inside another operation of the same lifecycle."""


class WrongEventLoop(LifecycleError, RuntimeError):
    """A lifecycle was called from another event loop, or thread, than the one it lives in."""


class LifecycleClosed(LifecycleError, RuntimeError):
    """The lifecycle is closed, or was closed while the caller waited."""


class LifecycleFaulted(LifecycleError, RuntimeError):
    """Too few engines are left to go on; `recover()` is the way out."""


class EngineFailure(LifecycleError):
    """What one engine did with one request."""

    def __init__(self, engine: str, request: str, outcome: Outcome, detail: str) -> None:
        self.engine = engine
        self.request = request
        self.outcome = outcome
        self.detail = detail
        super().__init__(f"{engine}: {request} is {outcome.name}: {detail[:300]}")


class OperationFailed(LifecycleError, ExceptionGroup[Exception]):
    """An operation failed. `exceptions` holds one `EngineFailure` for each engine that failed, and any local cause."""

    def derive(self, excs: Sequence[Exception], /) -> Self:  # type: ignore[override]
        """Return the same kind of error over other causes, as `except*` asks for."""
        return type(self)(self.message, excs)

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that failed, in order, each once."""
        return tuple(dict.fromkeys(e.engine for e in self.exceptions if isinstance(e, EngineFailure)))

    def __str__(self) -> str:
        causes = "; ".join(str(e) for e in self.exceptions)
        return f"{self.message}: {causes}"[:500]


class AttachFailed(OperationFailed):
    """Not enough engines became ready within the deadline."""


class PauseFailed(OperationFailed):
    """A pause failed or is not proven; it was compensated."""


class PublicationFailed(OperationFailed):
    """A publication failed before its commit point; the version did not advance."""


class EngineUnavailable(LifecycleError):
    """An engine did not answer a generation request; what it generated, if anything, is lost."""

    def __init__(self, engine: str, detail: str) -> None:
        self.engine = engine
        self.detail = detail
        super().__init__(f"{engine} did not answer a generation request: {detail[:300]}")


class GenerationRefused(LifecycleError, ValueError):
    """An engine refused a generation request for good: sending it again would not help."""


class GenerationInterrupted(LifecycleError):
    """A generation was aborted, or its engines failed, too often without a token of progress."""


class TransferFailed(LifecycleError):
    """The trainer's half of a transfer failed."""


class UnusableWeights(LifecycleError, ValueError):
    """A weight source cannot be published as it is."""


class TicketSettled(LifecycleError, RuntimeError):
    """A ticket was used, or settled otherwise, after it had been settled."""


class NoCapacity(LifecycleError, RuntimeError):
    """The budget has no place for another rollout now."""


class ExecutorClosed(LifecycleError, RuntimeError):
    """The executor is closed, or was closed while the caller waited. Results that were not taken are gone."""


class NoSuchRollout(LifecycleError, LookupError):
    """Nobody submitted it, somebody else waits for its result, or the result was taken or dropped before."""


class RolloutsFailing(LifecycleError, RuntimeError):
    """`max_consecutive_failures` rollouts of a dataset failed in a row; `causes` holds their errors, oldest first."""

    def __init__(self, causes: Sequence[BaseException]) -> None:
        self.causes = tuple(causes)
        kinds = ", ".join(sorted({type(cause).__name__ for cause in self.causes}))
        super().__init__(f"{len(self.causes)} rollouts in a row failed ({kinds}); the last error is the cause")


class EndOfDataset(LifecycleError, LookupError):
    """A dataset has ended, and less than a full batch is left of it. Its cause is the last failure, if any."""

    def __init__(self, wanted: int, left: int, failed: int = 0, rejected: int = 0) -> None:
        self.wanted = wanted
        self.left = left
        self.failed = failed
        self.rejected = rejected
        losses = f"; {failed} of its rollouts failed and {rejected} were rejected" if failed or rejected else ""
        super().__init__(f"the dataset has ended: {left} results are left and {wanted} are wanted{losses}")


class JournalUnreadable(LifecycleError, ValueError):
    """A journal line is not what a lifecycle wrote."""

    def __init__(self, line: int, problem: str) -> None:
        self.line = line
        self.problem = problem
        super().__init__(f"line {line}: {problem}")
