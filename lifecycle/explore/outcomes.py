"""What can become of one request at one engine, and what of it is worth trying.

An alternative is left out where nothing can tell it from another that is tried: neither the lifecycle, by the reply,
nor a predicate, by what the engine then is.
"""

from enum import Enum

from attrs import evolve

from lifecycle import events as e
from lifecycle.states import Outcome
from lifecycle.values import Acknowledgement

from .truth import DONE, NO_REPLY, UNREACHABLE, Truth, act, crashed, pause_landed, restarted


class Happening(Enum):
    """What becomes of a request. The value completes the sentence "PauseGeneration at E1: ..."."""

    DONE = "done"
    LOST = "done, and the reply is lost"
    VANISHED = "neither done nor answered"
    LATE = "no reply, and not done yet"
    REFUSED = "refused"
    CLAIMED = "acknowledged, and not done"
    BUSY = "done, and a request is left in the engine"
    GONE = "nobody is there"
    DIED = "the engine dies of it"
    RESTARTED = "answered by a process that was started anew"
    LANDED = "done, after a pause that was under way has landed"

    @property
    def fault(self) -> int:
        """How many faults it takes."""
        return 0 if self in {Happening.DONE, Happening.LANDED} else 1


_H = Happening
ALTERNATIVES: dict[type[e.Request], tuple[Happening, ...]] = {
    e.ProbeEngine: (_H.VANISHED, _H.GONE, _H.RESTARTED),
    e.AbortGeneration: (),
    e.PauseGeneration: (_H.LOST, _H.VANISHED, _H.LATE, _H.REFUSED, _H.BUSY, _H.GONE, _H.RESTARTED),
    e.ProvePaused: (_H.VANISHED, _H.GONE, _H.RESTARTED),
    e.ContinueGeneration: (_H.LOST, _H.VANISHED, _H.REFUSED, _H.GONE, _H.RESTARTED),
    e.OpenTransfer: (),
    e.BeginUpdate: (_H.LOST, _H.VANISHED, _H.REFUSED, _H.GONE, _H.RESTARTED),
    e.TransferWeights: (_H.LOST, _H.VANISHED, _H.REFUSED, _H.GONE, _H.RESTARTED),
    e.FinishUpdate: (_H.LOST, _H.VANISHED, _H.CLAIMED, _H.GONE, _H.DIED, _H.RESTARTED),
    e.VerifyWeights: (_H.VANISHED, _H.GONE, _H.RESTARTED),
    e.FlushCache: (_H.VANISHED, _H.GONE),
    e.LabelVersion: (_H.LOST, _H.VANISHED, _H.GONE, _H.RESTARTED),
    e.Canary: (_H.VANISHED, _H.GONE),
    e.AbandonUpdate: (_H.LOST, _H.VANISHED, _H.GONE, _H.RESTARTED),
    e.CloseTransfer: (),
}
"""By kind of request: what is tried besides `DONE`.

Who dies, or is started anew, before a request that changes nothing is found so by the next one. A collective that fails
at an engine is one whose other half, the trainer's, fails.
"""

GIVEN_UP: dict[type[e.Request], tuple[Happening, ...]] = {
    kind: (_H.DONE, *(way for way in (_H.LOST, _H.VANISHED, _H.LATE) if way in alternatives))
    for kind, alternatives in ALTERNATIVES.items()
}
"""The same for a request whose caller is cancelled meanwhile. `DONE`: the reply was there before."""

_TELLS_A_LANDING = (e.ProbeEngine, e.Canary)
_REFUSED = Acknowledgement(outcome=Outcome.NOT_DONE, detail="refused", untouched=True)


_LIVING = {kind: (_H.DONE, *alternatives) for kind, alternatives in ALTERNATIVES.items()}
_LANDING = {kind: (*_LIVING[kind], _H.LANDED) for kind in _TELLS_A_LANDING}
_DEAD = (_H.GONE,)


def possible(kind: type[e.Request], truth: Truth, *, cancelled: bool) -> tuple[Happening, ...]:
    """Return what may become of a request of `kind`, what is usual first."""
    if not truth.alive:
        return _DEAD
    if cancelled:
        return GIVEN_UP[kind]
    if truth.pause_under_way and not truth.paused and kind in _LANDING:
        return _LANDING[kind]
    return _LIVING[kind]


def befall(
    truth: Truth, request: e.Request, happening: Happening, *, base: int, at_risk_from_begin: bool
) -> tuple[Truth, Acknowledgement]:
    """Return what the engine then is, and what is known of it."""
    match happening:
        case _H.VANISHED:
            return truth, NO_REPLY
        case _H.LATE:
            return evolve(truth, pause_under_way=True), NO_REPLY
        case _H.REFUSED:
            return truth, _REFUSED
        case _H.CLAIMED:
            return evolve(truth, session=False, received=0, last=False), DONE
        case _H.GONE | _H.DIED:
            return crashed(truth), UNREACHABLE if happening is _H.GONE else NO_REPLY
    after, acknowledgement = act(_before(truth, happening, base), request, at_risk_from_begin=at_risk_from_begin)
    if happening is _H.LOST:
        # Nobody has read what it would have told.
        return evolve(after, untold=truth.untold), NO_REPLY
    return after, evolve(acknowledgement, idle=False) if happening is _H.BUSY else acknowledgement


def _before(truth: Truth, happening: Happening, base: int) -> Truth:
    """Return what the engine is when the request reaches it."""
    if happening is _H.RESTARTED:
        return restarted(truth, base)
    return pause_landed(truth) if happening is _H.LANDED else truth
