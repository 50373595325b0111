"""An in-process engine port that behaves like a server, and misbehaves on a script."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Self

import anyio
from attrs import define, field, frozen

from lifecycle import events as e
from lifecycle.errors import EngineUnavailable
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest, Segment, Tokens, VersionSpan
from lifecycle.states import Outcome, PauseMode
from lifecycle.values import Acknowledgement, Capabilities, EngineReport


@frozen
class Step:
    """What the engine does with one request, instead of just acting on it."""


@frozen
class Delay(Step):
    """Act after `seconds`."""

    seconds: float


@frozen
class Refuse(Step):
    """Do nothing and say so, like a 4xx."""

    detail: str = "refused by the script"


@frozen
class LoseReply(Step):
    """Act, or not, and let the reply be lost: the caller cannot tell which."""

    applied: bool = True


@frozen
class LandLate(Step):
    """Let the reply be lost now, and act when `ScriptedEngine.land()` is called."""


@frozen
class Silence(Step):
    """Never answer."""


@frozen
class Crash(Step):
    """Die on receiving the request. Every later call finds nobody there, until `restart()`."""


@frozen
class Answer(Step):
    """Do nothing and answer this."""

    acknowledgement: Acknowledgement


@define(eq=False)
class _Generating:
    """One generation request inside the engine."""

    request: GenerationRequest
    tokens: list[int] = field(factory=list)
    labels: list[str] = field(factory=list)
    reason: str | None = None
    changed: anyio.Event = field(factory=anyio.Event)

    def finish(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.changed.set()


class ScriptedEngine:
    """An engine with real semantics and no model: tokens count upwards from 1, weights are a version label.

    `violations` holds what a correct lifecycle never makes it do, in sentences: a test ends with it empty.

    Generations end at once, or, with `manual=True`, when `produce()` has made enough tokens. While paused a generation
    waits, as it does in the real servers.
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
        self._script: dict[type[e.Request], deque[Step]] = defaultdict(deque)
        self._late: list[Callable[[], object]] = []
        self._generating: set[_Generating] = set()
        self._resumed = anyio.Event()
        self._received: set[int] = set()
        self._complete = False
        self._acts = self._acting()

    # ------------------------------------------------------------------------------------------------- for the test

    def on(self, request: type[e.Request], *steps: Step) -> Self:
        """Let the next requests of this kind meet `steps`, one each, before the engine behaves again."""
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
        script = self._script[type(request)]
        step = script.popleft() if script else None
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
        generation = _Generating(request)
        self._generating.add(generation)
        try:
            while self.paused is not None and generation.reason is None:
                await self._until_resumed_or(generation)
            if not self.manual and generation.reason is None:
                self._make(generation, request.max_new_tokens)
            await generation.changed.wait()
        finally:
            self._generating.discard(generation)
        if generation.reason == "crash":
            raise EngineUnavailable(self.name, "connection reset")
        return self._segment(generation)

    async def aclose(self) -> None:
        """Remember that it was closed.

        Cancellation: nothing to leave behind.
        """
        self.closed = True

    # -------------------------------------------------------------------------------------------------------- inside

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

    def _unfinished(self) -> Iterable[_Generating]:
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

    def _make(self, generation: _Generating, tokens: int) -> None:
        if not self.whole:
            self.violations.append("generated with weights that were partly written")
        left = generation.request.max_new_tokens - len(generation.tokens)
        for _ in range(min(tokens, left)):
            generation.tokens.append(len(generation.request.input_ids) + len(generation.tokens) + 1)
            generation.labels.append(self.label or "default")
        if len(generation.tokens) >= generation.request.max_new_tokens:
            generation.finish("length")

    async def _until_resumed_or(self, generation: _Generating) -> None:
        async with anyio.create_task_group() as tasks:

            async def first(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, self._resumed)
            tasks.start_soon(first, generation.changed)

    def _segment(self, generation: _Generating) -> Segment:
        spans = None
        if self.capabilities.reports_versions:
            labels = generation.labels
            starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
            ends = [*starts[1:], len(labels)]
            spans = tuple(
                VersionSpan(label=labels[start], start=start, end=end)
                for start, end in zip(starts, ends, strict=True)
                if labels
            )
        return Segment(
            output_ids=tuple(generation.tokens),
            logprobs=tuple(-1.0 for _ in generation.tokens),
            finish_reason=generation.reason or "length",
            spans=spans,
        )


def _unreachable() -> Acknowledgement:
    return Acknowledgement(outcome=Outcome.NOT_DONE, detail="connection refused", unreachable=True)


def _unknown() -> Acknowledgement:
    return Acknowledgement(outcome=Outcome.UNKNOWN, detail="the reply was lost")
