"""Engines that a trainer has left, and the journals that tell how."""

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
from attrs import define, evolve

from adapters.engines import EmbeddedEngine
from adapters.frontends.examination import SPEAKS
from lifecycle import Outcome, PauseMode, events
from lifecycle.fleet import EngineFacts
from lifecycle.journal import Journal
from lifecycle.ports import Acknowledgement, EngineReport

NAME = "engine-0"
"""What the journals call their engine."""
RUN = "run"
PAUSED = (events.PauseGeneration(engine=NAME), events.EnginePaused(engine=NAME, outcome=Outcome.DONE))
"""It is owed a continue."""
UNCERTAIN = (events.PauseGeneration(engine=NAME), events.EnginePaused(engine=NAME, outcome=Outcome.UNKNOWN))
"""It may be paused, or may be paused yet."""
DIRTY = (*PAUSED, events.EngineDirtied(engine=NAME))


def asked(engine: EmbeddedEngine, request: events.Request) -> Acknowledgement:
    """Send a request over connections of its own."""

    async def ask() -> Acknowledgement:
        client = SPEAKS[engine.engine.dialect.kind](engine.url)
        try:
            return await client.perform(request, EngineFacts(name=client.name), timeout=20)
        finally:
            await client.aclose()

    return anyio.run(ask)


def report_of(engine: EmbeddedEngine) -> EngineReport:
    """Return how it stands."""
    report = asked(engine, events.ProbeEngine()).report
    assert report is not None
    return report


def pause(engine: EmbeddedEngine) -> None:
    """Pause it, as a trainer does."""
    assert asked(engine, events.PauseGeneration(mode=PauseMode.ABORT)).done


def opened(address: str, *, name: str = NAME) -> events.LifecycleOpened:
    """Return the head of a journal."""
    return events.LifecycleOpened(name=RUN, engines=(name,), min_engines=1, addresses=(address,))


def met(engine: EmbeddedEngine) -> events.EngineProbed:
    """Return that a lifecycle has met this very process."""
    report = report_of(engine)
    return events.EngineProbed(
        engine=NAME, outcome=Outcome.DONE, paused=False, label=report.label, incarnation=report.incarnation
    )


def written(path: Path, *happened: events.Event) -> Path:
    """Write a journal of what happened, or go on with one."""
    journal = Journal(path)
    for number, event in enumerate(happened, journal.last_seq + 1):
        journal.write(evolve(event, seq=number))
    journal.close()
    return path


def journal_of(path: Path, engine: EmbeddedEngine, *happened: events.Event) -> Path:
    """Write the journal of a trainer that has met the engine, and was killed after what happened then."""
    return written(path, opened(engine.url), met(engine), *happened)


@define
class Door:
    """A way to an engine on which everybody who comes is counted."""

    url: str
    visitors: int = 0


@contextmanager
def door(engine: EmbeddedEngine, visited: Callable[[], object] = lambda: None) -> Iterator[Door]:
    """Open another port to an engine; `visited` is called before each visitor gets through."""
    host, port = engine.url.removeprefix("http://").split(":")
    counted = Door("")

    class Porter(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            counted.visitors += 1
            visited()
            with socket.create_connection((host, int(port))) as inside:
                back = threading.Thread(target=_pass_on, args=(inside, self.request))
                back.start()
                _pass_on(self.request, inside)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Porter) as server:
        counted.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield counted
        server.shutdown()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
