"""Finding out how engines stand, and settling what they were left with: for ATTACH and RECOVER."""

import anyio

from lifecycle import events as e
from lifecycle.errors import AttachFailed
from lifecycle.fleet import NEW_PROCESS
from lifecycle.guards import enough_serving
from lifecycle.states import Outcome, Standing, Trigger
from lifecycle.values import EngineReport

from .context import Context, Operation, Procedure
from .pausing import Pausing

_FIRST_BACKOFF = 0.05
_LONGEST_BACKOFF = 1.0


class Attaching:
    """Procedures that probe and settle."""

    def __init__(self, context: Context, pausing: Pausing) -> None:
        self._context = context
        self._pausing = pausing

    def procedures(self) -> dict[type, Procedure]:
        """Return the procedures by request."""
        return {e.ProbeEngine: self._probe, e.Settle: self._settle}

    async def _probe(self, operation: Operation) -> None:
        """Probe every engine. Servers start slowly: attaching goes on until all are ready or its deadline passes."""
        deadlines = self._context.deadlines
        attaching = operation.attempt.trigger is Trigger.ATTACH
        end = anyio.current_time() + self._context.effects.allowed(deadlines.attach if attaching else deadlines.probe)
        pending = list(self._context.cohort.fleet)
        failures: tuple[Exception, ...] = ()
        backoff = _FIRST_BACKOFF
        while pending and (left := end - anyio.current_time()) > 0:
            result = await self._context.effects.fan_out(e.ProbeEngine, pending, timeout=min(left, deadlines.probe))
            failures = result.failures
            for name, acknowledgement in result.acknowledgements.items():
                if acknowledgement.done and acknowledgement.report is not None and acknowledgement.report.ready:
                    operation.reports[name] = acknowledgement.report
            hopeless = {
                name
                for name, ack in result.acknowledgements.items()
                if ack.outcome is Outcome.NOT_DONE and not ack.unreachable
            }
            pending = [name for name in pending if name not in operation.reports and name not in hopeless]
            # A last attempt without time to be answered would say less than the one before it.
            if not attaching or anyio.current_time() + 2 * backoff >= end:
                break
            if pending:
                await anyio.sleep(backoff)
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
        operation.failures.extend(failures)
        if attaching and len(operation.reports) < self._context.cohort.required:
            missing = [name for name in self._context.cohort.fleet if name not in operation.reports]
            causes = list(failures) or [TimeoutError(f"{', '.join(missing)} did not become ready in time")]
            raise AttachFailed(f"not ready: {', '.join(missing)}", causes)

    async def _settle(self, operation: Operation) -> None:
        """Decide for each engine, then continue what was found paused and whole."""
        context = self._context
        adopted = []
        for name in context.cohort.fleet:
            report = operation.reports.get(name)
            if report is None:
                context.books.fence(name, Standing.LOST, context.cohort.fleet[name].reason or "does not answer")
                continue
            if (reason := self._behind(name)) is None:
                context.books.serve(name)
            else:
                context.books.found(name, reason)
                if self._adoptable(operation, name, report):
                    adopted.append(name)
        await self._adopt(adopted)
        attaching = operation.attempt.trigger is Trigger.ATTACH
        if attaching or enough_serving(context.cohort, operation.attempt.intent) is None:
            await self._pausing.continue_engines(operation, list(context.cohort.fleet))

    def _behind(self, name: str) -> str | None:
        """Return why an engine that answers cannot serve, or `None`."""
        facts, version = self._context.cohort.fleet[name], self._context.cohort.version
        if facts.dirty:
            return "its weights may be partly written; a publication cures it"
        if version is None:
            return "nothing is published yet"
        return (facts.unfit or None) if facts.version == version else f"does not hold version {version}"

    def _adoptable(self, operation: Operation, name: str, report: EngineReport) -> bool:
        """Whether the user's word counts for what the engine holds: it is whole, and labelled by no run."""
        labelled_by_a_run = (report.label or "").rpartition(":")[2].isdecimal() and ":" in (report.label or "")
        return (
            operation.attempt.trigger is Trigger.ATTACH
            and self._context.cohort.version is not None
            and not self._context.cohort.fleet[name].dirty
            and self._context.cohort.fleet[name].unfit in {"", NEW_PROCESS}
            and not labelled_by_a_run
        )

    async def _adopt(self, names: list[str]) -> None:
        """Label engines with the initial version, so that their replies name it."""
        version, run = self._context.cohort.version, self._context.cohort.run
        result = await self._context.effects.fan_out(e.LabelVersion, names, label=f"{run}:{version}")
        for name, acknowledgement in result.acknowledgements.items():
            if acknowledgement.done:
                self._context.cohort.fleet.update(name, version=version, unfit="")
                self._context.books.serve(name)
