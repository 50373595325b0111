"""Everything that guards and proofs may look at: the facts of one cohort, and what is intended with it."""

from attrs import define, field, frozen

from .fleet import Fleet
from .ledger import PauseLedger
from .staleness import StalenessBudget, Unlimited
from .states import PauseMode, Standing
from .values import Channel


def _known(_: object, __: object, value: str) -> None:
    if value not in {"fence", "fault"}:
        raise ValueError(f'on_engine_failure must be "fence" or "fault", got {value!r}')


def _min_engines(_: object, __: object, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"min_engines must be at least 1, got {value}: no engine at all is not agreement")


@frozen(kw_only=True)
class FleetPolicy:
    """How many engines make a fleet, and what to do about those that cannot be brought back."""

    min_engines: int | None = field(default=None, validator=_min_engines)
    """Fewer than this, and the lifecycle faults. `None`: all."""
    on_engine_failure: str = field(default="fence", validator=_known)
    """`"fence"`: go on without the engine while enough are left. `"fault"`: never go on without one."""
    canary: bool = True
    """Prove by a tiny generation that an engine generates after a publication, before anything is routed to it."""
    trust_paused: bool = False
    """Whether an engine found paused on attach counts as whole although nothing proves it. An engine that a killed
    trainer left in the middle of an update looks just the same, and continuing it serves half-written weights."""


@frozen(kw_only=True)
class Intent:
    """What the caller wants of a trigger."""

    mode: PauseMode | None = None
    """PAUSE_GENERATION: how to pause."""
    target: int | None = None
    """BEGIN_UPDATE: the version to publish."""
    resume: bool = True
    """FINISH_UPDATE: whether submission opens again."""


@define(kw_only=True)
class Publication:
    """One update of the cohort to one version, from BEGIN_UPDATE until it is finished or abandoned."""

    target: int
    label: str
    channel: Channel
    members: tuple[str, ...]
    dirtied: dict[str, Standing] = field(factory=dict)
    """Members whose weights were whole before, and how they stood: so they stand again if proven untouched."""
    opened: set[str] = field(factory=set)
    """Members whose session is open."""
    sent: int = 0
    """Buckets sent."""
    acknowledged: int = 0
    """Buckets that every member acknowledged."""
    complete: bool = False
    """The last bucket of the version was acknowledged."""
    nbytes: int = 0
    finished: set[str] = field(factory=set)
    verified: set[str] = field(factory=set)
    committed: bool = False


@define(kw_only=True)
class Cohort:
    """The engines that move through the machine in step, and what is known of them."""

    fleet: Fleet
    run: str = "run"
    """The lifecycle's name: the first half of every weight label."""
    name: str = "fleet"
    policy: FleetPolicy = field(factory=FleetPolicy)
    ledger: PauseLedger = field(factory=PauseLedger)
    budget: StalenessBudget = field(factory=Unlimited)
    version: int | None = None
    """The published version; `None` before the first."""
    epoch: int = 0
    submission_open: bool = False
    generation_held: bool = False
    pause_seconds: float = 0.0
    """For how long generation was held the last time."""
    mode: PauseMode = PauseMode.ABORT
    """Of the pause that stands or is being attempted."""
    publication: Publication | None = None

    @property
    def required(self) -> int:
        """How many engines make a fleet."""
        everyone = self.policy.min_engines is None or self.policy.on_engine_failure == "fault"
        return len(self.fleet) if everyone else min(self.policy.min_engines or 0, len(self.fleet))

    @property
    def members(self) -> tuple[str, ...]:
        """The engines of the publication that are still reachable; every reachable engine where there is none."""
        names = self.publication.members if self.publication else tuple(self.fleet)
        return tuple(name for name in names if self.fleet[name].reachable)
