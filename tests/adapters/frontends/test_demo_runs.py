"""The demo as a person runs it, and as the world ends it. Few runs, because each starts real engines."""

import json
import os
import signal
from pathlib import Path

import pytest

from lifecycle.trace import verify_file

from .demos import KEYS, demo


@pytest.mark.parametrize(
    ("dialect", "transfer", "engines", "mode"), [("sglang", "broadcast", 2, "abort"), ("vllm", "disk", 1, "keep")]
)
def test_the_demo_runs(tmp_path: Path, dialect: str, transfer: str, engines: int, mode: str) -> None:
    """Three steps end with a sound journal, every pause matched, a complete summary, and exit code 0."""
    out, file = tmp_path / "run", tmp_path / "there" / "summary.json"
    options = ["--steps", "3", "--dialect", dialect, "--transfer", transfer, "--engines", str(engines)]
    with demo(out, *options, "--pause-mode", mode, "--json", str(file)) as running:
        code, printed = running.ended()
        assert code == 0, printed
        assert running.nobody_left()
    summary = json.loads(file.read_text())
    verdict = verify_file(out / "journal.jsonl")
    assert list(summary) == KEYS
    assert (summary["steps"], summary["version"], summary["unmatched"]) == (3, 3, 0)
    assert summary["pauses"] == summary["continues"] == verdict.pauses == 3 * engines
    assert summary["max_staleness_seen"] <= 2
    assert summary["tokens"] == verdict.tokens > 0
    assert 0 <= summary["reward_first"] <= 1
    assert 0 <= summary["reward_last"] <= 1
    assert summary["pause_seconds_max"] >= summary["pause_seconds_p50"] > 0
    assert summary["transfer_seconds_p50"] > 0
    assert summary["bytes_per_publication"] > 100_000
    assert summary["verdict"] == str(verdict)
    assert verdict.sound
    assert verdict.closed
    assert (out / "lifecycle.mmd").read_text().startswith("---\ntitle: ")
    assert (out / "lifecycle.md").read_text().startswith("| trigger |")
    assert "unmatched 0\n" in printed
    assert max(map(len, printed.splitlines())) <= 80 + len(str(out))


def test_ctrl_c_ends_the_demo(tmp_path: Path) -> None:
    """Ended in the middle of a publication, it closes: exit code 130, no engine left, a sound journal, no debt."""
    with demo(tmp_path, "--steps", "99") as running:
        running.until("TransferWeights", target=1)
        running.process.send_signal(signal.SIGINT)
        code, printed = running.ended()
        assert code == 130, printed
        assert running.nobody_left()
    verdict = verify_file(tmp_path / "journal.jsonl")
    assert verdict.sound
    assert verdict.closed
    assert "Traceback" not in printed


def test_the_demo_goes_on_without_an_engine_that_dies(tmp_path: Path) -> None:
    """One engine of two dies in a publication: the other goes on, and the run ends as it should."""
    with demo(tmp_path, "--steps", "3", "--dialect", "vllm", "--json", str(tmp_path / "summary.json")) as running:
        running.until("BeginUpdate", target=2)
        os.killpg(running.engines[0], signal.SIGKILL)
        code, printed = running.ended()
        assert code == 0, printed
        assert running.nobody_left()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["version"]) == (3, 3)
    assert "engine-0 died; the others went on without it\n" in printed
    assert verify_file(tmp_path / "journal.jsonl").sound


@pytest.mark.parametrize("engines", [1, 2])
def test_the_demo_says_that_no_engine_is_left(tmp_path: Path, engines: int) -> None:
    """Every engine dies in a publication: it ends with one clear sentence and exit code 1, and does not hang."""
    with demo(tmp_path, "--steps", "99", "--engines", str(engines)) as running:
        running.until("TransferWeights", target=1)
        for pid in running.engines:
            os.killpg(pid, signal.SIGKILL)
        code, printed = running.ended()
        assert code == 1, printed
        assert running.nobody_left()
    names = " and ".join(f"engine-{number}" for number in range(engines))
    assert f"the demo ended early: {names} died, and nothing could go on: " in printed
    assert "Traceback" not in printed
    assert verify_file(tmp_path / "journal.jsonl").sound
