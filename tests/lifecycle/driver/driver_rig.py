"""A lifecycle with scripted engines, and everything that a test wants to look at."""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from attrs import define, field

from lifecycle import Deadlines, FleetPolicy, GenerationRequest, Lifecycle, State, errors, events
from lifecycle.events import Event, Request
from lifecycle.fleet import EngineFacts
from lifecycle.ports import Acknowledgement
from lifecycle.testing import ScriptedEngine, ScriptedTransfer

NAMES = ("E1", "E2", "E3")
RUN = "run"

DEADLINES = Deadlines(
    attach=2.0,
    probe=1.0,
    drain=2.0,
    abort=0.5,
    pause=1.0,
    resume=1.0,
    open_transfer=1.0,
    begin=1.0,
    transfer=1.0,
    finish=1.0,
    verify=1.0,
    flush=1.0,
    label=1.0,
    canary=1.0,
    abandon=1.0,
    close_transfer=1.0,
    generate=1000.0,
    grace=0.2,
)
"""Seconds of virtual time."""


class Source:
    """Weights that `ScriptedTransfer` does not look at."""

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield nothing."""
        yield from ()


SOURCE = Source()


@define
class Sink:
    """A journal in memory, which also remembers up to which event it was made durable."""

    last_seq: int = 0
    events: list[Event] = field(factory=list)
    synced: int = 0
    broken: bool = False
    closed: bool = False

    def write(self, event: Event) -> None:
        self.events.append(event)

    def sync(self) -> None:
        if self.broken:
            raise OSError("no space left on device")
        self.synced = len(self.events)

    def close(self) -> None:
        self.closed = True


class Engine(ScriptedEngine):
    """A scripted engine that also checks that what it receives was journalled, and calls back."""

    sink: Sink
    received: Callable[["Engine", Request], object] | None = None
    """Called with every request before it is acted on."""
    acted: Callable[["Engine", Request], object] | None = None
    """Called with every request after it was acted on."""

    async def perform(
        self, request: Request, facts: EngineFacts, *, timeout: float, sent: Callable[[], None] = lambda: None
    ) -> Acknowledgement:
        if not any(event is request for event in self.sink.events):
            self.violations.append(f"{type(request).__name__} was not journalled before it was performed")
        durable = (events.PauseGeneration, events.BeginUpdate, events.TransferWeights)
        if isinstance(request, durable) and request.seq > self.sink.synced:
            self.violations.append(f"{type(request).__name__} was not durable before it was performed")
        if self.received is not None:
            self.received(self, request)
        # A port on a network cannot act without the event loop coming round.
        await anyio.lowlevel.checkpoint()
        acknowledgement = await super().perform(request, facts, timeout=timeout, sent=sent)
        if self.acted is not None:
            self.acted(self, request)
        return acknowledgement

    def behave(self) -> None:
        """Forget the script; come back if dead."""
        self._script.clear()
        self.received = self.acted = None
        if not self.alive:
            self.restart()

    @property
    def seen(self) -> list[type[Request]]:
        """Kinds of the requests received, in order, a request that was sent again once."""
        return [type(request) for request in {request.seq: request for request in self.requests}.values()]


@define
class Rig:
    """A lifecycle under test."""

    lifecycle: Lifecycle
    engines: list[Engine]
    transfer: ScriptedTransfer
    sink: Sink

    def __getitem__(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def state(self) -> State:
        """Return where the lifecycle is now. A call, so that a type checker does not believe it to stay there."""
        return self.lifecycle.state

    def of(self, kind: type[Event]) -> list[Any]:
        """Return the events of `kind`."""
        return [event for event in self.sink.events if isinstance(event, kind)]

    def behave(self) -> None:
        """Let everything work from now on; what died starts anew."""
        for engine in self.engines:
            engine.behave()
        self.transfer.fail_on = self.transfer.hang_on = None

    def when(self, count: int, action: Callable[[], object], *, after: bool = False) -> None:
        """Do `action` when the engines together receive, or have acted on, their `count`-th request from now."""
        left = count

        def on_request(_: Engine, __: Request) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                action()

        for engine in self.engines:
            engine.received, engine.acted = (None, on_request) if after else (on_request, None)


def rig(
    count: int = 3,
    *,
    min_engines: int | None = None,
    buckets: int = 2,
    policy: FleetPolicy | None = None,
    capabilities: Any = None,
    manual: bool = False,
    **options: Any,
) -> Rig:
    """Put `count` engines, a transfer and a lifecycle together; nothing is sent yet."""
    sink = Sink()
    engines = [Engine(name, capabilities=capabilities, manual=manual) for name in NAMES[:count]]
    for engine in engines:
        engine.sink = sink
    transfer = ScriptedTransfer(buckets=buckets)
    options = {"transfer": transfer, "deadlines": DEADLINES, "name": RUN, "journal": sink, **options}
    lifecycle = Lifecycle(engines, policy=policy or FleetPolicy(min_engines=min_engines), **options)
    return Rig(lifecycle, engines, transfer, sink)


class Later:
    """What a call in another task brings."""

    value: Any = None
    error: errors.LifecycleError | None = None
    done = False


def start(group: TaskGroup, call: Callable[[], Awaitable[Any]]) -> Later:
    """Start `call` in a task group, and keep what it brings."""
    later = Later()

    async def run() -> None:
        try:
            later.value = await call()
        except errors.LifecycleError as error:
            later.error = error
        later.done = True

    group.start_soon(run)
    return later


def prompt(tokens: int = 4) -> GenerationRequest:
    """Return a request for `tokens` tokens."""
    return GenerationRequest(input_ids=(1, 2), max_new_tokens=tokens)


async def bring_to(lifecycle: Lifecycle, state: State) -> None:
    """Walk an attached and running lifecycle to `state`."""
    steps: dict[State, Callable[[], Any]] = {
        State.SUSPENDED: lifecycle.suspend,
        State.PAUSED: lifecycle.pause_generation,
        State.UPDATING: lambda: lifecycle.begin_update(version=(lifecycle.version or 0) + 1),
    }
    for step, action in steps.items():
        if lifecycle.state is state:
            return
        if lifecycle.state in _BEFORE[step]:
            await action()


_BEFORE = {
    State.SUSPENDED: (State.RUNNING,),
    State.PAUSED: (State.SUSPENDED,),
    State.UPDATING: (State.PAUSED,),
}
