"""The engine as a process: how it starts, how it ends, and what kills it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from . import test_sglang_generation as sglang
from . import test_vllm_generation as vllm
from .client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .conftest import Serve

WAIT_SECONDS = 20


class Process:
    """A running engine: its process, a client of it, and how it ended."""

    def __init__(self, process: subprocess.Popen[str], client: Client) -> None:
        self.process, self.client = process, client

    def status(self) -> int:
        """Wait for its end."""
        return self.process.wait(WAIT_SECONDS)

    def terminate(self) -> int:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)
        return self.status()


def command(dialect: str, model: Path, *more: str, **options: Any) -> list[str]:
    """The command line of an engine."""
    line = [sys.executable, "-m", "adapters.engines.embedded", "--dialect", dialect, "--model", str(model)]
    return [*line, "--options", json.dumps({"pause_poll_seconds": 0.01, "death_seconds": 0.05, **options}), *more]


@contextmanager
def engine(dialect: str, model: Path, **options: Any) -> Iterator[Process]:
    """Run an engine in a process group of its own, which does not outlive the block."""
    process = subprocess.Popen(
        command(dialect, model, exit_with_parent=True, **options),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip().removeprefix("listening on ")
        with Client(url) as client:
            yield Process(process, client)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_signal_ends_it_with_requests_in_flight(old: Path) -> None:
    """SIGTERM answers a running request as aborted, also one that was kept by a pause, and ends with status 0."""
    with engine("vllm", old, forward_sleep_seconds=0.005) as running:
        answer = vllm.in_flight(running.client, vllm.body(1500))
        running.client.ok("/pause", mode="keep")
        assert running.terminate() == 0
        assert vllm.choice(answer)["finish_reason"] == "abort"


def test_a_signal_ends_it_while_the_scheduler_is_blocked(old: Path) -> None:
    """SIGTERM works although a rendezvous that nobody hosts holds the scheduler."""
    with engine("sglang", old) as running, socket.create_server(("127.0.0.1", 0)) as silent:
        where = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "rank_offset": 1}
        joining = running.client.later("/init_weights_update_group", {**where, "world_size": 2, "backend": "gloo"})
        silent.accept()[0].close()
        assert not joining.done()
        assert running.terminate() == 0
        with pytest.raises(httpx.TransportError):
            joining.result(WAIT_SECONDS)


def test_generation_inside_a_session_kills_vllm(old: Path) -> None:
    """A request after start, before a finish, gets 500, and the process exits."""
    with engine("vllm", old) as running:
        running.client.ok("/start_weight_update")
        response = running.client.post(vllm.COMPLETIONS, vllm.body(2))
        assert response.status_code == 500
        assert response.json()["error"]["message"].startswith("EngineCore encountered an issue")
        assert running.status() == 1


def test_resume_after_a_failed_update_kills_vllm_and_its_streams(old: Path) -> None:
    """The failed session leaves no weights: a kept stream ends in an error event, with status 200, and all dies."""
    with engine("vllm", old, forward_sleep_seconds=0.005) as running:
        client = running.client
        with client.stream(vllm.COMPLETIONS, vllm.body(1500)) as events:
            next(events)
            client.ok("/pause", mode="keep")
            client.ok("/start_weight_update")
            assert client.post("/update_weights", {"update_info": {"nope": 1}}).status_code == 500
            assert client.get("/health").status_code == 200
            client.later("/resume")
            assert list(events)[-2:] == [
                {
                    "error": {
                        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                        "type": "InternalServerError",
                        "param": None,
                        "code": 500,
                    }
                },
                "[DONE]",
            ]
        assert running.status() == 1


@pytest.mark.parametrize("trap", ["load format", "shape", "truncated"])
def test_a_bad_checkpoint_kills_sglang_without_an_answer(old: Path, new: Path, tmp_path: Path, trap: str) -> None:
    """An unknown load format, a tensor of a wrong shape and half a file drop the connection and end the process."""
    bad = shutil.copytree(new, tmp_path / "bad")
    weights = bad / "model.safetensors"
    if trap == "shape":
        save_file({**load_file(weights), "lm_head.weight": torch.zeros(3)}, weights)
    elif trap == "truncated":
        weights.write_bytes(weights.read_bytes()[:2000])
    with engine("sglang", old) as running:
        update = {"model_path": str(bad), "load_format": "bogus" if trap == "load format" else None}
        with pytest.raises(httpx.TransportError):
            running.client.post("/update_weights_from_disk", update)
        assert running.status() == 1


@pytest.mark.parametrize("call", ["release", "resume"])
def test_misused_memory_calls_kill_sglang(old: Path, call: str) -> None:
    """Releasing memory under a running request, and taking it without a release, end the process."""
    with engine("sglang", old, forward_sleep_seconds=0.005) as running:
        if call == "release":
            answer = sglang.in_flight(running.client, 1500)
        with pytest.raises(httpx.TransportError):
            running.client.post(f"/{call}_memory_occupation", {})
        assert running.status() == 1
        if call == "release":
            with pytest.raises(httpx.TransportError):
                answer.result(WAIT_SECONDS)


def test_it_ends_with_the_process_that_started_it(old: Path) -> None:
    """With `exit_with_parent`, an engine whose parent is killed goes away by itself."""
    program = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    line = command("sglang", old, exit_with_parent=True)
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *line], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("listening on http://127.0.0.1:")
        parent.kill()
        # The pipe ends when its last writer is gone, which is the engine.
        assert parent.stdout.read() == ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()


def test_it_says_in_a_line_why_it_does_not_start(old: Path, tmp_path: Path) -> None:
    """No checkpoint, a port that is taken and options that make no sense end it with status 2 and a reason."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for line, reason in (
            (command("vllm", tmp_path), "config.json does not exist"),
            (command("vllm", old, "--port", port), "Address already in use"),
            (command("vllm", old, bogus=1), "unexpected keyword argument 'bogus'"),
            (command("vllm", old, max_running_requests=0), "must be >= 1"),
        ):
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
            assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
            assert "Traceback" not in done.stderr


def test_importing_the_package_loads_no_torch() -> None:
    """The package and its options can be imported where torch is missing or slow to come."""
    program = (
        "import sys; import adapters.engines.embedded as e; e.EngineOptions(); e.DIALECTS; "
        "sys.exit('torch' in sys.modules or 'uvicorn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=WAIT_SECONDS).returncode == 0


def test_a_trap_in_a_thread_spares_the_process(serve: Serve, old: Path) -> None:
    """An engine that dies in a thread of the test drops its connections, and nothing else ends."""
    client = serve("sglang", old, death_seconds=0.0)
    with pytest.raises(httpx.TransportError):
        client.post("/resume_memory_occupation", {})


def test_traps_can_be_made_harmless(serve: Serve, old: Path) -> None:
    """With `lethal_traps` off, the call that would have killed SGLang gets 400, and generation goes on."""
    client = serve("sglang", old, lethal_traps=False)
    response = client.post("/resume_memory_occupation", {})
    assert (response.status_code, response.json()["success"]) == (400, False)
    assert client.ok("/generate", sglang.body(1))["meta_info"]["completion_tokens"] == 1


def test_an_unknown_dialect_is_refused(old: Path) -> None:
    """Only the two dialects can be served."""
    from adapters.engines.embedded import EmbeddedServer  # noqa: PLC0415

    with pytest.raises(ValueError, match="dialect 'tgi' is none of sglang, vllm"):
        EmbeddedServer(dialect="tgi", model=old)
