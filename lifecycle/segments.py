"""Generation requests on their way: held during a pause, routed to serving engines, counted until they come back."""

from collections.abc import Callable, Mapping
from typing import Any

import anyio

from . import events as e
from .cohort import Cohort
from .deadlines import Deadlines
from .errors import EngineUnavailable, GenerationInterrupted, GenerationRefused, LifecycleError, TicketSettled
from .flight import Flight
from .gate import hopeless
from .generation import Generation, GenerationInProgress, GenerationRequest, Segment, Tokens, without_prompt
from .ports import EnginePort
from .recorder import Recorder
from .routing import Router
from .states import State
from .ticket import Ticket

_FIRST_BACKOFF = 0.1
"""Seconds, doubled for each further attempt in vain."""
_LONGEST_BACKOFF = 2.0
"""Seconds."""


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
        self._flights: set[Flight] = set()
        self._router = Router(ports)
        self.changed = Signal()
        """Given when generation is released, an engine changes its standing, or the state changes."""
        self._landed = Signal()
        self.aborts = 0
        """How often the user asked for every generation to be aborted."""

    @property
    def in_flight(self) -> int:
        """Requests whose reply is awaited."""
        return len(self._flights)

    async def generate(
        self, request: GenerationRequest, ticket: Ticket, on_tokens: Callable[[Tokens], None] | None = None
    ) -> Generation:
        """Generate until a real stop, over however many interruptions.

        What an interruption leaves is kept: the tokens of an abort, and those that had arrived of a stream. Generation
        goes on from them once it is released; with `partial_rollout=False` it begins again instead.

        `on_tokens`: called with every token of the generation, each once and in order, as early as it is known. It must
        be quick; what it raises ends the generation.

        Raises `GenerationInterrupted` after `retry_budget` attempts in a row without a token that is kept and that no
        pause explains, or when an engine takes back what `on_tokens` was given; `ValueError` for `on_tokens` together
        with `partial_rollout=False`; `TicketSettled` where nothing may be sent under `ticket` any more; and
        `LifecycleFaulted`, `LifecycleClosed` or `GenerationRefused`.

        Cancellation: nothing is left in flight.
        """
        if on_tokens is not None and not request.partial_rollout:
            raise ValueError("on_tokens needs partial_rollout: tokens that were passed on cannot be discarded")
        progress, aborts = GenerationInProgress(request), self.aborts
        while progress.remaining > 0:
            engine = await self._an_engine(request.session, aborts)
            if engine is None:
                return progress.result("abort")
            if ticket.settled:
                raise TicketSettled(f"ticket {ticket.id} was settled; a rollout generates before that")
            epoch = self._cohort.epoch
            flight, segment = await self._send(engine, progress.next_request(), ticket.id, on_tokens)
            if progress.add(segment, explained=flight.fault is None and self._paused(engine, epoch)):
                break
            if self.aborts != aborts:
                return progress.result("abort")
            if progress.fruitless >= request.retry_budget:
                in_vain = "brought no token" if request.partial_rollout else "brought no token that could be kept"
                raise GenerationInterrupted(f"{progress.fruitless} attempts in a row {in_vain}") from flight.fault
            if progress.fruitless:
                await self._back_off(progress.fruitless)
        return progress.result()

    def _paused(self, engine: str, epoch: int) -> bool:
        """Whether a pause since `epoch`, of all or of this engine alone, explains that a request was aborted."""
        cohort = self._cohort
        return cohort.generation_held or cohort.epoch != epoch or cohort.ledger.owed(engine) is not None

    async def _back_off(self, attempts: int) -> None:
        """Wait longer after each attempt, or until something changes."""
        with anyio.move_on_after(min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** (attempts - 1))):
            await self.changed.wait()

    def abort(self) -> None:
        """End every generation: those in flight when their engine says so, those that are held at once."""
        self.aborts += 1
        self.changed.give()

    async def _send(
        self, engine: str, request: GenerationRequest, ticket: int, on_tokens: Callable[[Tokens], None] | None
    ) -> tuple[Flight, Segment]:
        """Ask an engine. Returns what is kept of its answer, with a version for each token.

        Raises `GenerationRefused`, `GenerationInterrupted`, or what `on_tokens` raises.

        Cancellation: the engine is told by the closed connection; nothing is left in flight.
        """
        flight = Flight(engine, request, self._cohort.version, on_tokens)
        segment: Segment | None = None
        self._flights.add(flight)
        self._router.sent(engine)
        self._recorder.emit(e.GenerationSent, ticket=ticket, engine=engine)
        try:
            segment = await self._land(flight)
        finally:
            flight.over = True
            self._flights.discard(flight)
            self._router.landed(engine)
            self._recorder.emit(
                e.SegmentReceived,
                ticket=ticket,
                engine=engine,
                tokens=0 if segment is None else len(segment.output_ids),
                finish_reason="error" if segment is None or flight.fault is not None else segment.finish_reason,
            )
            self._landed.give()
        if flight.retracted:
            raise GenerationInterrupted(f"{engine} took back tokens that had been passed on") from flight.fault
        flight.tell_rest(segment)
        return flight, segment

    async def _land(self, flight: Flight) -> Segment:
        """Wait for the answer, and return what is kept of it; of the stream where none comes."""
        answer: Segment | None = None
        try:
            with flight.scope:
                answer = await self._ask(flight)
        except EngineUnavailable as error:
            flight.fault = error
        except GenerationRefused:
            if flight.failure is None:
                raise
        if flight.failure is not None:
            raise flight.failure
        segment = flight.settle(answer, self._cohort.run, self._cohort.version)
        if flight.fault is not None:
            self._router.suspect(flight.engine)
        elif answer is not None:
            self._router.trust(flight.engine)
        return segment

    async def _ask(self, flight: Flight) -> Segment:
        port, request, timeout = self._ports[flight.engine], flight.request, self._deadlines.generate
        try:
            if request.stream and port.capabilities.streams:
                return await port.generate(request, timeout=timeout, arrived=flight.arrive)
            return await port.generate(request, timeout=timeout)
        except (EngineUnavailable, GenerationRefused, GenerationInterrupted) as error:
            raise _cleaned(error, request) from None

    async def landed(self) -> None:
        """Wait until no request is in flight.

        Cancellation: nothing is changed.
        """
        while self._flights:
            await self._landed.wait()

    def interrupt(self, engine: str | None = None) -> None:
        """Stop waiting for the replies of `engine` (of all where not given): they count as aborted.

        Of a stream, the tokens that have arrived are kept.
        """
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
                return self._router.choose(serving, session)
            await self.changed.wait()
        return None


def _cleaned(error: LifecycleError, request: GenerationRequest) -> LifecycleError:
    """Return the error without the prompt, which servers echo; and without its causes, which quote the server."""

    def clean(said: Any) -> Any:
        if isinstance(said, list | tuple):
            return type(said)(map(clean, said))
        return without_prompt(said, request) if isinstance(said, str) else said

    for name, said in vars(error).items():
        if name != "engine":
            setattr(error, name, clean(said))
    error.args = clean(error.args)
    error.__cause__ = error.__context__ = None
    return error
