"""Serve an embedded engine: in this process until a signal comes, or in a thread for the length of a `with` block."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import uvicorn

from adapters.engines.embedded.engine import Engine, EngineDeadError
from adapters.engines.embedded.options import DIALECTS, EngineOptions
from adapters.engines.embedded.sequence import Finish
from adapters.engines.embedded.sglang_routes import sglang_app
from adapters.engines.embedded.vllm_routes import vllm_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from starlette.applications import Starlette

__all__ = ["EmbeddedServer", "serve"]

_GRACE_SECONDS = 0.3
_PARENT_POLL_SECONDS = 0.2
_SHORTEST_PREFIX = {"sglang": 1, "vllm": 16}  # vLLM caches whole blocks of 16 tokens
_APPLICATIONS: dict[str, Callable[[Engine], Starlette]] = {"sglang": sglang_app, "vllm": vllm_app}


def serve(
    *,
    dialect: str,
    port: int,
    model: str | Path,
    host: str = "127.0.0.1",
    options: EngineOptions | None = None,
    ready_line: bool = True,
) -> int:
    """Serve an embedded engine until SIGTERM or SIGINT; call it on the main thread of a process of its own.

    Requests in flight are aborted when the signal comes, and the process is ready to end within a second, even with
    the scheduler blocked in a collective: the process then exits from inside this function.

    Args:
        dialect: "sglang" or "vllm".
        port: TCP port; 0 for a free one.
        model: Directory of a checkpoint in the Hugging Face layout.
        host: Address to listen on. The control routes have no authentication, as the real servers' have none.
        options: `None` for the defaults.
        ready_line: Whether to print `listening on http://HOST:PORT` when the server accepts.

    Returns:
        0, after a signal.

    Raises:
        ValueError: If the dialect is unknown; a `CheckpointError` if the checkpoint cannot be loaded.
        OSError: If the port cannot be bound.
    """
    server = EmbeddedServer(dialect=dialect, model=model, port=port, host=host, options=options)

    def announce() -> None:
        if ready_line:
            print(f"listening on {server.url}", flush=True)

    asyncio.run(server.run(on_ready=announce, exit_process=os._exit, handle_signals=True))
    if not server.ended:
        # A thread inside a collective would keep the interpreter from ending.
        os._exit(0)
    return 0


class EmbeddedServer:
    """An embedded engine behind HTTP; as a context manager it serves in a thread of this process.

    A trap that would kill a real server's process only closes this one's connections.

    Args:
        dialect: See `serve`.
        model: See `serve`.
        port: See `serve`.
        host: See `serve`.
        options: See `serve`.
    """

    def __init__(
        self,
        *,
        dialect: str,
        model: str | Path,
        port: int = 0,
        host: str = "127.0.0.1",
        options: EngineOptions | None = None,
    ) -> None:
        if dialect not in DIALECTS:
            raise ValueError(f"dialect {dialect!r} is none of {', '.join(DIALECTS)}")
        self._options = EngineOptions() if options is None else options
        self._dialect = dialect
        self._engine = Engine(
            str(model),
            self._options,
            scaled_logprobs=dialect == "sglang",
            shortest_prefix=_SHORTEST_PREFIX[dialect],
            on_death=self._engine_died,
        )
        self._socket = _bind(host, port)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self.ended = False
        self._server: _Uvicorn
        self._exit_process: Callable[[int], object] = lambda _: self._cut_all()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None

    async def run(
        self,
        *,
        on_ready: Callable[[], None],
        exit_process: Callable[[int], object] | None = None,
        handle_signals: bool = False,
    ) -> None:
        """Serve until stopped.

        Args:
            on_ready: Called when the server accepts.
            exit_process: Called with the status when the engine dies; `None` to close every connection and stop.
            handle_signals: Whether SIGTERM and SIGINT stop the server; main thread only.

        Cancellation: connections are closed, and the scheduler is stopped.
        """
        if exit_process is not None:
            self._exit_process = exit_process
        self._loop = asyncio.get_running_loop()
        self._engine.start()
        config = uvicorn.Config(
            _APPLICATIONS[self._dialect](self._engine),
            lifespan="off",
            log_level="critical",
            access_log=False,
            date_header=False,
            ws="none",
            timeout_keep_alive=60,
            backlog=2048,
        )
        self._server = _Uvicorn(config, on_ready)
        if handle_signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self.stop)
        parent = asyncio.ensure_future(self._end_with(os.getppid())) if self._options.exit_with_parent else None
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if parent is not None:
                parent.cancel()
            self.ended = await asyncio.to_thread(self._engine.stop, _GRACE_SECONDS)

    def stop(self) -> None:
        """Abort what is in flight and stop serving; call it on the loop."""
        for generation in tuple(self._engine.in_flight):
            generation.end(Finish("abort", message="Aborted"))
        self._server.end()
        self._loop.call_later(_GRACE_SECONDS, self._cut_all)

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.run(on_ready=ready.set)), name="embedded-server", daemon=True
        )
        self._thread.start()
        ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        thread = self._thread
        if thread is not None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.stop)
            thread.join()

    def _engine_died(self, engine: Engine) -> None:
        """Do to the callers what the real server does to them, and end."""
        if self._dialect == "vllm":
            for generation in tuple(engine.in_flight):
                generation.fail(EngineDeadError(str(engine.dead)))
        self._loop.call_later(self._options.death_seconds, self._exit_process, 1)

    def _cut_all(self) -> None:
        self._server.force_exit = True
        self._server.end()
        for connection in tuple(self._server.server_state.connections):
            transport: asyncio.Transport = connection.transport
            transport.abort()

    async def _end_with(self, parent: int) -> None:
        # Not PR_SET_PDEATHSIG: that fires when the thread that started this process ends, not the process.
        while os.getppid() == parent:  # noqa: ASYNC110 - the kernel offers no event for this on every system
            await asyncio.sleep(_PARENT_POLL_SECONDS)
        self.stop()


class _Uvicorn(uvicorn.Server):
    """Uvicorn that says when it accepts, ends at once and not at its next tick, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        # The ticks that this replaces serve the date header and a limit of requests; neither is wanted here.
        await self._ending.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound socket.

    asyncio turns Nagle's algorithm off only where a socket says that it is TCP, which `socket.create_server` leaves
    open; with it on, every answer to an idle client takes the 40 ms of a delayed acknowledgement.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol or socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
