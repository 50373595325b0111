"""The driver: carries out rows of the transition table, and knows what to do when one does not commit.

guards → requests in order → proofs → commit. What was begun ends committed, rolled back, or rolled forward; nothing is
left in between, whatever is raised and whoever cancels.
"""

from collections.abc import Sequence

import anyio
import anyio.lowlevel

from . import events as e
from .cohort import Intent
from .errors import AttachFailed, OperationFailed, PauseFailed, PublicationFailed, TransitionRefused
from .gate import hopeless
from .machine import LifecycleMachine
from .ports import TransferPort
from .procedures import Context, Operation, procedures
from .shielding import to_the_end
from .states import State, Trigger
from .table import OnFailure, Transition, rows
from .values import Bucket

_Requests = Sequence[type[e.Request]]

_FAILED = {
    Trigger.ATTACH: AttachFailed,
    Trigger.PAUSE_GENERATION: PauseFailed,
    Trigger.BEGIN_UPDATE: PublicationFailed,
    Trigger.TRANSFER: PublicationFailed,
    Trigger.FINISH_UPDATE: PublicationFailed,
}


class Driver:
    """Runs triggers. Its caller sees to it that only one runs at a time."""

    def __init__(self, context: Context, machine: LifecycleMachine) -> None:
        self._context = context
        self._machine = machine
        self._procedures = procedures(context)
        self.closing = False
        """CLOSE will settle everything: an operation that it pre-empts need not clean up."""

    def close_next(self) -> None:
        """Note that CLOSE follows: the operation that it pre-empts need not clean up."""
        self.closing = True

    async def run(
        self,
        trigger: Trigger,
        intent: Intent,
        *,
        transfer: TransferPort | None = None,
        bucket: Bucket | None = None,
        consumed: int | None = None,
    ) -> Operation:
        """Carry out `trigger`. Returns what was performed, with the failures at engines that were fenced meanwhile.

        Raises `IllegalTransition` or `TransitionRefused` when nothing was done, and `OperationFailed` after what was
        done has been compensated.

        Cancellation: compensated like a failure before the commit point, carried to its end after it; then raised.
        """
        attempt = self._machine.begin(trigger, intent)
        operation = Operation(attempt=attempt, transfer=transfer, bucket=bucket, consumed=consumed)
        self._context.recorder.emit(e.TransitionBegun, trigger=trigger, source=attempt.source)
        try:
            shielded = await self._carry_out(operation)
        except BaseException as error:
            self._machine.roll_back(attempt)
            self._context.recorder.emit(
                e.TransitionRolledBack, trigger=trigger, source=attempt.source, reason=_sentence(error)
            )
            # Where CLOSE follows it settles everything; of an attempt to attach there is nothing to close.
            settled_by_close = self.closing and self._machine.state is not State.CLOSED
            if not settled_by_close:
                interruption = await to_the_end(lambda: self._make_good(operation))
                if interruption is not None:
                    raise interruption from error
            raise
        await self._fault_if_too_few()
        # What was committed stands, and is on record as such: only now is a cancellation given its due.
        if operation.interruption is not None:
            raise operation.interruption
        if shielded:
            await anyio.lowlevel.checkpoint_if_cancelled()
        return operation

    async def _carry_out(self, operation: Operation) -> bool:
        """Perform and commit. Returns whether cancellations were held back meanwhile."""
        row = operation.attempt.row
        if row.on_failure is OnFailure.NEXT_ROW:
            await self._first_row_that_holds(operation)
            return True
        revocable, irrevocable = _at_commit_point(row)
        await self._walk(revocable, operation)
        if irrevocable:
            left = list(irrevocable)

            async def forward() -> None:
                await self._go_through(left, operation)
                await self._commit_forward(operation)

            operation.interruption = await to_the_end(forward)
        else:
            self._commit_proven(operation, row)
        return bool(irrevocable)

    async def _walk(self, requests: _Requests, operation: Operation) -> None:
        for request in requests:
            await self._procedures[request](operation)

    async def _go_through(self, left: list[type[e.Request]], operation: Operation) -> None:
        """Perform what is left, so that an interrupted walk goes on where it was."""
        while left:
            await self._procedures[left[0]](operation)
            del left[0]

    async def _first_row_that_holds(self, operation: Operation) -> None:
        """RECOVER: what engines answer decides which row it is. Once they have answered, it is carried to its end."""
        candidates = operation.attempt.rows
        shared = _common_start(candidates)
        asking = candidates[0].requests.index(e.Settle)
        await self._walk(candidates[0].requests[:asking], operation)
        left = list(candidates[0].requests[asking:shared])

        async def forward() -> None:
            await self._go_through(left, operation)
            await self._commit_first(candidates, shared, operation)

        operation.interruption = await to_the_end(forward)

    async def _commit_first(self, candidates: Sequence[Transition], shared: int, operation: Operation) -> None:
        refusal: TransitionRefused | None = None
        for row in candidates:
            try:
                if row.on_failure is OnFailure.NEXT_ROW:
                    self._machine.prove(operation.attempt, row)
                await self._walk(row.requests[shared:], operation)
                self._commit(operation, row)
            except TransitionRefused as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    async def _commit_forward(self, operation: Operation) -> None:
        """Commit past the point of no return: to the row asked for, or to the one that leaves submission closed."""
        attempt = operation.attempt
        for row in dict.fromkeys((attempt.row, *rows(attempt.trigger, attempt.source, resume=False))):
            try:
                if row is not attempt.row:
                    await self._walk([e.SuspendSubmission], operation)
                self._commit(operation, row)
            except TransitionRefused as error:
                operation.failures.append(error)
            else:
                return
        raise OperationFailed(f"{attempt.trigger.name} could not be carried to its end", operation.failures)

    def _commit_proven(self, operation: Operation, row: Transition) -> None:
        """Commit, or fail with everything that kept the proofs from holding."""
        try:
            self._commit(operation, row)
        except TransitionRefused as refusal:
            failed = _FAILED.get(operation.attempt.trigger, OperationFailed)
            raise failed(f"{operation.attempt.trigger.name} failed", [*operation.failures, refusal]) from refusal

    def _commit(self, operation: Operation, row: Transition) -> None:
        attempt = operation.attempt
        target = self._machine.commit(attempt, row)
        self._context.recorder.emit(
            e.TransitionCommitted, trigger=attempt.trigger, source=attempt.source, target=target
        )
        self._announce()

    async def _make_good(self, operation: Operation) -> None:
        """Undo what a transition did that does not commit, or take it further."""
        row = operation.attempt.row
        match row.on_failure:
            case OnFailure.COMPENSATE:
                await self._walk(row.compensation, operation)
            case OnFailure.ABANDON if self._machine.state is State.UPDATING:
                await self.run(Trigger.ABANDON_UPDATE, operation.attempt.intent)
            case _:
                pass
        await self._fault_if_too_few()

    async def _fault_if_too_few(self) -> None:
        """FAULT is not asked for: it follows from what is known."""
        if self._machine.state in {State.CLOSED, State.FAULTED} or not self._machine.can(Trigger.FAULT):
            return
        attempt = self._machine.begin(Trigger.FAULT)
        operation = Operation(attempt=attempt)
        self._context.recorder.emit(e.TransitionBegun, trigger=Trigger.FAULT, source=attempt.source)
        await self._walk(attempt.row.requests, operation)  # it waits for nothing
        self._commit(operation, attempt.row)

    def _announce(self) -> None:
        """Let everybody who waits look at the new state."""
        if (error := hopeless(self._machine.state)) is not None:
            self._context.gate.refuse_waiters(error)
        self._context.gate.wake()
        self._context.segments.changed.give()


def _at_commit_point(row: Transition) -> tuple[_Requests, _Requests]:
    """Split a row's requests: those that a failure takes back, and those that are carried to their end."""
    if row.on_failure is OnFailure.ROLL_FORWARD:
        return (), row.requests
    if e.CommitVersion not in row.requests:
        return row.requests, ()
    point = row.requests.index(e.CommitVersion) + 1
    return row.requests[:point], row.requests[point:]


def _common_start(candidates: Sequence[Transition]) -> int:
    shared = 0
    for together in zip(*(row.requests for row in candidates), strict=False):
        if len(set(together)) > 1:
            break
        shared += 1
    return shared


def _sentence(error: BaseException) -> str:
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return "cancelled"  # by whom is a matter of task names and addresses
    return (str(error) or type(error).__name__)[:500]
