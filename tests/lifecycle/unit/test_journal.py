"""The journal: every event comes back as it was, and nothing unreadable passes for one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import Outcome, PauseMode
from lifecycle import events as e
from lifecycle.errors import JournalUnreadable
from lifecycle.journal import Journal, decode, encode, read
from lifecycle.ports import Bucket, Channel
from tests.strategies import QUICK, any_event, instances_of

HELD = e.GenerationHeld(seq=1, at=1.5, monotonic=2.5, cohort="fleet", epoch=3, version=7)


@pytest.mark.parametrize("name", sorted(e.all_events()))
@QUICK
@given(data=st.data())
def test_every_event_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    """Whatever an event of any class holds, its line holds, on one line."""
    event = data.draw(instances_of(e.all_events()[name]))
    line = encode(event)
    assert "\n" not in line
    assert decode(line) == event


def test_a_line_is_plain_json() -> None:
    """Programs in any language read the journal: field names as documented, enumerations by value."""
    pause = e.PauseGeneration(seq=2, engine="left", mode=PauseMode.IN_PLACE)
    assert json.loads(encode(pause)) == {
        "event": "PauseGeneration", "seq": 2, "at": 0.0, "monotonic": 0.0, "cohort": "", "epoch": 0, "version": None,
        "engine": "left", "mode": "in_place",
    }  # fmt: skip


@pytest.mark.parametrize(
    "request_with_private_fields",
    [
        e.OpenTransfer(engine="left", channel=Channel(kind="broadcast", name="secret")),
        e.AbandonUpdate(engine="left", channel=Channel(kind="broadcast", name="secret")),
        e.CloseTransfer(engine="left", channel=Channel(kind="broadcast", name="secret")),
        e.TransferWeights(
            engine="left",
            bucket=Bucket(index=0, last=True, path="/secret", payload="secret"),
            channel=Channel(kind="disk", name="secret"),
        ),
    ],
    ids=lambda request: type(request).__name__,
)
def test_what_is_private_to_the_process_is_never_written(request_with_private_fields: e.Request) -> None:
    """Channels, buckets and payloads stay out of the journal, and are missing when the event is read."""
    line = encode(request_with_private_fields)
    assert ("secret" in line, "channel" in line, "bucket" in line) == (False, False, False)
    read_back = decode(line)
    assert isinstance(read_back, type(request_with_private_fields))
    assert getattr(read_back, "channel", None) is None


def _but(**changes: object) -> str:
    fields = json.loads(encode(e.EnginePaused(engine="left", outcome=Outcome.DONE)))
    return json.dumps({**fields, **changes})


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        "\x00\x00",
        "[" * 100_000,
        "{}",
        '{"event": "Fact"}',
        '{"event": "EngineFact"}',
        '{"event": []}',
        '{"event": null}',
        '{"event": "GenerationHeld"}',
        _but(surplus=1),
        _but(outcome="MAYBE"),
        _but(outcome=[]),
        _but(mode=None),
        _but(engine=None),
        _but(engine=7),
        _but(seq="1"),
        _but(seq=1.5),
        _but(seq=True),
        _but(at="now"),
        _but(stopped="yes"),
        _but(stopped=1),
    ],
    ids=lambda line: line[:40],
)
def test_what_is_not_an_event_is_refused_by_line(line: str) -> None:
    """Anything that a lifecycle does not write raises `JournalUnreadable` with the line's number."""
    with pytest.raises(JournalUnreadable, match=r"^line 12: ") as unreadable:
        decode(line, 12)
    assert unreadable.value.line == 12
    assert len(str(unreadable.value)) < 500


@pytest.mark.parametrize("engines", ["left", [1], None, {"left": 1}])
def test_a_list_of_names_must_be_one(engines: object) -> None:
    """A field that holds several names is read from a list of strings and nothing else."""
    fields = json.loads(encode(e.LifecycleOpened(name="run", engines=("left",), min_engines=1)))
    with pytest.raises(JournalUnreadable, match="is not a list of strings"):
        decode(json.dumps({**fields, "engines": engines}))


