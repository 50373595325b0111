"""Generation requests on their way: held during a pause, routed to serving engines, counted until they come back."""

from collections import OrderedDict
from collections.abc import Callable, Mapping

import anyio
from attrs import define, evolve, field

from . import events as e
from .cohort import Cohort
from .deadlines import Deadlines
from .errors import EngineUnavailable, GenerationInterrupted
from .fleet import version_of
from .gate import hopeless
from .generation import Generation, GenerationInProgress, GenerationRequest, Segment, VersionSpan
from .ports import EnginePort
from .recorder import Recorder
from .states import State

FRUITLESS_LIMIT = 8
"""Attempts in a row without a token after which a generation is given up."""

_SESSIONS_REMEMBERED = 100_000
_FIRST_BACKOFF = 0.05
_LONGEST_BACKOFF = 2.0
_SUSPECT_SECONDS = 10.0
"""For how long an engine that did not answer is asked only where no other is left."""
_NOTHING = Segment(output_ids=(), logprobs=(), finish_reason="abort")


class Signal:
    """Wakes everybody who waits, each time it is given."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    async def wait(self) -> None:
        """Wait for the next time it is given.

        Cancellation: nothing is changed.
        """
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()

    def give(self) -> None:
        """Wake everybody who waits now."""
        if self._event is not None:
            self._event.set()
            self._event = None


@define(eq=False)
class _Flight:
    """One request in flight."""

    engine: str
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)


class Segments:
    """Sends generation requests: whole generations, one segment at a time."""

    def __init__(
        self,
        ports: Mapping[str, EnginePort],
        cohort: Cohort,
        recorder: Recorder,
        deadlines: Deadlines,
        state: Callable[[], State],
    ) -> None:
        self._ports = ports
        self._cohort = cohort
        self._recorder = recorder
        self._deadlines = deadlines
        self._state = state
        self._flights: set[_Flight] = set()
        self._load = dict.fromkeys(ports, 0)
        self._suspect: dict[str, float] = {}
        """Engines that did not answer, and until when others are asked before them."""
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self.changed = Signal()
        """Given when generation is released, an engine changes its standing, or the state changes."""
        self._landed = Signal()
        self.aborts = 0
        """How often the user asked for every generation to be aborted."""

    @property
    def in_flight(self) -> int:
        """Requests whose reply is awaited."""
        return len(self._flights)

    async def generate(self, request: GenerationRequest, ticket: int) -> Generation:
        """Generate until a real stop, over however many interruptions.

        An abort keeps the tokens made so far; generation goes on with them once it is released. Raises
        `GenerationInterrupted` after `FRUITLESS_LIMIT` attempts in a row without a token that no pause explains, and
        `LifecycleFaulted`, `LifecycleClosed` or `GenerationRefused`.

        Cancellation: nothing is left in flight.
        """
        progress = GenerationInProgress(request)
        aborts, fruitless = self.aborts, 0
        while progress.remaining > 0:
            epoch = self._cohort.epoch
            cause: Exception | None = None
            engine = await self._an_engine(request.session, aborts)
            if engine is None:
                return progress.result("abort")
            try:
                segment = await self._send(engine, progress.next_request(), ticket)
            except EngineUnavailable as error:
                segment, cause = _NOTHING, error
            if progress.add(segment):
                break
            if self.aborts != aborts:
                return progress.result("abort")
            explained = self._cohort.generation_held or self._cohort.epoch != epoch
            fruitless = 0 if segment.output_ids or (explained and cause is None) else fruitless + 1
            if fruitless >= FRUITLESS_LIMIT:
                raise GenerationInterrupted(f"{fruitless} attempts in a row brought no token") from cause
            if fruitless:
                await self._back_off(fruitless)
        return progress.result()

    async def _back_off(self, attempts: int) -> None:
        """Wait longer after each attempt, or until something changes."""
        with anyio.move_on_after(min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2**attempts)):
            await self.changed.wait()

    def abort(self) -> None:
        """End every generation: those in flight when their engine says so, those that are held at once."""
        self.aborts += 1
        self.changed.give()

    async def _send(self, engine: str, request: GenerationRequest, ticket: int) -> Segment:
        """Ask an engine, and return what it generated, with a version for each token.

        Raises `EngineUnavailable` or `GenerationRefused`.

        Cancellation: the engine is told by the closed connection; nothing is left in flight.
        """
        version = self._cohort.version
        flight = _Flight(engine)
        self._flights.add(flight)
        self._load[engine] += 1
        self._recorder.emit(e.GenerationSent, ticket=ticket, engine=engine)
        segment: Segment | None = None
        try:
            with flight.scope:
                segment = await self._ports[engine].generate(request, timeout=self._deadlines.generate)
            if segment is None:  # interrupted: the engine was paused but never completed the request
                segment = _NOTHING
            self._suspect.pop(engine, None)
        except EngineUnavailable:
            self._suspect[engine] = anyio.current_time() + _SUSPECT_SECONDS
            raise
        finally:
            self._flights.discard(flight)
            self._load[engine] -= 1
            self._recorder.emit(
                e.SegmentReceived,
                ticket=ticket,
                engine=engine,
                tokens=0 if segment is None else len(segment.output_ids),
                finish_reason="error" if segment is None else segment.finish_reason,
            )
            self._landed.give()
        return self._labelled(segment, engine, version)

    async def landed(self) -> None:
        """Wait until no request is in flight.

        Cancellation: nothing is changed.
        """
        while self._flights:
            await self._landed.wait()

    def interrupt(self, engine: str | None = None) -> None:
        """Stop waiting for the replies of `engine` (of all where not given): they count as aborted, without tokens."""
        for flight in self._flights:
            if engine in {None, flight.engine}:
                flight.scope.cancel()

    async def _an_engine(self, session: str | None, aborts: int) -> str | None:
        """Wait until generation is not held and an engine serves; return the one with the fewest requests in flight.

        Raises `LifecycleFaulted` or `LifecycleClosed` where waiting is in vain. `None`: aborted meanwhile.
        """
        while self.aborts == aborts:
            state = self._state()
            if (error := hopeless(state)) is not None:
                raise error
            serving = [f.name for f in self._cohort.fleet.serving if self._cohort.ledger.owed(f.name) is None]
            if serving and not self._cohort.generation_held:
                return self._route(serving, session)
            await self.changed.wait()
        return None

    def _route(self, serving: list[str], session: str | None) -> str:
        now = anyio.current_time()
        suspect = {name for name, until in self._suspect.items() if now < until}
        if session is not None and (engine := self._sessions.get(session, "")) in set(serving) - suspect:
            self._sessions.move_to_end(session)
            return engine
        engine = min(serving, key=lambda name: (name in suspect, self._load[name]))
        if session is not None:
            self._sessions[session] = engine
            if len(self._sessions) > _SESSIONS_REMEMBERED:
                self._sessions.popitem(last=False)
        return engine

    def _labelled(self, segment: Segment, engine: str, pinned: int | None) -> Segment:
        """Give every token its version: what the engine reports, or what was published when the request was sent."""
        count = len(segment.output_ids)
        if segment.spans is not None:
            versions = _expand(segment.spans, count, self._cohort.run, pinned)
            return evolve(segment, engine=engine, versions=versions)
        exact = pinned == self._cohort.version
        return evolve(segment, engine=engine, versions=(pinned,) * count, exact=exact)


def _expand(spans: tuple[VersionSpan, ...], count: int, run: str, pinned: int | None) -> tuple[int | None, ...]:
    """Return a version for each token; `None` where the engine says that the weights were none of this run's."""
    versions: list[int | None] = [pinned] * count
    for span in spans:
        end = min(span.end, count)
        versions[span.start : end] = [version_of(run, span.label)] * max(0, end - span.start)
    return tuple(versions)
