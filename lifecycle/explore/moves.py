"""What can happen between two states: an operation of the lifecycle, or something outside it."""

from collections.abc import Awaitable, Callable, Iterator

import anyio
from attrs import frozen

from lifecycle.cohort import Intent
from lifecycle.errors import LifecycleError
from lifecycle.states import State, Trigger

from .oracle import Answers
from .stage import Stage
from .truth import Truth, continued_from_outside, pause_landed, restarted
from .world import Merged


@frozen(kw_only=True)
class Move:
    """An operation."""

    name: str
    trigger: Trigger | None
    """`None`: a whole publication."""
    intent: Intent
    faultless: bool = False
    """What faults do to it they do to another move alike."""

    def possible(self, stage: Stage) -> bool:
        """Whether it can begin in the state that `stage` is in."""
        if self.trigger is None:
            return stage.machine.state in _PUBLISHABLE
        publication = stage.cohort.publication
        if self.trigger is Trigger.TRANSFER and publication is not None and publication.complete:
            return False
        return stage.machine.can(self.trigger, self.intent)

    async def make(self, stage: Stage) -> str | None:
        """Carry it out, and CLOSE after it where somebody calls for that meanwhile. Returns how it ended.

        `None`: what comes of it is known from another run.

        Cancellation: as the oracle says; it is returned as an ending.
        """
        ending = await _ending(stage, lambda: self._work(stage))
        if stage.driver.closing and ending is not None and stage.machine.state is not State.CLOSED:
            stage.world.path.append("close")
            ending = await _ending(stage, lambda: stage.driver.run(Trigger.CLOSE, Intent(), transfer=stage.courier))
        return ending

    async def _work(self, stage: Stage) -> object:
        courier, publication = stage.courier, stage.cohort.publication
        if self.trigger is None:
            return await stage.publisher.publish(_NO_SOURCE, self.intent, courier, None)
        if self.trigger not in _PIECEMEAL:
            stage.publisher.forget_wish()
        bucket = courier.bucket(publication.sent) if self.trigger is Trigger.TRANSFER and publication else None
        return await stage.driver.run(self.trigger, self.intent, transfer=courier, bucket=bucket)


async def _ending(stage: Stage, work: Callable[[], Awaitable[object]]) -> str | None:
    """Return how `work` ends, and note where it must not end so."""
    try:
        await work()
    except Merged:
        return None
    except anyio.get_cancelled_exc_class():
        return None if stage.world.merged else "cancelled"
    except LifecycleError as error:
        ending = str(error)
    except Exception as error:  # noqa: BLE001 - it is told as a breach
        ending = repr(error)
        stage.world.breaches.append(f"only_declared_errors_are_raised: {ending}")
    else:
        ending = "done"
    if stage.world.cancelled:
        stage.world.breaches.append(f"who_is_cancelled_is_told: the caller was cancelled, and gets: {ending}")
    return ending


class _NoSource:
    """The weights that `Courier` does not look at."""

    def tensors(self) -> Iterator[tuple[str, object]]:
        """Yield nothing."""
        yield from ()


_NO_SOURCE = _NoSource()
_PUBLISHABLE = (State.RUNNING, State.SUSPENDED, State.PAUSED)
_PIECEMEAL = (Trigger.BEGIN_UPDATE, Trigger.TRANSFER)
"""What `Lifecycle` leaves a publication's wish to return alone at."""


def operations(stage: Stage, *, publish: bool) -> tuple[Move, ...]:
    """Return every operation with every intent that makes a difference."""
    usual = Intent(mode=stage.mode)
    simple = (
        Trigger.ATTACH,
        Trigger.RESUME,
        Trigger.SUSPEND,
        Trigger.PAUSE_GENERATION,
        Trigger.CONTINUE_GENERATION,
        Trigger.TRANSFER,
        Trigger.ABANDON_UPDATE,
        Trigger.RECOVER,
        Trigger.CLOSE,
    )
    whole = (
        Move(name="publish", trigger=None, intent=Intent(mode=stage.mode, target=2)),
        Move(name="publish, resume=False", trigger=None, intent=Intent(mode=stage.mode, target=2, resume=False)),
    )
    return (
        *(whole if publish else ()),
        *(Move(name=trigger.name, trigger=trigger, intent=usual) for trigger in simple),
        Move(name="BEGIN_UPDATE to the next version", trigger=Trigger.BEGIN_UPDATE, intent=Intent(target=2)),
        Move(name="BEGIN_UPDATE to the same version", trigger=Trigger.BEGIN_UPDATE, intent=Intent(target=1)),
        Move(name="FINISH_UPDATE", trigger=Trigger.FINISH_UPDATE, intent=Intent(resume=True)),
        Move(
            name="FINISH_UPDATE, resume=False",
            trigger=Trigger.FINISH_UPDATE,
            intent=Intent(resume=False),
            faultless=True,  # the requests are the same, but for the last, which waits for nothing
        ),
    )


@frozen(kw_only=True)
class Outside:
    """Something that happens to one engine, between operations."""

    name: str
    fault: int
    possible: Callable[[Truth], bool]
    change: Callable[[Truth, int], Truth]


OUTSIDE = (
    Outside(
        name="is started anew",
        fault=0,
        possible=lambda truth: not truth.alive,
        change=restarted,
    ),
    Outside(
        name="is paused by a pause that was under way",
        fault=0,
        possible=lambda truth: truth.alive and truth.pause_under_way and not truth.paused,
        change=lambda truth, _: pause_landed(truth),
    ),
    Outside(
        name="is continued by somebody else",
        fault=1,
        possible=lambda truth: truth.alive and truth.paused and truth.whole,
        change=lambda truth, _: continued_from_outside(truth),
    ),
)
"""A crash needs no place here: an engine that dies between two requests is not there for the second."""


def happenings(stage: Stage) -> Iterator[tuple[Outside, str]]:
    """Yield what can happen outside in the state that `stage` is in, with the engine."""
    truths = dict(stage.world.truths)
    for outside in OUTSIDE:
        yield from ((outside, name) for name, truth in truths.items() if outside.possible(truth))


@frozen
class Step:
    """How a state was come to from the one before it."""

    move: "Move | Outside"
    engine: str = ""
    answers: Answers = ()