@QUICK
@given(st.lists(any_event, max_size=5), st.integers(0, 200))
def test_a_file_cut_anywhere_still_gives_every_whole_line(
    tmp_path_factory: pytest.TempPathFactory, events: list[e.Event], cut: int
) -> None:
    """A kill leaves at most a torn last line; all before it is read, and nothing else is made of the rest."""
    path = tmp_path_factory.mktemp("journal") / "run.jsonl"
    lines = [encode(event) + "\n" for event in events]
    content = "".join(lines).encode()
    kept = content[: max(0, len(content) - cut)]
    path.write_bytes(kept)
    whole = kept.count(b"\n")
    assert list(read(path)) == list(enumerate(events[:whole], 1))


def test_a_journal_is_continued(tmp_path: Path) -> None:
    """Directories are made, lines are appended, and the last number is known on reopening."""
    path = tmp_path / "runs" / "a" / "run.jsonl"
    journal = Journal(path)
    assert journal.last_seq == 0
    journal.write(HELD)
    journal.write(e.GenerationReleased(seq=2))
    journal.sync()
    journal.close()
    again = Journal(path)
    assert again.last_seq == 2
    again.write(e.GenerationHeld(seq=3))
    again.close()
    assert [(number, event.seq) for number, event in read(path)] == [(1, 1), (2, 2), (3, 3)]


def test_a_torn_last_line_is_cut_off_when_the_journal_is_reopened(tmp_path: Path) -> None:
    """What follows is a line of its own, not the rest of a torn one."""
    path = tmp_path / "run.jsonl"
    path.write_text(encode(HELD) + "\n" + encode(HELD)[:20])
    journal = Journal(path)
    journal.write(e.GenerationReleased(seq=2))
    journal.close()
    assert (journal.last_seq, [event.seq for _, event in read(path)]) == (1, [1, 2])


def test_a_file_that_is_only_a_torn_line_begins_anew(tmp_path: Path) -> None:
    """A kill within the first line leaves an empty history."""
    path = tmp_path / "run.jsonl"
    path.write_text('{"event":')
    journal = Journal(path)
    journal.close()
    assert (journal.last_seq, path.read_text()) == (0, "")


@pytest.mark.parametrize("bad", [b"{}", b"", b"\xff\xfe\x00", b"not json"])
def test_any_other_bad_line_is_an_error_that_names_it(tmp_path: Path, bad: bytes) -> None:
    """A damaged history is not continued as if nothing had happened."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(encode(HELD).encode() + b"\n" + bad + b"\n" + encode(HELD).encode() + b"\n")
    with pytest.raises(JournalUnreadable, match=r"^line 2: "):
        list(read(path))
    with pytest.raises(JournalUnreadable, match=r"^line 2: "):
        Journal(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_journal_that_cannot_be_written_says_so_once_and_at_every_sync(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writing never raises; `sync` does, before a pause goes out; closing does not raise in place of something else."""
    journal = Journal(tmp_path / "run.jsonl")
    with Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), journal._file.fileno())
    journal.write(HELD)
    journal.write(HELD)
    for _ in range(2):
        with pytest.raises(OSError, match=r"the journal .*run\.jsonl cannot be written"):
            journal.sync()
    journal.close()
    assert len(caplog.records) == 1


def test_a_closed_journal_takes_nothing_and_stays_closed(tmp_path: Path) -> None:
    """A late event after the end is dropped; closing twice is harmless."""
    journal = Journal(tmp_path / "run.jsonl")
    journal.close()
    journal.close()
    journal.write(HELD)
    journal.sync()
    assert journal.path.read_text() == ""


def test_a_journal_belongs_to_one_process(tmp_path: Path) -> None:
    """While one process writes it another is refused, and told why; afterwards it may go on with it."""
    path = tmp_path / "run.jsonl"
    opening = [sys.executable, "-c", f"from lifecycle.journal import Journal; Journal({str(path)!r}).close()"]
    journal = Journal(path)
    journal.write(HELD)
    refused = subprocess.run(opening, capture_output=True, text=True, check=False)
    assert "another process writes this journal" in refused.stderr
    journal.close()
    assert subprocess.run(opening, check=False).returncode == 0
    assert [event for _, event in read(path)] == [HELD]
