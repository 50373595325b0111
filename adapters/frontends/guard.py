"""`rollout-lifecycle guard`: a dead man's switch, which releases clean engines when their trainer is no more."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import anyio
import typer

from .doctor import key_of, read_evidence
from .evidence import Evidence, mark_of
from .examination import Examined, Options, examine, nowhere
from .exits import FINE, UNREADABLE, VIOLATION, Dialect, fail
from .release import Verdict


def guard(  # noqa: PLR0917 - typer calls it by name
    journal: Annotated[Path, typer.Option(help="Of the trainer; it need not exist yet.")],
    pid: Annotated[int | None, typer.Option(min=1, help="The trainer's process, on this machine.")] = None,
    heartbeat: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Or: how long nothing may be written while engines are paused."),
    ] = None,
    dialect: Annotated[
        Dialect | None, typer.Option(help="What the engines speak.", show_default="found out by asking")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the servers' API key.")
    ] = None,
    patience: Annotated[float, typer.Option(min=0.1, help="Seconds that an engine may take to answer.")] = 60.0,
) -> None:
    """Wait until a trainer dies, then continue the engines that it left paused and whole, once."""
    options = Options(dialect=dialect, api_key=key_of(api_key_env), patience=patience, release=True)
    with _alone(journal):
        # One that cannot be read is told now, and not when somebody has died.
        read_evidence(journal, must_exist=False)
        if pid is not None and heartbeat is None:
            evidence = _after_death(journal, pid)
        elif heartbeat is not None and pid is None:
            evidence = anyio.run(_after_silence, journal, heartbeat)
        else:
            fail(UNREADABLE, "give either --pid or --heartbeat")
        code = _released(evidence, options)
    raise typer.Exit(code)


@contextmanager
def _alone(journal: Path) -> Iterator[None]:
    """Be the only guard of a journal. The lock ends with this process, however it ends; the file stays."""
    import fcntl  # noqa: PLC0415 - the other commands do without

    place = journal.with_name(f"{journal.name}.guard")
    try:
        journal.parent.mkdir(parents=True, exist_ok=True)
        lock = place.open("a", encoding="utf-8")
    except OSError as error:
        fail(UNREADABLE, f"{place} cannot be written: {error}")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail(UNREADABLE, f"another guard watches {journal}")
        yield


# -------------------------------------------------------------------------------------------------------------- waiting


def _after_death(journal: Path, pid: int) -> Evidence:
    """Wait for the end of a process, and return what its journal says then."""
    if not hasattr(os, "pidfd_open"):
        fail(UNREADABLE, "--pid needs Linux 5.3 or newer: use --heartbeat")
    try:
        process = os.pidfd_open(pid)  # of this very process, whoever gets its number later
    except OSError as error:
        # It may be one of another namespace, and alive: nothing is touched on a guess.
        fail(UNREADABLE, f"process {pid} cannot be watched: {error.strerror}; if it is dead, use doctor --release")
    # From one terminal Ctrl-C reaches both: the guard ends with the trainer, not before it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say(f"guarding {journal}: waiting for the end of process {pid}")
    try:
        anyio.run(anyio.wait_readable, process)
    finally:
        os.close(process)
    died_at = time.time()
    evidence = read_evidence(journal, must_exist=False)
    if evidence.last_at > died_at:
        _say("another lifecycle has opened the journal: it takes care of the engines")
        raise typer.Exit(FINE)
    return evidence


async def _after_silence(journal: Path, seconds: float) -> Evidence:
    """Wait until nothing was written for `seconds` while an engine is owed a continue, or until the end is written.

    Cancellation: nothing is left.
    """
    _say(f"guarding {journal}: waiting for {seconds:.3g} s of silence while an engine is paused")
    first = seen = mark_of(journal)
    while True:
        await anyio.sleep(seconds)
        before, seen = seen, mark_of(journal)
        if seen is None or seen != before:
            continue
        evidence = read_evidence(journal, must_exist=False)
        # What was closed before this guard came says nothing of the trainer that is still to open it.
        over = evidence.ended and seen != first
        if over or (evidence.owing and not evidence.ended):
            return evidence


# ------------------------------------------------------------------------------------------------------------ releasing


def _released(evidence: Evidence, options: Options) -> int:
    """Release what may be released, say what became of each engine, and return the exit code."""
    if evidence.ended and not evidence.owing:
        _say("the trainer has closed its lifecycle: nothing to release")
        return FINE
    addresses = evidence.history.addresses
    places = {addresses[name]: name for name in evidence.owing if name in addresses}
    try:
        examined = anyio.run(examine, places, evidence, options) + nowhere(evidence, evidence.owing)
    except ValueError as error:  # an address that is no URL
        _say(str(error))
        return VIOLATION
    for each in examined:
        _say(_told(each))
    if not examined:
        _say("no engine was left paused: nothing to release")
    verdicts = {each.finding.ruling.verdict for each in examined}
    return FINE if all(verdict.good or verdict is Verdict.STOOD_DOWN for verdict in verdicts) else VIOLATION


def _told(examined: Examined) -> str:
    ruling = examined.finding.ruling
    return f"{examined.name}: {ruling.verdict.value}" + (f": {ruling.reason}" if ruling.reason else "")


def _say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()
