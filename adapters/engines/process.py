"""An embedded engine in a process of its own, started and ended with a `with` block."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from .http import HttpEngine, SGLangEngine, VLLMEngine

_READY = re.compile(r"listening on (http://\S+)")
_ENGINES: Mapping[str, Callable[..., HttpEngine]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}


class EmbeddedEngine:
    """An embedded CPU engine that serves one of the dialects from a process group of its own.

    Use it as a context manager, `with` or `async with`, or call `start()` and `stop()`. `engine` is the `HttpEngine` to
    it; it is closed by `async with` only, since closing connections needs the event loop they were made in.

    Args:
        model: Directory of the checkpoint to serve.
        dialect: `"sglang"` or `"vllm"`.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.
        name: Name of `engine` in the fleet; `None` for `host:port`.
        start_seconds: How long it may take until it listens.
        stop_seconds: How long it may take to end after SIGTERM, before SIGKILL.
        options: Fields of `adapters.engines.embedded.options.EngineOptions`, such as `{"max_running_requests": 8}`.
            Unless it says otherwise, the engine ends with this process.
        environment: Variables to set besides those of this process.

    Raises:
        ValueError: The dialect is not known, or a time makes no sense.
    """

    def __init__(
        self,
        *,
        model: str | os.PathLike[str],
        dialect: str = "sglang",
        host: str = "127.0.0.1",
        port: int = 0,
        name: str | None = None,
        start_seconds: float = 120.0,
        stop_seconds: float = 10.0,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if dialect not in _ENGINES:
            raise ValueError(f"dialect must be one of {sorted(_ENGINES)}, got {dialect!r}")
        if start_seconds <= 0 or stop_seconds <= 0:
            raise ValueError("start_seconds and stop_seconds must be positive")
        self._dialect = dialect
        self._name = name
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._environment = dict(environment or {})
        self._command = [sys.executable, "-m", "adapters.engines.embedded", "--dialect", dialect]
        self._command += ["--model", str(Path(model)), "--host", host, "--port", str(port)]
        self._command += ["--options", json.dumps({"exit_with_parent": True, **(options or {})})]
        self._process: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []
        self._last_words: deque[str] = deque(maxlen=20)
        self._listening = threading.Event()
        self._url: str | None = None
        self._engine: HttpEngine | None = None

    def __repr__(self) -> str:
        return f"EmbeddedEngine(dialect={self._dialect!r}, url={self._url!r})"

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group. Raises `RuntimeError` before `start()`."""
        return self._started().pid

    @property
    def url(self) -> str:
        """Base URL. Raises `RuntimeError` before `start()`."""
        self._started()
        return str(self._url)

    @property
    def engine(self) -> HttpEngine:
        """The `HttpEngine` to it. Raises `RuntimeError` before `start()`."""
        self._started()
        if self._engine is None:
            raise RuntimeError("the embedded engine does not listen yet")
        return self._engine

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start it and return once it listens. A stopped one starts anew, as another incarnation.

        Raises `RuntimeError` when it is running already, or when it ends or says nothing within `start_seconds`; the
        message ends with its last lines.
        """
        if self.running:
            raise RuntimeError("the embedded engine is running already")
        self._listening.clear()
        self._last_words.clear()
        self._url = self._engine = None
        self._process = subprocess.Popen(  # noqa: S603 - the command is our own interpreter
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A group of its own: Ctrl-C in the trainer does not reach it, and its children end with it.
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._environment},
        )
        streams = [s for s in (self._process.stdout, self._process.stderr) if s is not None]
        self._readers = [threading.Thread(target=self._read, args=(s,), daemon=True) for s in streams]
        for reader in self._readers:
            reader.start()
        try:
            self._wait_until_listening()
        except BaseException:
            self.stop()
            raise
        self._engine = _ENGINES[self._dialect](str(self._url), name=self._name)
        return self

    def stop(self) -> None:
        """End its process group: SIGTERM, then after `stop_seconds` SIGKILL. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        # A leader that was reaped before may have left its group's id to somebody else.
        if process.poll() is None:
            try:
                _signal(process, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(self._stop_seconds)
            finally:
                # Also when the leader has just ended: its children are in the group.
                _signal(process, signal.SIGKILL)
                process.wait()
        for reader in self._readers:
            reader.join(timeout=self._stop_seconds)
        self._readers = []

    def kill(self) -> None:
        """End its process group at once, as a crash would, and return when it is gone. `stop()` is still due."""
        process = self._started()
        _signal(process, signal.SIGKILL)
        process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        """Start it in a worker thread.

        Cancellation: waits until it listens or has failed, then ends it.
        """
        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.start)
            await anyio.lowlevel.checkpoint()
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            if self._engine is not None:
                await self._engine.aclose()
            await anyio.to_thread.run_sync(self.stop)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the embedded engine is not started")
        return self._process

    def _read(self, stream: IO[str]) -> None:
        """Read a stream to its end, so that the engine never blocks on a full pipe."""
        with stream:
            for line in stream:
                self._last_words.append(line.rstrip()[:500])
                if not self._listening.is_set() and (found := _READY.search(line)):
                    self._url = found[1]
                    self._listening.set()

    def _wait_until_listening(self) -> None:
        process = self._started()
        deadline = time.monotonic() + self._start_seconds
        # The event alone would not notice that the process has ended.
        while not self._listening.wait(0.05):
            if process.poll() is not None:
                for reader in self._readers:
                    reader.join(timeout=1.0)
                raise RuntimeError(f"the embedded engine ended with code {process.returncode}; {self._quoted()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the embedded engine did not listen in {self._start_seconds} s; {self._quoted()}")

    def _quoted(self) -> str:
        return "its last lines: " + " | ".join(self._last_words) if self._last_words else "it said nothing"


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal the whole process group, which has the leader's id."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
