"""Everything outside: stands in for `Effects`. Each request at each engine ends as the oracle says, at once."""

from collections.abc import Callable, Iterable
from typing import Any

import anyio
from attrs import evolve

from lifecycle import events as e
from lifecycle.bookkeeping import Bookkeeper
from lifecycle.cohort import Cohort
from lifecycle.deadlines import Deadlines
from lifecycle.effects import Half, Result
from lifecycle.errors import EngineFailure, TransferFailed
from lifecycle.recorder import Recorder
from lifecycle.values import Acknowledgement

from .conduct import breached_by_reply, breached_by_request
from .oracle import Oracle
from .outcomes import Happening, befall, possible
from .truth import NO_REPLY, Truth

FAR_AWAY = 1e9
"""The deadline of the scope around an operation, in seconds: whoever sees another one is shielded."""

_COSTS: dict[tuple[Happening, ...], tuple[int, ...]] = {}
_MESSAGES = ("answered", "cancelled", "cancelled by close()", "the trainer's half fails")
_NOTHING = Result(acknowledgements={}, failures=())


class Merged(BaseException):
    """From here on everything is known from another run."""


class World:
    """The engines, in truth, and what happens to requests on their way. Never suspends."""

    def __init__(
        self, cohort: Cohort, recorder: Recorder, books: Bookkeeper, oracle: Oracle, *, at_risk_from_begin: bool
    ) -> None:
        self.deadlines = Deadlines(attach=0.04)  # one round of probes, since time stands still
        self.truths: dict[str, Truth] = {}
        self.base = 1
        """The version that a process holds which was started anew."""
        self.closing: Callable[[], None] = lambda: None
        """Called when somebody calls `close()` during the operation."""
        self.known: Callable[[], bool] = lambda: False
        """Whether everything from here on is known from another run."""
        self.path: list[object] = []
        """Which requests went out so far: where in the operation it is."""
        self.paths: dict[str, list[object]] = {}
        """By engine: which of them it got, and whether it failed."""
        self.breaches: list[str] = []
        self.cancelled = False
        """The caller was cancelled, by asyncio's own means, which interrupt once."""
        self.story: list[str] | None = None
        """What happens, in sentences; `None` where nobody reads it."""
        self._cohort = cohort
        self._recorder = recorder
        self._books = books
        self._oracle = oracle
        self._at_risk = at_risk_from_begin
        self.merged = False
        """The run has come to where everything is known from another one."""

    def begin(self) -> None:
        """Do nothing: no time passes, so that an operation has all of it."""

    def allowed(self, seconds: float) -> float:
        """Return `seconds`, for the same reason."""
        return seconds

    def start(self) -> None:
        """Begin a run."""
        self.path, self.breaches, self.cancelled, self.merged = [], [], False, False
        self.paths = {name: [] for name in self.truths}

    async def fan_out(
        self,
        kind: type[e.Request],
        names: Iterable[str],
        /,
        *,
        trainer: Half | None = None,
        cut: Half | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> Result:
        """Do what `Effects.fan_out` does, with the outcomes that the oracle chooses.

        Cancellation: as there, where the oracle says so.
        """
        names = tuple(names)
        if not names:
            return _NOTHING
        self._set_out(kind, names)
        requests = {name: self._recorder.emit(kind, engine=name, **fields) for name in names}
        for request in requests.values():
            self._books.sending(request)
        collective = trainer is not None
        message = _MESSAGES[self._oracle.choose(_message_costs(collective=collective))]
        cancelled = message.startswith("cancelled")
        error: Exception | None = None
        if message == "the trainer's half fails":
            error = TransferFailed("the trainer's half failed")
            self._tell(kind, None, message)
        acknowledgements = {}
        for name, request in requests.items():
            acknowledgements[name] = self._befall(request, cancelled=cancelled, failed=error is not None)
        failures: list[Exception] = [
            EngineFailure(name, kind.__name__, ack.outcome, ack.detail)
            for name, ack in acknowledgements.items()
            if not ack.done
        ]
        self.path.append(message)
        if cut is not None and (failures or error is not None):
            await cut()
        if cancelled:
            self._tell(kind, None, message)
            if message == "cancelled by close()":
                self.closing()
            else:
                self.cancelled = True
            raise anyio.get_cancelled_exc_class()
        return Result(
            acknowledgements=acknowledgements, failures=(*failures, error) if error is not None else tuple(failures)
        )

    def _set_out(self, kind: type[e.Request], names: tuple[str, ...]) -> None:
        """Note where in the operation it is, and go no further where that is known from another run."""
        self.path.append(kind)
        for name in names:
            self.paths[name].append(len(self.path))
        if not self.merged and not self.breaches and self._oracle.beyond_prefix:
            self.merged = self.known()
        if self.merged:
            raise Merged

    def _befall(self, request: e.Request, *, cancelled: bool, failed: bool) -> Acknowledgement:
        name, kind = str(request.engine), type(request)
        before = self.truths[name]
        if failed:
            truth, acknowledgement = self._cut_off(before, request), NO_REPLY
            happening = Happening.VANISHED
        else:
            options = possible(kind, before, cancelled=cancelled)
            happening = options[self._oracle.choose(_costs(options, free=cancelled))]
            truth, acknowledgement = befall(
                before, request, happening, base=self.base, at_risk_from_begin=self._at_risk
            )
            if happening is not Happening.DONE:
                self._tell(kind, name, happening.value)
        self.truths[name] = truth
        facts = self._cohort.fleet[name]
        self.breaches += breached_by_request(request, before, facts)
        if not acknowledgement.done:
            self.paths[name].append(False)
        given_up = cancelled and happening is not Happening.DONE and before.alive
        owed = self._cohort.ledger.owed(name)
        self._books.record(request, acknowledgement, 0.0, given_up=given_up)
        self.breaches += breached_by_reply(request, owed, self._cohort.ledger.owed(name))
        return acknowledgement

    def _cut_off(self, truth: Truth, request: e.Request) -> Truth:
        """Return what a collective that broke off leaves of the engine."""
        writes = isinstance(request, e.TransferWeights) and truth.alive and truth.session
        return evolve(truth, whole=False) if writes else truth

    def _tell(self, kind: type[e.Request], name: str | None, sentence: str) -> None:
        if self.story is not None:
            self.story.append(f"{kind.__name__}{f' at {name}' if name else ''}: {sentence}")


def _shielded() -> bool:
    return anyio.current_effective_deadline() != FAR_AWAY


def _message_costs(*, collective: bool) -> tuple[int, ...]:
    # Costs that nobody can pay keep the answers' numbers apart.
    close = 99 if _shielded() else 1
    return (0, 1, close, 1 if collective else 99)


def _costs(options: tuple[Happening, ...], *, free: bool) -> tuple[int, ...]:
    if free or len(options) == 1:
        return (0,) * len(options)
    if options not in _COSTS:
        _COSTS[options] = (0, *(happening.fault for happening in options[1:]))
    return _COSTS[options]
