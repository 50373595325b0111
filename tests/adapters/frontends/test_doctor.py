"""The doctor: what it tells of engines, and which of them it continues."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from typer.testing import CliRunner, Result

from adapters.engines import EmbeddedEngine
from adapters.frontends.cli import app
from lifecycle import events

from .commandline import run
from .patients import (
    DIRTY,
    NAME,
    PAUSED,
    RUN,
    UNCERTAIN,
    asked,
    journal_of,
    met,
    opened,
    pause,
    report_of,
    written,
)


def doctor(*arguments: str | Path, environment: dict[str, str] | None = None) -> Result:
    """Call the doctor in this process."""
    surroundings = {"COLUMNS": "80", "NO_COLOR": "1", **(environment or {})}
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env=surroundings)


def told(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Call the doctor, and return the exit code and what is told of the one engine."""
    result = doctor(*arguments, "--json")
    answer = json.loads(result.stdout)
    (engine,) = answer["engines"]
    assert answer["fine"] is (result.exit_code == 0)
    return result.exit_code, {**engine, "run": answer["journal"] and answer["journal"]["run"]}


def generates(engine: EmbeddedEngine) -> bool:
    """Whether it makes a token."""
    return asked(engine, events.Canary()).done


# ---------------------------------------------------------------------------------------------------- without a journal


def test_an_engine_that_runs_is_fine(patient: EmbeddedEngine) -> None:
    """Its kind is found out by asking; kind, version and label are told in a line, with exit code 0."""
    result, report = doctor(patient.url), report_of(patient)
    assert result.exit_code == 0
    kind = patient.engine.dialect.kind
    label = f"labelled {report.label}" if report.label else "not labelled"
    assert result.stdout == f"{patient.engine.name}: {kind} {report.server_version}, runs, {label}, FINE\n"


def test_a_paused_engine_is_not_continued_on_a_guess(patient: EmbeddedEngine) -> None:
    """Without a journal nothing proves that its weights are whole: it is told, and left as it is."""
    pause(patient)
    for options in ((), ("--release",)):
        result = doctor(patient.url, *options)
        assert result.exit_code == 1
        assert ", paused, " in result.stdout
        assert "LEFT: paused, and nothing proves that its weights are whole" in result.stdout
        assert result.stdout.endswith("; --trust-paused takes your word instead\n")
    assert report_of(patient).paused


def test_somebodys_word_is_taken(patient: EmbeddedEngine) -> None:
    """`--trust-paused` stands in for the proof, and changes nothing without `--release`."""
    pause(patient)
    assert told(patient.url, "--trust-paused")[1]["verdict"] == "owed"
    assert report_of(patient).paused
    code, engine = told(patient.url, "--trust-paused", "--release")
    assert (code, engine["verdict"], engine["paused"]) == (0, "released", False)
    assert generates(patient)


# ------------------------------------------------------------------------------------------------------- with a journal


@pytest.mark.parametrize("debt", [PAUSED, UNCERTAIN])
def test_what_a_dead_trainer_left_is_released(
    patient: EmbeddedEngine, tmp_path: Path, debt: tuple[events.Event, ...]
) -> None:
    """Engines come from the journal; one that is proven whole is owed a continue, and gets it with `--release`."""
    pause(patient)
    journal = journal_of(tmp_path / "journal", patient, *debt)
    code, engine = told("--journal", journal)
    assert (code, engine["verdict"], engine["paused"]) == (1, "owed", True)
    assert engine["journal"] == {
        "dirty": False,
        "debt": "abort",
        "certain": debt is PAUSED,
        "unfit": "",
        "same_process": True,
    }
    assert report_of(patient).paused
    code, engine = told("--journal", journal, "--release")
    assert (code, engine["verdict"], engine["paused"]) == (0, "released", False)
    assert (engine["name"], engine["address"], engine["run"]) == (NAME, patient.url, RUN)
    assert generates(patient)


