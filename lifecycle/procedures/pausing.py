"""Submission, and stopping and continuing generation."""

import time

import anyio

from lifecycle import events as e
from lifecycle.effects import Result
from lifecycle.errors import EngineFailure, PauseFailed, PublicationFailed
from lifecycle.guards import enough_reachable, stopped
from lifecycle.states import Outcome, PauseMode, Standing, Trigger

from .context import Context, Operation, Procedure

_CONTINUE_ROUNDS = 3
"""How often a pause may land after its continue before the engine is given up."""


class Pausing:
    """Procedures that stop and continue."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._held_since = 0.0

    def procedures(self) -> dict[type, Procedure]:
        """Return the procedures by request."""
        return {
            e.ResumeSubmission: self._resume_submission,
            e.SuspendSubmission: self._suspend_submission,
            e.HoldGeneration: self._hold,
            e.ReleaseGeneration: self._release,
            e.Drain: self._drain,
            e.AbortGeneration: self._abort,
            e.PauseGeneration: self._pause,
            e.ProvePaused: self._prove,
            e.ContinueGeneration: self._continue,
        }

    async def _resume_submission(self, _: Operation) -> None:
        cohort = self._context.cohort
        if not cohort.submission_open:
            cohort.submission_open = True
            self._context.recorder.emit(e.SubmissionResumed)

    async def _suspend_submission(self, _: Operation) -> None:
        cohort = self._context.cohort
        if cohort.submission_open:
            cohort.submission_open = False
            self._context.recorder.emit(e.SubmissionSuspended)

    async def _hold(self, operation: Operation) -> None:
        cohort = self._context.cohort
        cohort.mode = operation.mode
        if not cohort.generation_held:
            cohort.generation_held = True
            cohort.epoch += 1
            self._held_since = time.monotonic()
            self._context.recorder.emit(e.GenerationHeld)

    async def _release(self, _: Operation) -> None:
        cohort = self._context.cohort
        if cohort.generation_held:
            cohort.generation_held = False
            cohort.pause_seconds = time.monotonic() - self._held_since
            self._context.recorder.emit(e.GenerationReleased, seconds=cohort.pause_seconds)
            for debt in cohort.ledger.outstanding:
                # It stays paused, nobody knows for how long: what it keeps goes on at another engine.
                self._context.segments.interrupt(debt.engine)
            self._context.segments.changed.give()

    async def _drain(self, operation: Operation) -> None:
        """WAIT lets the requests in flight finish; everything newer is held already."""
        if operation.mode is not PauseMode.WAIT:
            return
        timeout = self._context.effects.allowed(self._context.deadlines.drain)
        with anyio.move_on_after(timeout) as waiting:
            await self._context.segments.landed()
        if waiting.cancelled_caught:
            left = self._context.segments.in_flight
            late = TimeoutError(f"{left} requests in flight after {timeout:.3g} s")
            raise PauseFailed("generation did not drain", [late])

    async def _abort(self, operation: Operation) -> None:
        """Abort before the pause, so that the pause finds an idle engine: SGLang's takes a second where it does not."""
        if operation.mode is not PauseMode.ABORT:
            return
        result = await self._context.effects.fan_out(e.AbortGeneration, self._context.reachable)
        operation.failures.extend(f for f in result.failures if self._is_lost(f))
        await self._until_landed()

    async def _pause(self, operation: Operation) -> None:
        context = self._context
        going = [name for name in context.reachable if not self._stands_paused(name)]
        result = await context.effects.fan_out(e.PauseGeneration, going, mode=operation.mode)
        failures = [f for f in result.failures if not self._is_lost(f)]
        operation.failures.extend(f for f in result.failures if self._is_lost(f))
        if operation.attempt.trigger is Trigger.RECOVER:
            self._fence_unstopped(operation, result)
        elif failures:
            raise PauseFailed(f"{operation.mode.value} pause failed", failures)
        if not operation.mode.keeps_requests:
            # The engines have nothing left, so that a reply which is still missing will not come.
            await self._until_landed()
            context.segments.interrupt()

    def _fence_unstopped(self, operation: Operation, result: Result) -> None:
        """Recovery has nothing to fall back to: what cannot be stopped takes part in nothing."""
        for name, acknowledgement in result.acknowledgements.items():
            facts = self._context.cohort.fleet[name]
            if not (facts.paused if operation.mode.keeps_requests else facts.idle):
                detail = acknowledgement.detail or "it does not stand still"
                self._context.books.fence(name, Standing.LOST, f"did not pause: {detail}")

    def _stands_paused(self, name: str) -> bool:
        """Whether the engine's pause of before, left by an operation that failed, still serves the mode asked for."""
        cohort = self._context.cohort
        debt = cohort.ledger.owed(name)
        facts = cohort.fleet[name]
        return debt is not None and debt.certain and bool(facts.paused) and facts.idle

    def _is_lost(self, failure: Exception) -> bool:
        return isinstance(failure, EngineFailure) and not self._context.cohort.fleet[failure.engine].reachable

    async def _until_landed(self) -> None:
        with anyio.move_on_after(self._context.effects.allowed(self._context.deadlines.abort)):
            await self._context.segments.landed()

    async def _prove(self, operation: Operation) -> None:
        context, intent = self._context, operation.attempt.intent
        result = await context.effects.fan_out(e.ProvePaused, context.reachable, mode=context.cohort.mode)
        failures = [f for f in result.failures if not self._is_lost(f)]
        if failures or enough_reachable(context.cohort, intent) is not None:
            raise PublicationFailed("the pause could not be proven again", list(result.failures))
        operation.failures.extend(result.failures)
        if (reason := stopped(context.cohort, intent)) is not None:
            # Continued by somebody else, or started anew: only a probe tells, and what it finds may not serve.
            running = [facts.name for facts in context.cohort.fleet.reachable if not facts.paused]
            await context.effects.fan_out(e.ProbeEngine, running)
            raise PublicationFailed("the engines are not paused any more", [RuntimeError(reason)])

    async def _continue(self, operation: Operation) -> None:
        debts = self._context.cohort.ledger.outstanding
        await self.continue_engines(operation, [debt.engine for debt in debts])

    async def continue_engines(self, operation: Operation, names: list[str]) -> None:
        """Continue those of `names` that are clean and reachable, until each debt is settled or its engine fenced.

        CLOSE also tries those that were lost: nobody will come back to them.

        An acknowledged continue settles a certain pause. After an uncertain one a probe must say that the engine runs,
        since the pause may have landed after the continue.

        Cancellation: continues without an answer are recorded as unknown; their debts stay.
        """
        context, fleet, ledger = self._context, self._context.cohort.fleet, self._context.cohort.ledger
        last_chance = operation.attempt.trigger is Trigger.CLOSE
        for _ in range(_CONTINUE_ROUNDS):
            names = [n for n in names if (fleet[n].reachable or last_chance) and not fleet[n].dirty and ledger.owed(n)]
            if not names:
                return
            result = await context.effects.fan_out(e.ContinueGeneration, names)
            operation.failures.extend(result.failures)
            for name, acknowledgement in result.acknowledgements.items():
                if not acknowledgement.done:
                    refused = acknowledgement.outcome is Outcome.NOT_DONE
                    standing = Standing.STALE if refused else Standing.LOST
                    context.books.fence(name, standing, f"did not continue: {acknowledgement.detail}")
            names = [name for name in names if ledger.owed(name) and result.acknowledgements[name].done]
            await context.effects.fan_out(e.ProbeEngine, names)
        for name in names:
            if ledger.owed(name) and fleet[name].reachable:
                reason = f"still paused after {_CONTINUE_ROUNDS} acknowledged continues"
                operation.failures.append(EngineFailure(name, "ContinueGeneration", Outcome.UNKNOWN, reason))
                context.books.fence(name, Standing.STALE, reason)
