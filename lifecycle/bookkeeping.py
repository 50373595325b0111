"""What is known before and after each request: the only place where facts about engines change.

Synchronous and pure but for the events it emits, so that a model checker can drive it as the driver does.
"""

from collections.abc import Callable, Mapping
from typing import Any

from . import events as e
from .cohort import Cohort
from .fleet import NEW_PROCESS, EngineFacts, incarnation_changed, version_of
from .history import Remembered, debt_of
from .recorder import Recorder
from .states import Outcome, PauseMode, Standing
from .values import Acknowledgement, Capabilities, EngineReport


class Bookkeeper:
    """Turns requests and their outcomes into facts, debts and standings."""

    def __init__(self, cohort: Cohort, recorder: Recorder, capabilities: Callable[[str], Capabilities]) -> None:
        self._cohort = cohort
        self._recorder = recorder
        self._capabilities = capabilities
        self._recalled: set[str] = set()
        """Engines that are known from the journal alone."""
        self._after: Mapping[type[e.Request], Callable[[Any, Acknowledgement, EngineFacts], None]] = {
            e.ProbeEngine: self._probed,
            e.PauseGeneration: self._paused,
            e.ContinueGeneration: self._continued,
            e.ProvePaused: self._proven,
            e.BeginUpdate: self._begun,
            e.TransferWeights: self._transferred,
            e.FinishUpdate: self._finished,
            e.VerifyWeights: self._verified,
            e.AbandonUpdate: self._abandoned,
        }

    def sending(self, request: e.Request) -> None:
        """Note what may become true once `request` is out. Called before anything is written to the engine."""
        name = request.engine
        if name is None:
            raise ValueError(f"{type(request).__name__} names no engine")
        cohort = self._cohort
        match request:
            case e.PauseGeneration():
                cohort.ledger.owe(name, mode=request.mode, epoch=cohort.epoch)
                cohort.fleet.update(name, paused=None, idle=False)
            case e.ContinueGeneration():
                if cohort.fleet[name].dirty:
                    raise RuntimeError(f"{name} is dirty and must not be continued")
                cohort.fleet.update(name, paused=None, idle=False)
            case e.BeginUpdate():
                cohort.fleet.update(name, session=True, touched=False)
                if request.kind in self._capabilities(name).at_risk_from_begin:
                    self.dirty(name, "an update was begun")
            case e.TransferWeights():
                cohort.fleet.update(name, touched=True)
                self.dirty(name, "weights are being written")
            case _:
                pass

    def recall(self, name: str, known: Remembered) -> None:
        """Take over what a lifecycle before knew of an engine. A probe that finds another process undoes it."""
        self._recalled.add(name)
        debt = known.debt
        event = self._recorder.emit(
            e.EngineRecalled,
            engine=name,
            incarnation=known.incarnation,
            dirty=known.dirty,
            unfit=known.unfit,
            debt=debt.mode if debt else None,
            certain=debt is not None and debt.certain,
            continued=debt is not None and debt.continued,
        )
        # Where weights are partly written, a session may still be open: the next publication closes it first.
        self._cohort.fleet.update(
            name, incarnation=known.incarnation, dirty=known.dirty, session=known.dirty, unfit=known.unfit
        )
        if debt is not None:
            self._cohort.ledger.restore(debt_of(event))

    def record(
        self, request: e.Request, acknowledgement: Acknowledgement, seconds: float, *, given_up: bool = False
    ) -> None:
        """Record the outcome of `request` as its fact, and draw the consequences.

        `given_up`: nobody waited for it, so that its absence says nothing about the engine.
        """
        if request.engine is None or request.fact is None:
            raise ValueError(f"{type(request).__name__} is not a request to an engine")
        facts = self._cohort.fleet[request.engine]
        self._recorder.emit(
            request.fact,
            engine=facts.name,
            outcome=acknowledgement.outcome,
            detail=acknowledgement.detail[:500],
            request=request.seq,
            seconds=seconds,
            **_particulars(request, acknowledgement),
        )
        if not given_up and (consequence := self._after.get(type(request))) is not None:
            consequence(request, acknowledgement, facts)
        if acknowledgement.unreachable:
            self.fence(facts.name, Standing.LOST, acknowledgement.detail or "unreachable")

    # ------------------------------------------------------------------------------------------------------ standings

    def fence(self, name: str, standing: Standing, reason: str) -> None:
        """Take an engine out of service. A lost engine stays lost until a probe answers."""
        facts = self._cohort.fleet[name]
        if facts.standing is Standing.LOST and standing is Standing.STALE:
            return
        self._stand(facts, standing, reason)

    def found(self, name: str, reason: str) -> None:
        """Count a reachable engine as stale, also one that was lost."""
        self._stand(self._cohort.fleet[name], Standing.STALE, reason)

    def serve(self, name: str) -> None:
        """Put an engine into service."""
        self._stand(self._cohort.fleet[name], Standing.SERVING, "")

    def dirty(self, name: str, reason: str) -> None:
        """Count the engine's weights as partly written from here on."""
        if not self._cohort.fleet[name].dirty:
            if (publication := self._cohort.publication) is not None:
                publication.dirtied[name] = self._cohort.fleet[name].standing
            self._cohort.fleet.update(name, dirty=True)
            self._recorder.emit(e.EngineDirtied, engine=name)
        self.fence(name, Standing.STALE, reason)

    def unfit(self, name: str, reason: str) -> None:
        """Take an engine that holds the published version out of service until a publication has completed on it."""
        self._cohort.fleet.update(name, unfit=reason)
        self.fence(name, Standing.STALE, reason)

    def clean(self, name: str, reason: str) -> None:
        """Count the engine's weights as whole again."""
        if self._cohort.fleet[name].dirty:
            self._cohort.fleet.update(name, dirty=False)
            self._recorder.emit(e.EngineCleaned, engine=name, reason=reason)

    def settle_debt(self, name: str, settled: bool, reason: str) -> None:
        """Tell the world that a debt is matched, where it is."""
        if settled:
            self._recorder.emit(e.DebtSettled, engine=name, reason=reason)

    def _stand(self, facts: EngineFacts, standing: Standing, reason: str) -> None:
        self._cohort.fleet.update(facts.name, standing=standing, reason=reason)
        if facts.standing is not standing:
            self._recorder.emit(
                e.StandingChanged, engine=facts.name, before=facts.standing, after=standing, reason=reason[:500]
            )

    # --------------------------------------------------------------------------------------------------- consequences

    def _probed(self, _: e.ProbeEngine, ack: Acknowledgement, facts: EngineFacts) -> None:
        report = ack.report
        if not ack.done or report is None:
            self.fence(facts.name, Standing.LOST, ack.detail or "does not answer")
            return
        ledger = self._cohort.ledger
        # Of what the journal tells, a pause that it does not tell of is another's.
        met = facts.incarnation is not None and facts.name not in self._recalled
        self._recalled.discard(facts.name)
        if incarnation_changed(facts, report):
            met = False
            # A pause that the new process reports may be ours, sent after it was started and before anybody knew.
            forgotten = not report.paused and ledger.forget(facts.name)
            self.settle_debt(facts.name, forgotten, "the server process is a new one")
            facts = self._cohort.fleet.update(
                facts.name, session=False, touched=False, paused=None, idle=False, unfit=NEW_PROCESS
            )
            self.clean(facts.name, "the server process is a new one")
            self.fence(facts.name, Standing.STALE, NEW_PROCESS)
        if report.paused is False:
            self.settle_debt(facts.name, ledger.seen_running(facts.name), "a probe says that it runs")
        self._cohort.fleet.update(
            facts.name,
            incarnation=report.incarnation,
            version=version_of(self._cohort.run, report.label),
            paused=report.paused,
            idle=facts.idle and report.paused is not False,
            asleep=report.asleep,
            world_size=report.world_size,
        )
        if not facts.reachable and report.ready:
            self.found(facts.name, "it answers, and is not settled yet")
        if facts.serving and self._cohort.fleet[facts.name].version != self._cohort.version:
            self.fence(facts.name, Standing.STALE, f"does not hold version {self._cohort.version} any more")
        if report.whole is False:
            # A session may be open that this process did not open; the next publication closes it first.
            self._cohort.fleet.update(facts.name, session=True)
            self.dirty(facts.name, "an update is open or was left half-way")
        if report.paused and ledger.owed(facts.name) is None:
            self._take_on_pause(facts.name, report, met=met)

    def _take_on_pause(self, name: str, report: EngineReport, *, met: bool) -> None:
        """Make a pause that is not known to be ours a debt, as soon as a probe tells of it.

        In a process that this lifecycle had not met before, weights count as partly written unless something proves
        them: a killed trainer may have left it so. Of one that it had, it is known what was written to it.
        """
        cohort = self._cohort
        cohort.ledger.owe(name, mode=PauseMode.ABORT, epoch=cohort.epoch, certain=True)
        if not (met or report.whole or cohort.policy.trust_paused):
            self.dirty(name, "found paused, and nothing proves that its weights are whole")

    def _paused(self, _: e.PauseGeneration, ack: Acknowledgement, facts: EngineFacts) -> None:
        if ack.done:
            self._cohort.ledger.confirm(facts.name)
            self._cohort.fleet.update(facts.name, paused=ack.stopped, idle=bool(ack.idle))
        elif ack.outcome is Outcome.NOT_DONE:
            self.settle_debt(facts.name, self._cohort.ledger.cancel(facts.name), "the pause did not happen")

    def _continued(self, _: e.ContinueGeneration, ack: Acknowledgement, facts: EngineFacts) -> None:
        if ack.done:
            self._cohort.fleet.update(facts.name, paused=False, idle=False)
            self.settle_debt(facts.name, self._cohort.ledger.continued(facts.name), "continued")

    def _proven(self, request: e.ProvePaused, ack: Acknowledgement, facts: EngineFacts) -> None:
        if ack.done:
            if ack.stopped and self._cohort.ledger.owed(facts.name) is None:
                # A pause of before has landed after all: it has to be continued like any other.
                self._cohort.ledger.owe(facts.name, mode=request.mode, epoch=self._cohort.epoch, certain=True)
            self._cohort.fleet.update(facts.name, paused=ack.stopped, idle=bool(ack.idle))

    def _begun(self, _: e.BeginUpdate, ack: Acknowledgement, facts: EngineFacts) -> None:
        if (publication := self._cohort.publication) is None:
            return
        if ack.done:
            publication.opened.add(facts.name)
        elif ack.outcome is Outcome.NOT_DONE:
            # The session stays on record: one left open before is the likeliest reason, and abandoning closes it.
            self._restore(facts.name, "the update was not begun")

    def _transferred(self, _: e.TransferWeights, ack: Acknowledgement, facts: EngineFacts) -> None:
        if ack.untouched and not ack.done and self._cohort.publication and self._cohort.publication.sent == 1:
            self._cohort.fleet.update(facts.name, touched=False)

    def _finished(self, _: e.FinishUpdate, ack: Acknowledgement, facts: EngineFacts) -> None:
        if ack.done and self._cohort.publication is not None:
            self._cohort.publication.finished.add(facts.name)
            self._cohort.fleet.update(facts.name, session=False)

    def _verified(self, _: e.VerifyWeights, ack: Acknowledgement, facts: EngineFacts) -> None:
        if ack.done and self._cohort.publication is not None:
            self._cohort.publication.verified.add(facts.name)

    def _abandoned(self, _: e.AbandonUpdate, ack: Acknowledgement, facts: EngineFacts) -> None:
        if ack.done:
            self._cohort.fleet.update(facts.name, session=False)
            if ack.untouched and not facts.touched:
                self._restore(facts.name, "the update was closed before any weight was sent")

    def _restore(self, name: str, reason: str) -> None:
        """Give a member back what the publication took: it is untouched, so it stands as it stood before."""
        publication = self._cohort.publication
        if publication is None or name not in publication.dirtied:
            return
        self.clean(name, reason)
        stood = publication.dirtied.pop(name)
        facts = self._cohort.fleet[name]
        if stood is Standing.SERVING and facts.reachable and not facts.unfit:
            self.serve(name)


def _particulars(request: e.Request, ack: Acknowledgement) -> dict[str, Any]:
    """Return what this request's fact says beyond its outcome."""
    match request:
        case e.ProbeEngine() if ack.report is not None:
            report = ack.report
            return {
                "paused": report.paused,
                "whole": report.whole,
                "label": report.label,
                "incarnation": report.incarnation,
            }
        case e.PauseGeneration():
            return {"mode": request.mode, "stopped": ack.stopped, "idle": ack.idle}
        case e.ProvePaused():
            return {"stopped": ack.stopped, "idle": ack.idle}
        case e.TransferWeights():
            return {"index": request.index}
        case _:
            return {}
