"""What the replay knows at one point of a trace: the part of it that all rules share."""

from attrs import define, field

from lifecycle import events as e
from lifecycle.cohort import Cohort, FleetPolicy, Intent
from lifecycle.fleet import Fleet
from lifecycle.guards import Condition
from lifecycle.staleness import StalenessBudget, Unlimited
from lifecycle.states import State, Trigger

from .verdict import Verdict, Violation


@define(kw_only=True)
class Known:
    """A lifecycle, worked out from its events. The cohort is made of the same parts as the real one."""

    verdict: Verdict = field(factory=Verdict)
    line: int = 0
    state: State = State.CLOSED
    trigger: Trigger | None = None
    """What is being attempted."""
    cohort: Cohort = field(factory=lambda: Cohort(fleet=Fleet(())))

    def breach(self, rule: str, message: str) -> None:
        """Report that the line at hand breaks a rule."""
        self.verdict.violations.append(Violation(self.line, rule, message))

    def ask(self, condition: Condition, intent: Intent | None = None) -> str | None:
        """Return why a guard or proof refuses what is known, or `None`."""
        return condition(self.cohort, intent or Intent())

    def demand(self, condition: Condition, what: str, intent: Intent | None = None) -> bool:
        """Report a guard or proof that refuses. Returns whether it holds."""
        if (reason := self.ask(condition, intent)) is None:
            return True
        self.breach(rule_of(condition), f"{what} although {reason}")
        return False

    def is_known(self, engine: str) -> bool:
        """Whether `engine` is of the fleet; reported where it is not."""
        if engine in self.cohort.fleet:
            return True
        self.breach("known-engine", f"{engine} is not in the fleet")
        return False

    def begin_anew(self, event: e.LifecycleOpened) -> None:
        """Forget everything but the verdict: another lifecycle begins."""
        names = dict.fromkeys(event.engines)
        # Whether it is strict is not on record. Where all are required it may be, so that FAULT comes earlier.
        strict = event.min_engines >= len(names)
        self.state, self.trigger = State.CLOSED, None
        self.cohort = Cohort(
            fleet=Fleet(names),
            run=event.name,
            policy=FleetPolicy(min_engines=max(1, event.min_engines), on_engine_failure="fault" if strict else "fence"),
            budget=_budget(event),
            version=event.version,
            epoch=event.epoch,
        )


def rule_of(condition: Condition) -> str:
    """Return the name of the rule that a guard or proof stands for."""
    return condition.__name__.replace("_", "-")


def _budget(event: e.LifecycleOpened) -> StalenessBudget:
    if event.batch_size is None or event.max_staleness is None:
        return Unlimited()
    budget = StalenessBudget(
        batch_size=event.batch_size,
        max_staleness=event.max_staleness,
        max_concurrent=event.max_concurrent,
        version=event.version or 0,
        accepted=max(0, event.accepted),
        on_stale=event.on_stale,
        measured_from=event.measured_from,
    )
    if event.accepted < 0:  # more was consumed than a batch a version
        budget.discard(-event.accepted)
    return budget