def test_the_journal_is_told_for_people(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """How it ended, and what it knows of each engine, in a line each."""
    pause(patient)
    lines = doctor("--journal", journal_of(tmp_path / "journal", patient, *UNCERTAIN)).stdout.splitlines()
    assert lines[0] == "journal: run 'run', version None, not closed: it runs, or was killed"
    assert lines[1].startswith(f"{NAME}: {patient.engine.dialect.kind} ")
    assert lines[2] == "    journal: in debt of a pause (abort) that may or may not have happened, whole, this process"


def test_a_dirty_engine_is_refused(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """No option lets it be continued while the journal says that its weights may be partly written."""
    pause(patient)
    journal = journal_of(tmp_path / "journal", patient, *DIRTY)
    code, engine = told("--journal", journal, "--release", "--trust-paused")
    assert (code, engine["verdict"]) == (1, "left")
    assert engine["reason"] == "its weights may be partly written; a publication cures it"
    assert report_of(patient).paused


def test_an_engine_may_be_given_by_url_too(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """It is found in the journal by its address, also with credentials, which are not shown."""
    pause(patient)
    journal = journal_of(tmp_path / "journal", patient, *PAUSED)
    url = patient.url.replace("http://", "http://me:hidden-word@")
    result = doctor(url, "--journal", journal, "--release")
    assert result.exit_code == 0
    assert f"{NAME}: " in result.stdout
    assert "RELEASED" in result.stdout
    assert "hidden-word" not in result.output


def test_another_process_is_another_matter(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """Of an engine that was started anew the journal proves nothing; paused by somebody, it is left."""
    before = evolve(met(patient), incarnation="a process of before")
    journal = written(tmp_path / "journal", opened(patient.url), before, *DIRTY)
    code, engine = told("--journal", journal)
    assert (code, engine["verdict"], engine["journal"]["same_process"]) == (0, "fine", False)
    pause(patient)
    code, engine = told("--journal", journal, "--release")
    assert (code, engine["verdict"]) == (1, "left")
    assert engine["reason"].startswith("paused, and it is another process than the journal's; ")
    assert report_of(patient).paused


def test_the_pause_of_somebody_else_is_left(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """What the journal's trainer has not paused is not continued in its place, nor what another run has labelled."""
    pause(patient)
    not_ours = journal_of(tmp_path / "not ours", patient)
    assert "not by the journal's trainer" in told("--journal", not_ours, "--release")[1]["reason"]
    ours = journal_of(tmp_path / "ours", patient, *PAUSED)
    before = report_of(patient).label
    asked(patient, events.LabelVersion(label="other:9"))
    try:
        reason = told("--journal", ours, "--release")[1]["reason"]
    finally:
        asked(patient, events.LabelVersion(label=before or "default"))
    assert "it is labelled other:9: another trainer has published on it since" in reason
    assert report_of(patient).paused


def test_a_torn_last_line_is_what_a_kill_leaves(patient: EmbeddedEngine, tmp_path: Path) -> None:
    """It is passed over, and the file is left as it is."""
    pause(patient)
    journal = journal_of(tmp_path / "journal", patient, *PAUSED)
    torn = journal.read_bytes() + b'{"event":"EngineDirtied","engi'
    journal.write_bytes(torn)
    assert told("--journal", journal, "--release")[1]["verdict"] == "released"
    assert journal.read_bytes() == torn


# ----------------------------------------------------------------------------------------------------- what is not fine


def test_who_does_not_answer_is_told(tmp_path: Path) -> None:
    """By the journal's name, with exit code 1; also where the journal does not say where it is."""
    code, engine = told("--journal", written(tmp_path / "one", opened("http://127.0.0.1:1")))
    assert (code, engine["name"], engine["verdict"], engine["kind"]) == (1, NAME, "unreachable", None)
    assert "no connection could be made" in engine["reason"]
    code, engine = told("--journal", written(tmp_path / "two", opened("")))
    assert (code, engine["reason"]) == (1, "the journal does not tell where it is")


def test_an_engine_of_another_fleet_does_not_matter_any_more(tmp_path: Path) -> None:
    """A journal is continued by lifecycles with other engines; those of before count only while they are owed."""
    first, second = opened("http://127.0.0.1:1", name="first"), opened("http://127.0.0.1:2", name="second")
    journal = written(tmp_path / "journal", first, second)
    assert told("--journal", journal)[1]["name"] == "second"
    written(journal, events.PauseGeneration(engine="first"))
    assert len(json.loads(doctor("--journal", journal, "--json").stdout)["engines"]) == 2


def test_another_dialect_is_not_understood(patient: EmbeddedEngine) -> None:
    """`--dialect` leaves nothing to be found out."""
    kind = patient.engine.dialect.kind
    other = "vllm" if kind == "sglang" else "sglang"
    assert told(patient.url, "--dialect", kind)[1]["verdict"] == "fine"
    code, engine = told(patient.url, "--dialect", other)
    assert (code, engine["verdict"]) == (1, "unreachable")
    assert engine["reason"].startswith("HTTP 404")


@contextmanager
def _doorkeeper(heard: list[str | None]) -> Iterator[str]:
    """Yield the URL of a server that lets nobody in, and repeats what it was told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers["Authorization"])
            body = json.dumps({"error": f"{self.path} not for {self.headers['Authorization']}"}).encode()
            self.send_response(401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_key_is_sent_and_never_shown() -> None:
    """It comes from the environment, and is not in what a server answers either; each dialect's answer is told."""
    heard: list[str | None] = []
    with _doorkeeper(heard) as url:
        result = doctor(url, "--api-key-env", "MY_KEY", environment={"MY_KEY": "hidden-word"})
    assert result.exit_code == 1
    assert set(heard) == {"Bearer hidden-word"}
    assert "not understood as " in result.stdout
    assert "sglang: HTTP 401: /model_info not for Bearer ***" in result.stdout
    assert "vllm: HTTP 401: /version not for Bearer ***" in result.stdout
    assert "hidden-word" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no engine to look at"),
        (("--journal", "/nowhere/journal"), "/nowhere/journal does not exist\n"),
        (("--journal", "/"), "/ cannot be read: "),
        (("ftp://me:hidden-word@host",), "must start with http:// or https://"),
        (("http://host:1", "--dialect", "other"), "--dialect"),
        (("http://host:1", "--patience", "0"), "--patience"),
        (("http://host:1", "--api-key-env", "NO_SUCH_KEY"), "the environment variable NO_SUCH_KEY holds no API key"),
    ],
)
def test_bad_usage_is_told(arguments: tuple[str, ...], says: str) -> None:
    """What makes no sense has exit code 2, and nothing on the standard output."""
    result = doctor(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert "hidden-word" not in result.output


@pytest.mark.parametrize(
    ("content", "says"), [(b"no journal\n", "unreadable-line: line 1: not JSON"), (b"", "names no engine: give URLs")]
)
def test_a_journal_that_tells_nothing_is_no_journal(tmp_path: Path, content: bytes, says: str) -> None:
    """Unreadable, or without an engine: exit code 2, in one sentence."""
    journal = tmp_path / "journal"
    journal.write_bytes(content)
    result = doctor("--journal", journal)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert says in result.stderr


def test_a_clash_of_packages_is_told(tmp_path: Path) -> None:
    """Another project that installs a top-level `adapters` is in the answer, and in a warning."""
    other = tmp_path / "adapter_hub-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: adapter-hub\nVersion: 1.0\n")
    (other / "top_level.txt").write_text("adapters\n")
    result = run("doctor", "http://127.0.0.1:1", "--json", python_path=tmp_path)
    assert json.loads(result.stdout)["clash"] == ["adapter-hub"]
    assert result.stderr.startswith("warning: adapter-hub also installs a top-level package called 'adapters'")
    assert json.loads(doctor("http://127.0.0.1:1", "--json").stdout)["clash"] == []
