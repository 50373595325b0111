"""What is known about each engine, and where it stands. Synchronous; decides nothing by itself."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import evolve, frozen

from .states import Standing
from .values import EngineReport

NEW_PROCESS = "the server process is a new one, and its label proves nothing"
"""Why a restarted engine may not serve: our own request may have labelled it, in the belief that it was the old one."""


@frozen(kw_only=True)
class EngineFacts:
    """What is known about one engine. Immutable: a change is a new value."""

    name: str
    standing: Standing = Standing.LOST
    reason: str = "not attached yet"
    """Why it is fenced; empty while it serves."""
    incarnation: str | None = None
    version: int | None = None
    """The version of this run it holds; `None` when that is not known or it holds none of ours."""
    dirty: bool = False
    """Its weights may be partly written."""
    paused: bool | None = None
    """Its scheduler has stopped, as last reported or acknowledged; `None`: not known."""
    idle: bool = False
    """It has proven, since the pause that stands, that no request is left in it."""
    unfit: str = ""
    """Why it may not serve the version that it holds, until a publication has completed on it; empty where it may."""
    asleep: bool = False
    world_size: int = 1
    session: bool = False
    """A weight-update session was opened and is not known to be closed."""
    touched: bool = False
    """A transfer was sent within the open session, so that closing it cannot restore the old weights."""

    @property
    def reachable(self) -> bool:
        """Whether it takes part in operations."""
        return self.standing is not Standing.LOST

    @property
    def serving(self) -> bool:
        """Whether it counts as serving."""
        return self.standing is Standing.SERVING


class Fleet(Mapping[str, EngineFacts]):
    """The facts of every engine, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        listed = list(names)
        if len(set(listed)) != len(listed):
            raise ValueError(f"engine names must be unique, got {listed}")
        self._facts = {name: EngineFacts(name=name) for name in listed}

    def __getitem__(self, name: str) -> EngineFacts:
        return self._facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def update(self, name: str, **changes: Any) -> EngineFacts:
        """Replace the facts of `name` and return them."""
        facts = self._facts[name] = evolve(self._facts[name], **changes)
        return facts

    @property
    def reachable(self) -> tuple[EngineFacts, ...]:
        """Engines that are serving or stale."""
        return tuple(e for e in self._facts.values() if e.reachable)

    @property
    def serving(self) -> tuple[EngineFacts, ...]:
        """Engines that are serving."""
        return tuple(e for e in self._facts.values() if e.serving)


def label_of(run: str, version: int) -> str:
    """Return the label that engines carry: another run's 7 is not ours."""
    return f"{run}:{version}"


def version_of(run: str, label: str | None) -> int | None:
    """Return the version that `label` names in `run`; `None` when it names another run, a path, or nothing."""
    prefix, _, number = (label or "").rpartition(":")
    return int(number) if prefix == run and number.isdecimal() else None


def incarnation_changed(facts: EngineFacts, report: EngineReport) -> bool:
    """Whether the server process was started anew since it was last seen."""
    return None not in (facts.incarnation, report.incarnation) and facts.incarnation != report.incarnation
