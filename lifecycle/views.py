"""What users look at: engines as they stand, and what a publication did."""

from typing import SupportsIndex, overload

from attrs import frozen

from .cohort import Cohort
from .ledger import Debt
from .states import Standing, State


@frozen(kw_only=True)
class EngineView:
    """One engine as it stands now."""

    name: str
    standing: Standing
    version: int | None
    debt: Debt | None
    """Its pause that no continue has matched yet."""
    dirty: bool
    """Its weights may be partly written: it is not continued until a publication has completed on it."""
    reason: str
    """Why it is fenced; empty while it serves."""
    paused: bool | None
    """As last heard; `None`: not known."""
    incarnation: str | None


class Engines(tuple[EngineView, ...]):
    """The fleet's engines in the order they were given; also found by name."""

    __slots__ = ()

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> EngineView: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[EngineView, ...]: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> EngineView | tuple[EngineView, ...]:
        """Return an engine by position or name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        for view in self:
            if view.name == key:
                return view
        raise KeyError(key)


@frozen(kw_only=True)
class PublishReport:
    """What a publication did."""

    version: int
    previous: int | None
    engines: tuple[str, ...]
    """Engines that serve the version."""
    fenced: dict[str, str]
    """Engines that do not, and why."""
    failures: tuple[Exception, ...]
    """What went wrong at engines that were fenced meanwhile."""
    buckets: int
    nbytes: int
    pause_seconds: float
    """For how long generation was held: the pause as rollouts feel it."""
    transfer_seconds: float
    """The buckets alone."""
    interrupted: int
    """Generation requests in flight when the publication began."""
    state: State


def engines_of(cohort: Cohort) -> Engines:
    """Return the cohort's engines as they stand now."""
    return Engines(
        EngineView(
            name=facts.name,
            standing=facts.standing,
            version=facts.version,
            debt=cohort.ledger.owed(facts.name),
            dirty=facts.dirty,
            reason=facts.reason,
            paused=facts.paused,
            incarnation=facts.incarnation,
        )
        for facts in cohort.fleet.values()
    )
