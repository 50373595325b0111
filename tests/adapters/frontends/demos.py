"""A demo that runs in a process of its own, looked on through its journal."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attrs import define

from .commandline import COMMAND

KEYS = [
    "steps",
    "version",
    "reward_first",
    "reward_last",
    "pauses",
    "continues",
    "unmatched",
    "max_staleness_seen",
    "tokens",
    "interrupted_generations",
    "pause_seconds_p50",
    "pause_seconds_max",
    "transfer_seconds_p50",
    "bytes_per_publication",
    "verdict",
]
LIMIT = 120
"""Seconds after which a demo counts as hanging."""


@define
class Running:
    """A demo that runs."""

    process: subprocess.Popen[str]
    out: Path

    @property
    def engines(self) -> list[int]:
        """Process ids, which are also those of the engines' process groups."""
        return [engine["pid"] for engine in json.loads((self.out / "engines.json").read_text())]

    def until(self, event: str, **fields: int | str) -> None:
        """Wait until the journal has a line of this event with these fields."""
        wanted = [f'"event":"{event}"', *(f'"{name}":{json.dumps(value)}' for name, value in fields.items())]
        seen = ""
        while self.process.poll() is None:
            # The demo prints nothing meanwhile; the journal is what tells.
            with suppress(FileNotFoundError), (self.out / "journal.jsonl").open() as journal:
                seen = journal.read()
            if any(all(part in line for part in wanted) for line in seen.splitlines()):
                return
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
        pytest.fail(f"the demo ended before {event}: {self.process.communicate()}")

    def ended(self) -> tuple[int, str]:
        """Wait for the end. Returns the exit code, and what was printed."""
        printed, _ = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, printed

    def nobody_left(self) -> bool:
        """Whether the process groups of all engines are gone."""
        for pid in self.engines:
            with suppress(ProcessLookupError):
                os.killpg(pid, 0)
                return False
        return True


@contextmanager
def demo(out: Path, *options: str) -> Iterator[Running]:
    """Start a demo, and see to it that nothing of it is left."""
    process = subprocess.Popen(
        [*COMMAND, "demo", "--out", str(out), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    running = Running(process, out)
    try:
        yield running
    finally:
        process.kill()
        process.communicate()
        for pid in running.engines if (out / "engines.json").exists() else ():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
