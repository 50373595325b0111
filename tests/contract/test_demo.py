"""The demo trains against a running server: what a newcomer does with a vLLM or an SGLang of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import attrs
import httpx
import pytest

from .engines.servers import KINDS, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENGINES = {"sglang", "vllm"}
COMMAND = [sys.executable, "-m", "adapters"]
STEPS = 40
"""After so many, five seeds of five had more than twice the reward of guessing, in the precision of either server."""
GUESSING = 1 / 32
RISEN = 1.6 * GUESSING
"""Five deviations above what a policy that learns nothing gets over the last steps, and as many below what was seen."""
SECONDS = 600.0


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The engine, serving what `demo-model` writes."""
    kind = KINDS[request.param]
    model = tmp_path_factory.mktemp("demo") / "model"
    subprocess.run([*COMMAND, "demo-model", str(model), "--seed", "5"], check=True, stdout=subprocess.DEVNULL)
    # One thread: a second one would mostly wait, burning what the trainer needs.
    kind = attrs.evolve(kind, environment={**kind.environment, "OMP_NUM_THREADS": "1"})
    server = Server(kind, model, tmp_path_factory.mktemp("logs") / f"{kind.name}-demo.log")
    try:
        server.start()
        yield server
    finally:
        server.stop()


def test_the_demo_learns_against_a_running_server(server: Server, tmp_path: Path) -> None:
    """The reward rises well above guessing, every pause is matched, and the server goes on with the last version."""
    summary = tmp_path / "summary.json"
    options = ["--engine", server.url, "--dialect", server.kind.dialect, "--steps", str(STEPS)]
    result = subprocess.run(
        [*COMMAND, "demo", *options, "--out", str(tmp_path), "--json", str(summary)],
        capture_output=True,
        text=True,
        check=False,
        timeout=min(SECONDS, 30 * server.kind.patience),
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert result.returncode == 0, f"{result.stdout}{result.stderr}\n{server.last_words()}"
    told = json.loads(summary.read_text())
    assert (told["steps"], told["version"], told["unmatched"]) == (STEPS, STEPS, 0)
    assert told["reward_first"] < RISEN < told["reward_last"], told
    assert told["verdict"].startswith("sound: ")
    run = json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[0])["name"]
    label = {"sglang": "/model_info", "vllm": "/weight_info"}[server.kind.dialect]
    with httpx.Client(base_url=server.url, timeout=server.kind.patience, trust_env=False) as client:
        assert client.get(label).json()["weight_version"] == f"{run}:{STEPS}"
        assert client.get(server.kind.ready).status_code == 200
        if server.kind.dialect == "vllm":
            assert client.get("/is_paused").json() == {"is_paused": False}
