"""Who owes a continue. A pause that is done or unknown is a debt until a continue matches it."""

from attrs import evolve, frozen

from .states import PauseMode


@frozen(kw_only=True)
class Debt:
    """One engine's unmatched pause."""

    engine: str
    mode: PauseMode
    epoch: int
    certain: bool = False
    """The engine acknowledged the pause. Otherwise it may have happened, and may still happen."""
    continued: bool = False
    """A continue was acknowledged, but the pause is uncertain: a later probe must say that the engine runs."""
    renewed: bool = False
    """A pause before this one is not matched either: it stands even if this one provably did not happen."""


class PauseLedger:
    """The debts of a fleet. At most one an engine: servers do not count pauses, and one continue undoes any number."""

    def __init__(self) -> None:
        self._debts: dict[str, Debt] = {}
        self.pauses = 0
        """Debts ever opened."""
        self.matched = 0
        """Debts ever settled by a continue, ours or one that a probe saw."""

    def owe(self, engine: str, *, mode: PauseMode, epoch: int, certain: bool = False) -> Debt:
        """Open a debt before a pause is sent, or renew the one that is open."""
        renewed = engine in self._debts
        if not renewed:
            self.pauses += 1
        debt = self._debts[engine] = Debt(engine=engine, mode=mode, epoch=epoch, certain=certain, renewed=renewed)
        return debt

    def restore(self, debt: Debt) -> None:
        """Take over a debt that a lifecycle before has left."""
        if debt.engine not in self._debts:
            self.pauses += 1
        self._debts[debt.engine] = debt

    def confirm(self, engine: str) -> None:
        """Record that the engine acknowledged its pause."""
        if engine in self._debts:
            self._debts[engine] = evolve(self._debts[engine], certain=True, continued=False)

    def cancel(self, engine: str) -> bool:
        """Drop a debt whose pause provably did not happen. Returns whether it is gone.

        A certain one stays, and so does one that renewed another: the pause before it may have landed.
        """
        debt = self._debts.get(engine)
        if debt is None or debt.certain or debt.renewed:
            return False
        del self._debts[engine]
        self.pauses -= 1
        return True

    def continued(self, engine: str) -> bool:
        """Record an acknowledged continue. Returns whether that settles the debt; an uncertain one awaits a probe."""
        debt = self._debts.get(engine)
        if debt is None:
            return False
        if not debt.certain:
            self._debts[engine] = evolve(debt, continued=True)
            return False
        return self._settle(engine)

    def seen_running(self, engine: str) -> bool:
        """Record a probe that says the engine runs. Returns whether that settles its debt.

        A certain pause is over, whoever continued it. An uncertain one may still land unless a continue was
        acknowledged since.
        """
        debt = self._debts.get(engine)
        if debt is None or not (debt.certain or debt.continued):
            return False
        return self._settle(engine)

    def forget(self, engine: str) -> bool:
        """Drop the debt of a server process that is no more. Returns whether there was one."""
        return engine in self._debts and self._settle(engine)

    def owed(self, engine: str) -> Debt | None:
        """Return the engine's debt, if it has one."""
        return self._debts.get(engine)

    @property
    def outstanding(self) -> tuple[Debt, ...]:
        """Every open debt, oldest first."""
        return tuple(self._debts.values())

    def _settle(self, engine: str) -> bool:
        del self._debts[engine]
        self.matched += 1
        return True
