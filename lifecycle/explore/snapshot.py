"""States as values: everything that decides what can happen next, and nothing else.

Left out, or brought to a normal form, is what no decision looks at: reasons in words, epochs, numbers of processes and
channels, times. Versions count from the published one, which is 1; older ones are 0. Engines are alike, so that their
order does not matter.
"""

from typing import Any

from attrs import evolve, field, frozen

from lifecycle.cohort import Publication
from lifecycle.fleet import EngineFacts
from lifecycle.ledger import Debt
from lifecycle.states import PauseMode, Standing, State

from .truth import Truth

Key = tuple[int, ...]
"""A state: the numbers of its engines, in order, and of what they share."""


@frozen(kw_only=True)
class Part:
    """An engine's part in the publication that is open."""

    member: bool = False
    dirtied: Standing | None = None
    opened: bool = False
    finished: bool = False
    verified: bool = False
    in_channel: bool = False
    """It is of the channel that stands."""
    in_its_channel: bool = False
    """It is of the publication's channel."""
    in_cut_channel: bool = False
    """It is of a channel that was cut, and has yet to leave it."""


@frozen(kw_only=True)
class Engine:
    """One engine: what is known of it, what it owes, and what it is."""

    facts: EngineFacts
    debt: Debt | None
    part: Part
    truth: Truth


@frozen(kw_only=True)
class Progress:
    """The publication that is open."""

    target: int
    sent: int
    acknowledged: int
    complete: bool
    channel_stands: bool
    channel_joined: bool


@frozen(kw_only=True)
class Shared:
    """What is not of one engine."""

    state: State = State.CLOSED
    submission_open: bool = False
    generation_held: bool = False
    mode: PauseMode = PauseMode.ABORT
    progress: Progress | None = None
    moving: bool = False
    stands: bool = False
    """A channel is whole."""
    joined: bool = False
    """Its members have joined it."""
    wanted: State | None = None
    """Where a publication that failed wanted to return."""


def normal(engine: Engine, older: int, *, resting: bool) -> Engine:
    """Return the engine without what no decision looks at.

    `older`: by how much its versions have to be lowered. `resting`: between operations.
    """
    facts, truth, debt = engine.facts, engine.truth, engine.debt
    lost = facts.standing is Standing.LOST  # a probe comes before anything else, and says version and pause
    known = facts.incarnation if facts.incarnation is None else str(int(facts.incarnation == str(truth.incarnation)))
    return evolve(
        engine,
        facts=evolve(
            facts,
            name="",
            reason="fenced" if facts.reason else "",
            unfit="unfit" if facts.unfit else "",
            # Who comes back from the dead is a new process, whichever was known before.
            incarnation=known if truth.alive or known is None else "0",
            version=None if lost else _lower(facts.version, older),
            paused=None if lost else facts.paused,
            touched=facts.touched and engine.part.member,
        ),
        # What is renewed counts only while it is not known whether the pause happened.
        debt=None if debt is None else evolve(debt, engine="", epoch=0, renewed=debt.renewed and not debt.certain),
        truth=_normal_truth(truth, older, resting=resting) if truth.alive else _DEAD,
    )


def _normal_truth(truth: Truth, older: int, *, resting: bool) -> Truth:
    return evolve(
        truth,
        incarnation=1,
        untold=min(truth.untold, 1) if resting else truth.untold,
        # Of weights that are partly written nobody asks any more which they were.
        holds=_lower(truth.holds, older) or 0 if truth.whole else 0,
        old_cache=truth.old_cache and truth.whole,
        label=_lower(truth.label, older),
    )


_DEAD = Truth(alive=False, holds=0)


def _lower(version: int | None, older: int) -> int | None:
    return None if version is None else max(0, version - older)


@frozen
class Numbers:
    """Gives every value a number, so that states are small. Equal values have the same."""

    _numbers: dict[Any, int] = field(factory=dict)
    _values: list[Any] = field(factory=list)

    def of(self, value: Any) -> int:
        """Return the number of `value`."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._values)
            self._values.append(value)
        return number

    def value(self, number: int) -> Any:
        """Return what has `number`."""
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)


def part_of(publication: Publication | None, name: str, *, standing: bool, cut: bool) -> Part:
    """Return the part of engine `name`, which may be of the channel that stands, and of one that was cut."""
    if publication is None:
        return Part(in_channel=standing, in_cut_channel=cut) if standing or cut else _APART
    return Part(
        member=name in publication.members,
        dirtied=publication.dirtied.get(name),
        opened=name in publication.opened,
        finished=name in publication.finished,
        verified=name in publication.verified,
        in_channel=standing,
        in_its_channel=name in publication.channel.rank_offsets,
        in_cut_channel=cut,
    )


_APART = Part()
