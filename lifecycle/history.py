"""What a journal tells of each engine: who was left paused, and whose weights may be partly written.

Folded from events, one after another, so that whoever comes after a killed trainer knows what it knew: the next
lifecycle with the same journal, and the tools that release engines in its place.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from attrs import define, evolve, field, frozen

from . import events as e
from .fleet import NEW_PROCESS
from .ledger import Debt, PauseLedger
from .states import Outcome, PauseMode

_NOT_FLUSHED = "it may serve caches of old weights"


@frozen(kw_only=True)
class Remembered:
    """What is known of one engine at the end of a journal."""

    incarnation: str | None = None
    """Of the process that it was; about another one nothing is known."""
    label: str | None = None
    """The weight version that it was labelled with when it was last probed."""
    dirty: bool = False
    """Its weights may be partly written."""
    unfit: str = ""
    """Why it may not serve the version that it holds; empty where it may."""
    debt: Debt | None = None
    """Its pause that no continue has matched."""


@define
class History:
    """Everything of a journal that outlives its process."""

    run: str = ""
    """Name of the lifecycle that wrote last."""
    version: int | None = None
    """The version that it had published."""
    closed: bool = True
    """It ended by CLOSE, and was not killed."""
    addresses: dict[str, str] = field(factory=dict)
    """Where the engines that have an address are, by name."""
    _engines: dict[str, Remembered] = field(factory=dict)
    _ledger: PauseLedger = field(factory=PauseLedger)
    _verified: set[str] = field(factory=set)
    _keeps: bool = False

    @classmethod
    def of(cls, events: Iterable[e.Event]) -> Self:
        """Fold `events`, oldest first."""
        history = cls()
        for event in events:
            history.note(event)
        return history

    @property
    def engines(self) -> Mapping[str, Remembered]:
        """What is known of every engine that was ever part of the fleet, by name."""
        return {name: evolve(known, debt=self._ledger.owed(name)) for name, known in self._engines.items()}

    def note(self, event: e.Event) -> None:
        """Take in the next event."""
        self.version = event.version
        if (consequence := self._consequences.get(type(event))) is not None:
            consequence(self, event)

    def _change(self, name: str, **changes: Any) -> None:
        self._engines[name] = evolve(self._engines.get(name, Remembered()), **changes)

    def _opened(self, event: e.LifecycleOpened) -> None:
        self.run, self.closed = event.name, False
        self._verified.clear()
        for name, address in zip(event.engines, event.addresses or ("",) * len(event.engines), strict=False):
            self._change(name)
            if address:
                self.addresses[name] = address

    def _committed(self, event: e.TransitionCommitted) -> None:
        self.closed = event.target.name == "CLOSED"

    def _probed(self, event: e.EngineProbed) -> None:
        if event.outcome is not Outcome.DONE:
            return
        before = self._engines.get(event.engine, Remembered()).incarnation
        if None not in {before, event.incarnation} and before != event.incarnation:
            if not event.paused:
                self._ledger.forget(event.engine)
            self._engines[event.engine] = Remembered(unfit=NEW_PROCESS)
        if event.paused is False:
            self._ledger.seen_running(event.engine)
        elif event.paused and self._ledger.owed(event.engine) is None:
            self._ledger.owe(event.engine, mode=PauseMode.ABORT, epoch=event.epoch, certain=True)
        self._change(event.engine, incarnation=event.incarnation, label=event.label)

    def _pausing(self, event: e.PauseGeneration) -> None:
        self._ledger.owe(str(event.engine), mode=event.mode, epoch=event.epoch)

    def _paused(self, event: e.EnginePaused) -> None:
        if event.outcome is Outcome.DONE:
            self._ledger.confirm(event.engine)
        elif event.outcome is Outcome.NOT_DONE:
            self._ledger.cancel(event.engine)

    def _proven(self, event: e.PauseProven) -> None:
        if event.outcome is Outcome.DONE and event.stopped and self._ledger.owed(event.engine) is None:
            self._ledger.owe(event.engine, mode=PauseMode.ABORT, epoch=event.epoch, certain=True)

    def _continued(self, event: e.EngineContinued) -> None:
        if event.outcome is Outcome.DONE:
            self._ledger.continued(event.engine)

    def _settled(self, event: e.DebtSettled) -> None:
        self._ledger.forget(event.engine)

    def _dirtied(self, event: e.EngineDirtied) -> None:
        self._change(event.engine, dirty=True)

    def _cleaned(self, event: e.EngineCleaned) -> None:
        self._change(event.engine, dirty=False)

    def _begins(self, _: e.BeginUpdate) -> None:
        self._verified.clear()

    def _was_verified(self, event: e.WeightsVerified) -> None:
        if event.outcome is Outcome.DONE:
            self._verified.add(event.engine)

    def _advanced(self, _: e.VersionAdvanced) -> None:
        # That each of them is clean is said right after this, and then they flush: it may not have come to that.
        for name in self._verified:
            self._change(name, dirty=False, unfit=_NOT_FLUSHED)

    def _flushing(self, event: e.FlushCache) -> None:
        self._keeps = event.mode.keeps_requests

    def _flushed(self, event: e.CacheFlushed) -> None:
        if event.outcome is Outcome.DONE or self._keeps:  # kept requests may hold on to their cache
            self._fit_again(event.engine, _NOT_FLUSHED)

    def _labelled(self, event: e.VersionLabelled) -> None:
        if event.outcome is Outcome.DONE:
            self._fit_again(event.engine, NEW_PROCESS)  # by ATTACH, on the user's word
        self._unless_done(event, "it may label its tokens with another version")

    def _canary(self, event: e.CanaryAnswered) -> None:
        self._unless_done(event, "it did not generate after its last publication")

    def _fit_again(self, name: str, reason: str) -> None:
        if self._engines.get(name, Remembered()).unfit == reason:
            self._change(name, unfit="")

    def _unless_done(self, event: e.EngineFact, reason: str) -> None:
        if event.outcome is not Outcome.DONE:
            self._change(event.engine, unfit=reason)

    def _recalled(self, event: e.EngineRecalled) -> None:
        self._change(event.engine, incarnation=event.incarnation, dirty=event.dirty, unfit=event.unfit)
        if event.debt is None:
            self._ledger.forget(event.engine)
        else:
            self._ledger.restore(debt_of(event))

    _consequences: ClassVar[Mapping[type[e.Event], Callable[[Any, Any], None]]] = {
        e.LifecycleOpened: _opened,
        e.TransitionCommitted: _committed,
        e.EngineRecalled: _recalled,
        e.EngineProbed: _probed,
        e.PauseGeneration: _pausing,
        e.EnginePaused: _paused,
        e.PauseProven: _proven,
        e.EngineContinued: _continued,
        e.DebtSettled: _settled,
        e.EngineDirtied: _dirtied,
        e.EngineCleaned: _cleaned,
        e.BeginUpdate: _begins,
        e.WeightsVerified: _was_verified,
        e.VersionAdvanced: _advanced,
        e.FlushCache: _flushing,
        e.CacheFlushed: _flushed,
        e.VersionLabelled: _labelled,
        e.CanaryAnswered: _canary,
    }


def debt_of(event: e.EngineRecalled) -> Debt:
    """Return the debt that an engine is recalled with. Raises `ValueError` where it has none."""
    if event.debt is None:
        raise ValueError(f"{event.engine} is recalled without a debt")
    return Debt(
        engine=event.engine, mode=event.debt, epoch=event.epoch, certain=event.certain, continued=event.continued
    )
