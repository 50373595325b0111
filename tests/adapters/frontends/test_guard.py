"""The dead man's switch: nothing while the trainer lives, everything that is owed once it is dead, and only once."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import define, evolve
from typer.testing import CliRunner, Result

from adapters.engines import EmbeddedEngine
from adapters.frontends import guard as guarding
from adapters.frontends.cli import app
from adapters.frontends.evidence import Evidence
from lifecycle import State, Trigger, events
from tests.virtual_time import on_virtual_clock

from .commandline import COMMAND, run
from .patients import DIRTY, NAME, PAUSED, UNCERTAIN, Door, door, journal_of, met, opened, pause, report_of, written

SECONDS = 60.0
CLOSED = events.TransitionCommitted(trigger=Trigger.CLOSE, source=State.RUNNING, target=State.CLOSED)


@define
class Watch:
    """A guard at work."""

    process: subprocess.Popen[str]
    trainer: subprocess.Popen[bytes]

    def kill_trainer(self) -> tuple[int, str]:
        """End the trainer as a crash would; return the guard's exit code and what it said."""
        assert self.process.poll() is None, "it did not wait"
        self.trainer.kill()
        said, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, said


@contextmanager
def guard(journal: Path, *options: str) -> Iterator[Watch]:
    """Let a guard watch over a process that stands for the trainer."""
    # It ends by itself if this process does.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as trainer:
        command = [*COMMAND, "guard", "--journal", str(journal), "--pid", str(trainer.pid), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first == f"guarding {journal}: waiting for the end of process {trainer.pid}\n"
            yield Watch(process, trainer)
        finally:
            process.kill()
            process.communicate()
            trainer.kill()


def invoke(*arguments: str | Path) -> Result:
    """Call the guard in this process."""
    return CliRunner().invoke(app, ["guard", *map(str, arguments)], env={"COLUMNS": "80", "NO_COLOR": "1"})


def known_as(entrance: Door, engine: EmbeddedEngine, journal: Path, *happened: events.Event) -> Path:
    """Write a journal in which the engine is known by another door."""
    return written(journal, opened(entrance.url), met(engine), *happened)


# -------------------------------------------------------------------------------------------------------------- the end


def test_nothing_is_done_while_the_trainer_lives(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """What is owed in the meantime is the trainer's business: the journal is read at its death, and not before."""
    journal = tmp_path / "journal"
    pause(patient)
    with door(patient) as early, door(patient) as late:
        known_as(early, patient, journal, *PAUSED)
        with guard(journal) as watch:
            written(journal, events.DebtSettled(engine=NAME), CLOSED)
            known_as(late, patient, journal, *PAUSED)
            assert (early.visitors, late.visitors) == (0, 0)
            code, said = watch.kill_trainer()
        assert early.visitors == 0
        assert late.visitors > 0
    assert (code, said) == (0, f"{NAME}: released\n")
    assert report_of(patient).paused is False


@pytest.mark.parametrize("debt", [PAUSED, UNCERTAIN])
def test_what_a_killed_trainer_left_is_released_once(
    patient: EmbeddedEngine, tmp_path: Path, debt: tuple[events.Event, ...]
) -> None:
    """The journal comes after the guard, and may end in a torn line; having acted, the guard is gone."""
    journal = tmp_path / "later" / "journal"
    with guard(journal) as watch:
        pause(patient)
        journal_of(journal, patient, *debt)
        with journal.open("ab") as file:
            file.write(b'{"event":"EngineDir')
        assert watch.kill_trainer() == (0, f"{NAME}: released\n")
    assert report_of(patient).paused is False


def test_a_dirty_engine_is_named_and_left(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """Exit code 1: somebody has to look after it."""
    pause(patient)
    with guard(journal_of(tmp_path / "journal", patient, *DIRTY)) as watch:
        code, said = watch.kill_trainer()
    assert (code, said) == (1, f"{NAME}: left: its weights may be partly written; a publication cures it\n")
    assert report_of(patient).paused


def test_an_engine_that_is_gone_is_named(tmp_path: Path) -> None:
    """Exit code 1 as well, also where the journal does not say where it was."""
    for address, reason in (("http://127.0.0.1:1", "no connection could be made"), ("", "the journal does not tell")):
        with guard(written(tmp_path / f"journal{len(address)}", opened(address), *PAUSED)) as watch:
            code, said = watch.kill_trainer()
        assert code == 1
        assert said.startswith(f"{NAME}: unreachable: {reason}")


def test_what_a_closed_lifecycle_still_owes_is_released(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """CLOSE goes on where an engine does not continue: that it has ended does not mean that it has settled all."""
    pause(patient)
    with door(patient) as entrance:
        journal = known_as(entrance, patient, tmp_path / "journal", *PAUSED, CLOSED)
        with guard(journal) as watch:
            assert watch.kill_trainer() == (0, f"{NAME}: released\n")
    assert not report_of(patient).paused


def test_nothing_is_done_where_nothing_is_owed(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """No journal, a closed lifecycle, or engines that run: exit code 0, and nobody is asked anything."""
    with door(patient) as entrance:
        cases = [
            (tmp_path / "missing", "no engine was left paused: nothing to release\n"),
            (known_as(entrance, patient, tmp_path / "runs"), "no engine was left paused: nothing to release\n"),
            (
                known_as(entrance, patient, tmp_path / "closed", CLOSED),
                "the trainer has closed its lifecycle: nothing to release\n",
            ),
        ]
        for journal, says in cases:
            with guard(journal) as watch:
                assert watch.kill_trainer() == (0, says)
        assert entrance.visitors == 0


@pytest.mark.parametrize("watching", [("--pid", "1"), ("--heartbeat", "5")])
def test_a_damaged_journal_is_told_before_anything_is_waited_for(tmp_path: Path, watching: tuple[str, ...]) -> None:
    """Exit code 2, with the line."""
    journal = tmp_path / "journal"
    journal.write_text("no journal\n")
    result = invoke("--journal", journal, *watching)
    assert result.exit_code == 2
    assert "unreadable-line: line 1: not JSON" in result.stderr


# ---------------------------------------------------------------------------------------------------------- a successor


def test_it_stands_down_for_a_lifecycle_that_opens_the_journal(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """Also in the last moment, between reading the journal and continuing: the engine stays as it is."""
    journal = tmp_path / "journal"
    pause(patient)

    def succeed() -> None:
        written(journal, opened(patient.url))

    with door(patient, succeed) as entrance, guard(known_as(entrance, patient, journal, *PAUSED)) as watch:
        code, said = watch.kill_trainer()
    assert code == 0
    assert said.startswith(f"{NAME}: stood down: the journal was written meanwhile")
    assert report_of(patient).paused


def test_it_stands_down_for_a_lifecycle_that_came_first(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """Lines that are younger than the death are not the dead trainer's."""
    after_the_death = evolve(opened("http://127.0.0.1:1"), at=sys.maxsize)
    pause(patient)
    with guard(journal_of(tmp_path / "journal", patient, *PAUSED, after_the_death)) as watch:
        code, said = watch.kill_trainer()
    assert (code, said) == (0, "another lifecycle has opened the journal: it takes care of the engines\n")
    assert report_of(patient).paused


# -------------------------------------------------------------------------------------------------------------- silence


async def _after_silence(journal: Path, *at: tuple[float, events.Event]) -> tuple[Evidence, float]:
    """Let events be written at moments; return what the guard has read then, and when."""
    read: list[Evidence] = []
    with anyio.fail_after(1000):
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                read.append(await guarding._after_silence(journal, 10.0))

            tasks.start_soon(watch)
            began = anyio.current_time()
            for moment, event in at:
                await anyio.sleep(began + moment - anyio.current_time())
                written(journal, event)
    return read[0], anyio.current_time() - began


def _virtually(*arguments: Any) -> tuple[Evidence, float]:
    options = on_virtual_clock("asyncio")
    return anyio.run(_after_silence, *arguments, backend_options=options)


def test_a_trainer_that_writes_is_alive(tmp_path: Path) -> None:
    """As long as lines come it is not silent, however long the pause is; without one for SECONDS it is."""
    writing = [(float(second), evolve(PAUSED[1], at=float(second))) for second in range(1, 100, 4)]
    evidence, seconds = _virtually(tmp_path / "journal", (0.0, opened("")), (0.5, PAUSED[0]), *writing)
    assert list(evidence.owing) == [NAME]
    assert 97 + 10 <= seconds <= 97 + 20


def test_a_silent_trainer_whose_engines_run_is_left_alone(tmp_path: Path) -> None:
    """Nothing is to be released then: it computes; the pause that comes later is what counts."""
    written(tmp_path / "journal", opened(""))
    evidence, seconds = _virtually(tmp_path / "journal", (500.0, PAUSED[0]))
    assert list(evidence.owing) == [NAME]
    assert 500 + 10 <= seconds <= 500 + 20


def test_a_trainer_that_has_not_come_yet_is_waited_for(tmp_path: Path) -> None:
    """The journal need not exist, or may be one that was closed before; that it is closed later ends the watch."""
    for before in ((), (opened(""), *PAUSED, CLOSED)):
        journal = tmp_path / f"journal{len(before)}"
        if before:
            written(journal, *before)
        evidence, seconds = _virtually(journal, (300.0, opened("")), (305.0, CLOSED))
        assert evidence.history.closed
        assert 305 + 10 <= seconds <= 305 + 20


def test_silence_releases(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """Where no process can be watched, the engines of a journal that stays silent are released."""
    pause(patient)
    result = invoke("--journal", journal_of(tmp_path / "journal", patient, *PAUSED), "--heartbeat", "0.1")
    assert result.exit_code == 0
    assert result.stdout.endswith(f"\n{NAME}: released\n")
    assert report_of(patient).paused is False


# --------------------------------------------------------------------------------------------------------------- usage


def test_a_journal_has_one_guard(tmp_path: Path) -> None:
    """The second refuses, and the first goes on; the lock ends with it."""
    journal = tmp_path / "journal"
    with guard(journal) as watch:
        second = run("guard", "--journal", journal, "--pid", str(watch.trainer.pid))
        assert (second.returncode, second.stderr) == (2, f"another guard watches {journal}\n")
        assert watch.kill_trainer()[0] == 0
    with guard(journal) as watch:
        assert watch.kill_trainer()[0] == 0


def test_ctrl_c_is_for_the_trainer(tmp_path: Path) -> None:
    """From one terminal it reaches both: the guard stays until the trainer is gone."""
    with guard(tmp_path / "journal") as watch:
        watch.process.send_signal(signal.SIGINT)
        assert watch.kill_trainer()[0] == 0


def test_a_process_that_is_not_there_is_no_proof_of_a_death(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """It may be one of another namespace: nothing is touched, and the doctor is recommended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    pause(patient)
    result = invoke("--journal", journal_of(tmp_path / "journal", patient, *PAUSED), "--pid", str(gone.pid))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"process {gone.pid} cannot be watched: ")
    assert result.stderr.endswith("; if it is dead, use doctor --release\n")
    assert report_of(patient).paused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "give either --pid or --heartbeat"),
        (("--pid", "1", "--heartbeat", "5"), "give either --pid or --heartbeat"),
        (("--heartbeat", "0"), "--heartbeat"),
        (("--pid", "0"), "--pid"),
        (("--pid", "1", "--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY holds no API key"),
    ],
)
def test_bad_usage_is_told(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    """Exit code 2, before anything is waited for."""
    result = invoke("--journal", tmp_path / "journal", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    unwritable = invoke("--journal", "/dev/null/journal", "--pid", "1")
    assert (unwritable.exit_code, "cannot be written" in unwritable.stderr) == (2, True)
