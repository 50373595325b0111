"""Trainers at work, in processes of their own: until they are dead."""

import multiprocessing
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.synchronize import Event

from attrs import frozen

from tests.adapters.frontends.commandline import COMMAND

from .seeds import Chance
from .trainer import Life, live

_PATIENCE = 60.0
_processes = multiprocessing.get_context("forkserver")
# Torch takes seconds to import: once is enough.
_processes.set_forkserver_preload(["tests.chaos.trainer"])


@frozen(kw_only=True)
class Victim:
    """A trainer's process."""

    pid: int
    begin: Callable[[], object]
    """Let it begin, where it waits for that."""
    kill: Callable[[], None]
    wait: Callable[[float], int | None]
    """Wait so many seconds for its end. Returns the exit code, `None` while it lives."""


def at_work(chance: Chance, life: Life) -> AbstractContextManager[Victim]:
    """Start the trainer that `chance` has chosen, and see to it that nothing of it is left."""
    return _demo(life) if chance.demo else _trainer(life)


def die(victim: Victim, chance: Chance, life: Life) -> None:
    """Let it work, and be killed when `chance` says."""
    victim.begin()
    if chance.dies is None:
        while not (life.journal.exists() and b'"GenerationReleased"' in life.journal.read_bytes()):
            _expect(victim.wait(0.02) is None, "the trainer ended by itself")
        _expect(victim.wait(chance.seconds) is None, "the trainer ended by itself")
        victim.kill()
    _expect(victim.wait(_PATIENCE) == -signal.SIGKILL, "the trainer was not killed")


def _live_from(begun: Event, life: Life) -> None:
    begun.wait()
    live(life)


@contextmanager
def _trainer(life: Life) -> Iterator[Victim]:
    begun = _processes.Event()
    process = _processes.Process(target=_live_from, args=(begun, life), daemon=True)
    process.start()

    def wait(seconds: float) -> int | None:
        process.join(seconds)
        return process.exitcode

    try:
        yield Victim(pid=process.pid or 0, begin=begun.set, kill=process.kill, wait=wait)
    finally:
        process.kill()
        process.join()


@contextmanager
def _demo(life: Life) -> Iterator[Victim]:
    engines = [option for url in life.urls for option in ("--engine", url)]
    kind = ["--dialect", life.dialect, "--transfer", life.transfer, "--pause-mode", life.pause_mode.value]
    size = ["--steps", "999", "--groups", "4", "--group-size", "4", "--out", str(life.out)]
    process = subprocess.Popen([*COMMAND, "demo", *engines, *kind, *size], stdout=subprocess.DEVNULL)

    def wait(seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode

    try:
        yield Victim(pid=process.pid, begin=lambda: None, kill=process.kill, wait=wait)
    finally:
        process.kill()
        process.wait()


def _expect(held: bool, otherwise: str) -> None:
    if not held:
        raise RuntimeError(otherwise)
