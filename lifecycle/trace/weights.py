"""Weights: what engines hold, one version a publication, and nothing in service that may be partly written."""

from collections.abc import Callable, Mapping
from typing import Any

from lifecycle import events as e
from lifecycle.cohort import Intent, Publication
from lifecycle.fleet import label_of
from lifecycle.guards import version_advances
from lifecycle.states import Outcome, Standing, Trigger
from lifecycle.values import Channel

from .known import Known

_ENDS_PUBLICATION = {Trigger.BEGIN_UPDATE, Trigger.ABANDON_UPDATE, Trigger.RECOVER, Trigger.CLOSE}
"""Triggers that begin by closing whatever update is open."""


class Weights:
    """Replays publications and standings."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._proven: set[str] = set()
        """Engines that proved their pause in the transition at hand."""
        self._took: set[str] = set()
        """Engines that acknowledged the bucket at hand."""
        self._generated: set[str] = set()
        """Engines that answered the canary of the transition at hand."""
        self.rules: Mapping[type[e.Event], Callable[[Any], None]] = {
            e.EngineRecalled: self._recalled,
            e.PauseProven: self._pause_proven,
            e.BeginUpdate: self._begin,
            e.UpdateBegun: self._begun,
            e.TransferWeights: self._transfer,
            e.WeightsTransferred: self._transferred,
            e.FinishUpdate: self._finish,
            e.UpdateFinished: self._finished,
            e.VerifyWeights: self._verify,
            e.WeightsVerified: self._verified,
            e.VersionAdvanced: self._advanced,
            e.CacheFlushed: self._flushed,
            e.LabelVersion: self._label,
            e.VersionLabelled: self._labelled,
            e.CanaryAnswered: self._canary,
            e.UpdateAbandoned: self._abandoned,
            e.EngineDirtied: self._dirtied,
            e.EngineCleaned: self._cleaned,
            e.StandingChanged: self._stood,
        }

    def transition(self, event: e.Event) -> None:
        """Take in that a transition begins or ends."""
        cohort, publication = self._known.cohort, self._known.cohort.publication
        self._proven.clear()
        if isinstance(event, e.TransitionCommitted):
            for name in self._generated & {facts.name for facts in cohort.fleet.reachable if not facts.serving}:
                self._known.breach("standing", f"{name} generates the published version, and is not put into service")
        self._generated.clear()
        match event:
            case e.TransitionBegun(trigger=Trigger.TRANSFER) if publication is not None:
                publication.sent += 1
                self._took.clear()
            case e.TransitionCommitted(trigger=Trigger.TRANSFER) if publication is not None:
                everyone = self._took.issuperset(publication.members)
                publication.acknowledged += everyone
                publication.complete = everyone  # which bucket is the last is not on record
            case e.TransitionBegun(trigger=trigger) if trigger in _ENDS_PUBLICATION:
                cohort.publication = None
            case _:
                pass

    def _recalled(self, event: e.EngineRecalled) -> None:
        self._known.cohort.fleet.update(event.engine, dirty=event.dirty, session=event.dirty, unfit=event.unfit)

    # ------------------------------------------------------------------------------------------------ the publication

    def _pause_proven(self, event: e.PauseProven) -> None:
        if event.outcome is Outcome.DONE:
            cohort = self._known.cohort
            cohort.fleet.update(event.engine, paused=event.stopped, idle=bool(event.idle))
            if event.idle or (event.stopped and cohort.mode.keeps_requests):
                self._proven.add(event.engine)

    def _begin(self, event: e.BeginUpdate) -> None:
        known, cohort, name = self._known, self._known.cohort, str(event.engine)
        if name not in self._proven:
            known.breach(
                "stopped", f"an update begins in {name} without a proof in this transition that it stands still"
            )
        if cohort.publication is None:
            known.demand(version_advances, "an update begins", Intent(target=event.target))
            cohort.publication = Publication(
                target=event.target, label=event.label, channel=Channel(kind=event.kind, name=""), members=()
            )
        cohort.publication.members += (name,)
        cohort.fleet.update(name, session=True)
        self._of_publication(event)

    def _begun(self, event: e.UpdateBegun) -> None:
        if event.outcome is Outcome.DONE and (publication := self._known.cohort.publication) is not None:
            publication.opened.add(event.engine)

    def _transfer(self, event: e.TransferWeights) -> None:
        self._of_publication(event)
        publication = self._known.cohort.publication
        if publication is not None and event.engine not in publication.opened:
            self._known.breach("session-open", f"weights go to {event.engine}, which opened no update session")

    def _transferred(self, event: e.WeightsTransferred) -> None:
        if not self._known.cohort.fleet[event.engine].dirty:
            self._known.breach("dirty", f"weights were sent to {event.engine}, and nothing says that they are at risk")
        if event.outcome is Outcome.DONE:
            self._took.add(event.engine)

    def _finish(self, event: e.FinishUpdate) -> None:
        self._of_publication(event)

    def _finished(self, event: e.UpdateFinished) -> None:
        if event.outcome is Outcome.DONE and (publication := self._known.cohort.publication) is not None:
            publication.finished.add(event.engine)
            self._known.cohort.fleet.update(event.engine, session=False)

    def _verify(self, event: e.VerifyWeights) -> None:
        self._of_publication(event)
        publication = self._known.cohort.publication
        if publication is not None and event.engine not in publication.finished:
            self._known.breach("legal-order", f"{event.engine} is verified without having finished")

    def _verified(self, event: e.WeightsVerified) -> None:
        if event.outcome is Outcome.DONE and (publication := self._known.cohort.publication) is not None:
            publication.verified.add(event.engine)

    def _of_publication(self, event: e.BeginUpdate | e.TransferWeights | e.FinishUpdate | e.VerifyWeights) -> None:
        publication, run = self._known.cohort.publication, self._known.cohort.run
        what = f"{type(event).__name__} to {event.engine}"
        if publication is None or event.engine not in publication.members:
            self._known.breach("session-open", f"{what}, which takes part in no update")
        elif event.target != publication.target:
            self._known.breach("version-monotonic", f"{what} of version {event.target} within {publication.target}")
        if event.label != label_of(run, event.target):
            self._known.breach("label", f"{what} labels version {event.target} as {event.label}")

    def _advanced(self, event: e.VersionAdvanced) -> None:
        known, cohort, version = self._known, self._known.cohort, event.version
        publication, previous = cohort.publication, cohort.version
        verified = publication.verified if publication is not None else set()
        if len(verified) < cohort.required:
            known.breach("verified-before-commit", f"{len(verified)} of {cohort.required} engines proved the version")
        if event.previous != previous:
            known.breach("version-monotonic", f"it advances from {event.previous} although {previous} is published")
        if version is None or (previous is not None and version < previous):
            known.breach("version-monotonic", f"version {version} goes back from {previous}")
        elif publication is not None and version != publication.target:
            known.breach("version-monotonic", f"version {version} advances in the update to {publication.target}")
        for name in verified:
            cohort.fleet.update(name, version=version, unfit="")
        cohort.version, cohort.publication = version, None
        self._advance_budget(event)

    def _advance_budget(self, event: e.VersionAdvanced) -> None:
        budget = self._known.cohort.budget
        if event.version is None or event.version < 0:
            return
        if event.previous is None:
            budget.restore(event.version)
        elif event.version >= budget.version and (event.consumed is None or event.consumed >= 0):
            budget.advance(event.version, event.consumed)
        else:
            self._known.breach("version-monotonic", f"{event.consumed} rollouts cannot be consumed by {event.version}")

    # --------------------------------------------------------------------------------------------- what engines hold

    def _flushed(self, event: e.CacheFlushed) -> None:
        # Requests that a pause keeps may hold on to their cache.
        if not self._known.cohort.mode.keeps_requests:
            self._must_succeed(event)

    def _label(self, event: e.LabelVersion) -> None:
        cohort = self._known.cohort
        if event.label != label_of(cohort.run, cohort.version or 0):
            self._known.breach("label", f"{event.engine} is labelled {event.label} at version {cohort.version}")

    def _labelled(self, event: e.VersionLabelled) -> None:
        if self._known.trigger is not Trigger.ATTACH:
            self._must_succeed(event)
        elif event.outcome is Outcome.DONE:
            # Whole, and labelled by no run: the user's word counts for what it holds.
            self._known.cohort.fleet.update(event.engine, version=self._known.cohort.version, unfit="")

    def _canary(self, event: e.CanaryAnswered) -> None:
        self._must_succeed(event)
        if event.outcome is Outcome.DONE:
            self._generated.add(event.engine)

    def _must_succeed(self, event: e.EngineFact) -> None:
        fleet, kind = self._known.cohort.fleet, type(event).__name__
        if event.outcome is not Outcome.DONE:
            fleet.update(event.engine, unfit=f"{kind} {event.outcome.value}")
        elif fleet[event.engine].unfit.startswith(kind):
            fleet.update(event.engine, unfit="")  # interrupted by a cancellation, and done again

    def _abandoned(self, event: e.UpdateAbandoned) -> None:
        if event.outcome is Outcome.DONE:
            self._known.cohort.fleet.update(event.engine, session=False)

    def _dirtied(self, event: e.EngineDirtied) -> None:
        if self._known.cohort.fleet[event.engine].dirty:
            self._known.breach("dirty", f"{event.engine} may be partly written already")
        self._known.cohort.fleet.update(event.engine, dirty=True)

    def _cleaned(self, event: e.EngineCleaned) -> None:
        if not self._known.cohort.fleet[event.engine].dirty:
            self._known.breach("dirty", f"{event.engine} is whole already")
        self._known.cohort.fleet.update(event.engine, dirty=False)

    def _stood(self, event: e.StandingChanged) -> None:
        known, cohort = self._known, self._known.cohort
        facts = cohort.fleet[event.engine]
        if event.before is not facts.standing:
            known.breach("standing", f"{event.engine} is {facts.standing.name}, not {event.before.name}")
        cohort.fleet.update(event.engine, standing=event.after, reason=event.reason)
        if event.after is not Standing.SERVING:
            return
        if facts.dirty:
            known.breach("dirty-never-serves", f"{event.engine} serves although it may be partly written")
        if cohort.version is None or facts.version != cohort.version:
            known.breach("versions-agree", f"{event.engine} serves version {facts.version} at {cohort.version}")
        if facts.unfit:
            known.breach("fit-to-serve", f"{event.engine} serves although it failed: {facts.unfit}")
