"""The true engine: what a server is in fact, whatever the lifecycle believes of it. Pure values and functions.

It has the semantics of `lifecycle.testing.ScriptedEngine`, which tests compare it with.
"""

from collections.abc import Callable
from typing import Any

from attrs import evolve, frozen

from lifecycle import events as e
from lifecycle.fleet import label_of
from lifecycle.states import Outcome
from lifecycle.values import Acknowledgement, EngineReport

RUN = "run"

DONE = Acknowledgement(outcome=Outcome.DONE)
NO_REPLY = Acknowledgement(outcome=Outcome.UNKNOWN, detail="no reply")
UNREACHABLE = Acknowledgement(outcome=Outcome.NOT_DONE, detail="connection refused", unreachable=True)
_NOTHING_OPEN = Acknowledgement(outcome=Outcome.NOT_DONE, detail="no session is open")
_NOTHING_WRITTEN = Acknowledgement(outcome=Outcome.NOT_DONE, detail="no session is open", untouched=True)
_OPEN_ALREADY = Acknowledgement(outcome=Outcome.NOT_DONE, detail="a session is already open")


@frozen(kw_only=True)
class Truth:
    """One server. Versions are those of the lifecycle: the published one is 1, unless a publication is under way."""

    alive: bool = True
    incarnation: int = 1
    paused: bool = False
    whole: bool = True
    holds: int = 1
    """The version whose weights it has, where they are whole."""
    label: int | None = None
    """The version that it says it has; `None`: no lifecycle has labelled it."""
    session: bool = False
    received: int = 0
    """Buckets of the open session, a bit each."""
    last: bool = False
    """The bucket that came last is the version's last."""
    old_cache: bool = False
    """KV caches that other weights made are still in use."""
    pause_under_way: bool = False
    """A pause whose reply was lost has not happened yet, and may still happen."""
    untold: int = 0
    """Something happened that the engine was not asked about since: 1 before the operation, 2 during it."""


def crashed(truth: Truth) -> Truth:
    """Return the engine with its process gone."""
    return evolve(truth, alive=False, untold=2)


def restarted(truth: Truth, base: int) -> Truth:
    """Return a new process, started from the checkpoint that holds version `base`, which nothing has labelled."""
    return Truth(incarnation=truth.incarnation + 1, holds=base, untold=2)


def continued_from_outside(truth: Truth) -> Truth:
    """Return the engine after somebody else's continue."""
    return evolve(truth, paused=False, untold=2)


def pause_landed(truth: Truth) -> Truth:
    """Return the engine after the pause that was under way has happened."""
    return evolve(truth, paused=True, pause_under_way=False, untold=2)


def act(truth: Truth, request: e.Request, *, at_risk_from_begin: bool) -> tuple[Truth, Acknowledgement]:
    """Return what becomes of the engine, and what it answers, when all goes well."""
    if isinstance(request, e.BeginUpdate):
        return _begin(truth, at_risk_from_begin)
    acting = _ACTING.get(type(request))
    return (truth, DONE) if acting is None else acting(truth, request)


def _probe(truth: Truth, _: Any) -> tuple[Truth, Acknowledgement]:
    report = EngineReport(
        kind="model",
        incarnation=str(truth.incarnation),
        paused=truth.paused,
        whole=truth.whole and not truth.session,
        label=None if truth.label is None else label_of(RUN, truth.label),
    )
    return _told(truth), Acknowledgement(outcome=Outcome.DONE, report=report)


def _told(truth: Truth) -> Truth:
    return evolve(truth, untold=0) if truth.untold else truth


def _pause(truth: Truth, _: Any) -> tuple[Truth, Acknowledgement]:
    return _stopped(evolve(truth, paused=True), _)


def _stopped(truth: Truth, _: Any) -> tuple[Truth, Acknowledgement]:
    return _told(truth), Acknowledgement(outcome=Outcome.DONE, stopped=truth.paused, idle=truth.paused)


def _continue(truth: Truth, _: Any) -> tuple[Truth, Acknowledgement]:
    return evolve(truth, paused=False), DONE


def _begin(truth: Truth, at_risk: bool) -> tuple[Truth, Acknowledgement]:
    if truth.session:
        return truth, _OPEN_ALREADY
    return evolve(truth, session=True, received=0, last=False, whole=truth.whole and not at_risk), DONE


def _receive(truth: Truth, request: e.TransferWeights) -> tuple[Truth, Acknowledgement]:
    if not truth.session:
        return truth, _NOTHING_WRITTEN
    last = request.bucket is not None and request.bucket.last
    return evolve(truth, whole=False, received=truth.received | 1 << request.index, last=last), DONE


def _finish(truth: Truth, request: e.FinishUpdate) -> tuple[Truth, Acknowledgement]:
    if not truth.session:
        return truth, _NOTHING_OPEN
    closed = evolve(truth, session=False, received=0, last=False)
    none_is_missing = truth.received & (truth.received + 1) == 0
    if not truth.last or not none_is_missing:
        return closed, DONE
    return evolve(closed, whole=True, holds=request.target, label=request.target, old_cache=True), DONE


def _verify(truth: Truth, request: e.VerifyWeights) -> tuple[Truth, Acknowledgement]:
    agree = truth.whole and truth.label == request.target
    return truth, DONE if agree else Acknowledgement(outcome=Outcome.NOT_DONE, detail="holds other weights")


def _flush(truth: Truth, _: Any) -> tuple[Truth, Acknowledgement]:
    return (evolve(truth, old_cache=False) if truth.old_cache else truth), DONE


def _label(truth: Truth, request: e.LabelVersion) -> tuple[Truth, Acknowledgement]:
    return evolve(truth, label=int(request.label.rpartition(":")[2])), DONE


def _canary(truth: Truth, _: Any) -> tuple[Truth, Acknowledgement]:
    return truth, NO_REPLY if truth.paused else DONE


def _abandon(truth: Truth, _: Any) -> tuple[Truth, Acknowledgement]:
    closed = evolve(truth, session=False, received=0, last=False)
    return closed, Acknowledgement(outcome=Outcome.DONE, untouched=truth.whole)


_ACTING: dict[type[e.Request], Callable[[Truth, Any], tuple[Truth, Acknowledgement]]] = {
    e.ProbeEngine: _probe,
    e.PauseGeneration: _pause,
    e.ProvePaused: _stopped,
    e.ContinueGeneration: _continue,
    e.TransferWeights: _receive,
    e.FinishUpdate: _finish,
    e.VerifyWeights: _verify,
    e.FlushCache: _flush,
    e.LabelVersion: _label,
    e.Canary: _canary,
    e.AbandonUpdate: _abandon,
}
