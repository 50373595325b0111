"""An in-process engine port that behaves like a server, and misbehaves on a script."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Self

import anyio

from lifecycle import events as e
from lifecycle.errors import EngineUnavailable
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest, Segment, Tokens
from lifecycle.states import Outcome, PauseMode
from lifecycle.values import Acknowledgement, Capabilities, EngineReport

from .generating import STEPS, Generating
from .steps import Answer, Crash, Delay, LandLate, LoseReply, Refuse, Silence, Step

_STEPS = (Answer, Crash, Delay, LandLate, LoseReply, Refuse, Silence)
"""What a request to `perform` can meet."""


class ScriptedEngine:
    """An engine with real semantics and no model: tokens count upwards from the end of the prompt, weights are a label.

    `violations` holds what a correct lifecycle never makes it do, in sentences: a test ends with it empty.

    Generations end at once, or, with `manual=True`, when `produce()` has made enough tokens. While paused a generation
    waits, as it does in the real servers. Where its capabilities say `streams`, tokens are sent as they are made.
    """

    def __init__(
        self,
        name: str = "engine",
        *,
        label: str | None = None,
        capabilities: Capabilities | None = None,
        manual: bool = False,
        world_size: int = 1,
    ) -> None:
        self.name = name
        self.capabilities = capabilities or Capabilities(pause_modes=frozenset(PauseMode))
        self.label = label
        self.manual = manual
        self.world_size = world_size
        self.incarnation = 1
        self.alive = True
        self.closed = False
        self.paused: PauseMode | None = None
        self.whole = True
        self.session = False
        self.asleep = False
        self.requests: list[e.Request] = []
        """Every request received, in order."""
        self.violations: list[str] = []
        self._script: dict[type[e.Request | GenerationRequest], deque[Step]] = defaultdict(deque)
        self._late: list[Callable[[], object]] = []
        self._generating: set[Generating] = set()
        self._resumed = anyio.Event()
        self._received: set[int] = set()
        self._complete = False
        self._acts = self._acting()

    # ------------------------------------------------------------------------------------------------- for the test

    def on(self, request: type[e.Request | GenerationRequest], *steps: Step) -> Self:
        """Let the next requests of this kind meet `steps`, one each, before the engine behaves again.

        `GenerationRequest` is a kind, too. Raises `ValueError` for a step that requests of the kind cannot meet.
        """
        for step in steps:
            if isinstance(step, STEPS if request is GenerationRequest else _STEPS):
                continue
            raise ValueError(f"{step} is nothing that a {request.__name__} can meet")
        self._script[request].extend(steps)
        return self

    @property
    def kinds(self) -> list[str]:
        """Names of the requests received, in order."""
        return [type(request).__name__ for request in self.requests]

    @property
    def in_flight(self) -> int:
        """Generation requests inside the engine."""
        return len(self._generating)

    def produce(self, tokens: int = 1) -> None:
        """Let every generation in flight make `tokens` tokens, unless paused."""
        if self.paused is None:
            for generation in list(self._generating):
                self._make(generation, tokens)

    def land(self) -> None:
        """Let everything that was to land late take effect now."""
        late, self._late = self._late, []
        for act in late:
            act()

    def crash(self) -> None:
        """Die: requests in flight are cut off, and nobody answers any more."""
        self.alive = False
        for generation in list(self._generating):
            generation.finish("crash")

    def restart(self, label: str | None = None) -> None:
        """Come back as a new process, with the weights it was started from, labelled `label`."""
        self.alive, self.paused, self.whole, self.session, self.label = True, None, True, False, label
        self.incarnation += 1
        self._late.clear()

    def resume_from_outside(self) -> None:
        """Continue as somebody else's request would."""
        self._continue()

    # ---------------------------------------------------------------------------------------------------- EnginePort

    async def perform(
        self, request: e.Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = lambda: None
    ) -> Acknowledgement:
        """Act on the request, or on the next step of its script.

        Cancellation: a delayed request is not carried out.
        """
        if not self.alive:
            return _unreachable()
        self.requests.append(request)
        step = self._step(type(request))
        sent()
        if isinstance(step, Silence):
            await anyio.sleep_forever()
        if isinstance(step, Delay):
            await anyio.sleep(step.seconds)
        return self._meet(step, request)

    def _meet(self, step: Step | None, request: e.Request) -> Acknowledgement:
        if not self.alive:
            return _unknown()
        match step:
            case Refuse(detail):
                return Acknowledgement(outcome=Outcome.NOT_DONE, detail=detail)
            case LoseReply(applied):
                if applied:
                    self._act(request)
                return _unknown()
            case LandLate():
                self._late.append(lambda: self._act(request))
                return _unknown()
            case Answer(acknowledgement):
                return acknowledgement
            case Crash():
                self.crash()
                return _unknown()
            case _:
                return self._act(request)

    async def generate(
        self, request: GenerationRequest, *, timeout: float, arrived: Callable[[Tokens], None] | None = None
    ) -> Segment:
        """Generate as the class says.

        Cancellation: the generation is dropped, as servers do when a client hangs up.
        """
        if not self.alive:
            raise EngineUnavailable(self.name, "connection refused")
        generation = Generating(request, arrived if self.capabilities.streams else None, self._step(GenerationRequest))
        generation.refuse(self.name)
        self._generating.add(generation)
        if isinstance(generation.step, Crash):
            self.crash()
        try:
            while self.paused is not None and generation.reason is None:
                await self._until_resumed_or(generation)
            if not self.manual and generation.reason is None:
                self._make(generation, request.max_new_tokens)
            await generation.changed.wait()
        finally:
            self._generating.discard(generation)
        return generation.answer(self.name, reports_versions=self.capabilities.reports_versions)

    async def aclose(self) -> None:
        """Remember that it was closed.

        Cancellation: nothing to leave behind.
        """
        self.closed = True

    # -------------------------------------------------------------------------------------------------------- inside

    def _step(self, request: type[e.Request | GenerationRequest]) -> Step | None:
        script = self._script[request]
        return script.popleft() if script else None

    def _act(self, request: e.Request) -> Acknowledgement:
        acknowledgement = self._acts[type(request)](request) if type(request) in self._acts else None
        return acknowledgement or Acknowledgement(outcome=Outcome.DONE)

    def _acting(self) -> dict[type[e.Request], Callable[[Any], Acknowledgement | None]]:
        return {
            e.ProbeEngine: lambda _: Acknowledgement(outcome=Outcome.DONE, report=self._report()),
            e.AbortGeneration: lambda _: self._abort(),
            e.PauseGeneration: self._pause,
            e.ProvePaused: lambda _: self._stopped(),
            e.ContinueGeneration: lambda _: self._continue(),
            e.BeginUpdate: lambda _: self._begin(),
            e.TransferWeights: self._receive,
            e.FinishUpdate: self._finish,
            e.VerifyWeights: self._verify,
            e.LabelVersion: self._relabel,
            e.Canary: lambda _: self._canary(),
            e.AbandonUpdate: lambda _: self._abandon(),
        }

    def _verify(self, request: e.VerifyWeights) -> Acknowledgement:
        agree = self.whole and self.label == request.label
        return Acknowledgement(outcome=Outcome.DONE if agree else Outcome.NOT_DONE, detail=f"holds {self.label}")

    def _relabel(self, request: e.LabelVersion) -> None:
        self.label = request.label

    def _canary(self) -> Acknowledgement | None:
        if self.paused is None:
            return None
        return Acknowledgement(outcome=Outcome.UNKNOWN, detail="the canary hangs: the engine is paused")

    def _abandon(self) -> Acknowledgement:
        self.session = False
        return Acknowledgement(outcome=Outcome.DONE, untouched=self.whole)

    def _report(self) -> EngineReport:
        return EngineReport(
            kind="scripted",
            incarnation=str(self.incarnation),
            paused=self.paused is not None,
            asleep=self.asleep,
            whole=self.whole and not self.session,
            label=self.label,
            world_size=self.world_size,
        )

    def _pause(self, request: e.PauseGeneration) -> Acknowledgement:
        if self.paused is None:
            self._resumed = anyio.Event()
        self.paused = request.mode
        if request.mode is PauseMode.ABORT:
            self._abort()
        return self._stopped()

    def _stopped(self) -> Acknowledgement:
        stopped = self.paused is not None
        return Acknowledgement(outcome=Outcome.DONE, stopped=stopped, idle=stopped and not self._unfinished())

    def _unfinished(self) -> Iterable[Generating]:
        return [generation for generation in self._generating if generation.reason is None]

    def _abort(self) -> None:
        for generation in self._unfinished():
            generation.finish("abort")

    def _continue(self) -> None:
        if not self.whole:
            self.violations.append("continued while its weights were partly written")
        self.paused = None
        self._resumed.set()

    def _begin(self) -> Acknowledgement:
        if self.paused is None:
            self.violations.append("an update began while it was generating")
        if self.session:
            return Acknowledgement(outcome=Outcome.NOT_DONE, detail="a session is already open")
        self.session, self._received, self._complete = True, set(), False
        return Acknowledgement(outcome=Outcome.DONE)

    def _receive(self, request: e.TransferWeights) -> Acknowledgement:
        if not self.session:
            return Acknowledgement(outcome=Outcome.NOT_DONE, detail="no session is open", untouched=True)
        if self.paused is None:
            self.violations.append("weights were written while it was generating")
        if request.index in self._received:
            self.violations.append(f"bucket {request.index} was sent twice")
        self.whole = False
        self._received.add(request.index)
        self._complete = request.bucket is not None and request.bucket.last
        return Acknowledgement(outcome=Outcome.DONE)

    def _finish(self, request: e.FinishUpdate) -> Acknowledgement:
        if not self.session:
            return Acknowledgement(outcome=Outcome.NOT_DONE, detail="no session is open")
        self.session = False
        if self._complete and self._received == set(range(len(self._received))):
            self.whole, self.label = True, request.label
        return Acknowledgement(outcome=Outcome.DONE)

    def _make(self, generation: Generating, tokens: int) -> None:
        if not self.whole:
            self.violations.append("generated with weights that were partly written")
        generation.make(tokens, self.label or "default")

    async def _until_resumed_or(self, generation: Generating) -> None:
        async with anyio.create_task_group() as tasks:

            async def first(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, self._resumed)
            tasks.start_soon(first, generation.changed)


def _unreachable() -> Acknowledgement:
    return Acknowledgement(outcome=Outcome.NOT_DONE, detail="connection refused", unreachable=True)


def _unknown() -> Acknowledgement:
    return Acknowledgement(outcome=Outcome.UNKNOWN, detail="the reply was lost")
