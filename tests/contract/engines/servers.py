"""Start and end the engines of the suite, each in a process group of its own, with what it says kept in a file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import httpx

from .install import ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KINDS", "Kind", "Server", "vllm_command"]

_HERE = Path(__file__).parent
_POLL = 0.1
_TERM_SECONDS = 15.0

# What a server is not told by this machine's settings, but by this file alone. Its threads are few, since they wait for
# each other by spinning, and so take the time of whatever else runs on a small machine.
_QUIET = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@attrs.frozen(kw_only=True)
class Kind:
    """An engine that the suite can be run against.

    Args:
        name: What `--engines` calls it.
        dialect: "sglang" or "vllm".
        command: Builds the command line from a model's directory and a port.
        environment: Variables to set.
        ready: Path that answers 200 when it serves.
        start_seconds: How long that may take.
        patience: Seconds after which an answer that must come is given up.
        agreeable: Whether it answers 200 to everything, so that every test must fail against it.
    """

    name: str
    dialect: str
    command: Callable[[Path, int], list[str]]
    ready: str
    environment: dict[str, str] = attrs.field(factory=dict)
    start_seconds: float = 60.0
    patience: float = 20.0
    agreeable: bool = False


class Server:
    """One engine, running or not.

    Args:
        kind: What it is.
        model: Directory of the checkpoint to serve.
        log: File that what it says is appended to.
    """

    def __init__(self, kind: Kind, model: Path, log: Path) -> None:
        self.kind, self.model, self.log = kind, model, log
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Where it listens, or listened last."""
        return httpx.URL(self.url).port or 0

    @property
    def alive(self) -> bool:
        """Whether its process runs and its socket listens."""
        return self._process is not None and self._process.poll() is None and self._listens()

    def start(self, port: int | None = None) -> None:
        """Start it on `port`, a free one where none is given, and return when it serves.

        Raises `RuntimeError` with its last words otherwise.
        """
        self.stop()
        port = port or _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("ab") as said:
            self._process = subprocess.Popen(
                ["nice", *self.kind.command(self.model, port)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                # Its own group, to be ended as a whole, and this session, whose processes are weighed by niceness: an
                # engine that generates should not keep the test from looking on.
                process_group=0,
                env={**os.environ, **_QUIET, **self.kind.environment},
            )
        self._guard = _guarding(self._process.pid)
        deadline = time.monotonic() + self.kind.start_seconds
        try:
            while not self._serves():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.kind.name} did not start; its last words:\n{self.last_words()}")
                time.sleep(_POLL)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End its whole process group: SIGTERM, then SIGKILL to whatever is left. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_SECONDS)
        self._kill(process)

    def kill(self) -> None:
        """End its process group at once."""
        process, self._process = self._process, None
        if process is not None:
            self._kill(process)

    def freeze(self) -> None:
        """Stop its whole process group where it is: it accepts connections, and answers nothing."""
        if self._process is not None:
            _signal(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        if self._process is not None:
            _signal(self._process.pid, signal.SIGCONT)

    def wait_until_gone(self, seconds: float) -> bool:
        """Wait for its process to end by itself, and say whether it did."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                return True
        return False

    def last_words(self, lines: int = 25) -> str:
        """Return the end of what it said."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # Also when the leader has ended: a server that is killed at its start leaves children in the group.
        _signal(process.pid, signal.SIGKILL)
        process.wait()
        if self._guard is not None:
            self._guard.kill()  # before it hears that its work is due: the group's id may be somebody else's by now
            self._guard.communicate()
            self._guard = None

    def _serves(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}{self.kind.ready}", timeout=5.0, trust_env=False).status_code == 200
        return False

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5.0):
            return True
        return False


def _guarding(group: int) -> subprocess.Popen[bytes]:
    """Start what ends the group when this process is gone, however that comes about."""
    script = "import os, sys; sys.stdin.buffer.read(); os.killpg(int(sys.argv[1]), 9)"
    command = [sys.executable, "-S", "-c", script, str(group)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0)


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _sglang(model: Path, port: int) -> list[str]:
    command = [str(ENGINES["sglang"].python), str(_HERE / "sglang_cpu.py"), "--model-path", str(model)]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    # Without a limit the cache takes most of the memory; without sleep-on-idle an idle scheduler burns a core.
    return [*command, "--max-total-tokens", "65536", "--max-running-requests", "16", "--sleep-on-idle"]


def vllm_command(model: Path, port: int, *, backend: str = "gloo", workers: int = 1) -> list[str]:
    """Return the command line of a real vLLM with a weight-transfer backend and so many tensor-parallel workers."""
    command = [str(ENGINES["vllm"].python), str(_HERE / "vllm_cpu.py"), "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--weight-transfer-config", json.dumps({"backend": backend}), "--tensor-parallel-size", str(workers)]
    return [*command, "--enable-scale-out", "--enable-server-load-tracking"]


def _embedded(dialect: str, **options: Any) -> Callable[[Path, int], list[str]]:
    def command(model: Path, port: int) -> list[str]:
        chosen = json.dumps({"exit_with_parent": True, **options})
        command = [sys.executable, "-m", "adapters.engines.embedded", "--dialect", dialect, "--model", str(model)]
        return [*command, "--port", str(port), "--options", chosen]

    return command


def _yes_man(_model: Path, port: int) -> list[str]:
    return [sys.executable, str(_HERE / "yes_man.py"), str(port)]


KINDS = {
    kind.name: kind
    for kind in (
        # The real servers' own delays, shortened where an option allows it: nobody's promise hangs on them.
        Kind(
            name="embedded-sglang",
            dialect="sglang",
            command=_embedded("sglang", pause_poll_seconds=0.02, health_timeout_seconds=0.5, death_seconds=0.1),
            ready="/ready",
        ),
        Kind(name="embedded-vllm", dialect="vllm", command=_embedded("vllm", death_seconds=0.1), ready="/health"),
        Kind(name="sglang", dialect="sglang", command=_sglang, ready="/ready", start_seconds=300.0, patience=120.0),
        Kind(
            name="vllm",
            dialect="vllm",
            command=vllm_command,
            ready="/health",
            # Pinned to a core, as it is by default, its worker starves whatever else the kernel puts there for seconds.
            environment={
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            start_seconds=300.0,
            patience=120.0,
        ),
        # Two that agree to everything, to see that the suite would notice.
        Kind(name="yes-sglang", dialect="sglang", command=_yes_man, ready="/", patience=0.3, agreeable=True),
        Kind(name="yes-vllm", dialect="vllm", command=_yes_man, ready="/", patience=0.3, agreeable=True),
    )
}
