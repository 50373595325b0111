"""Journals on disk: what cannot be read is named by its line, and length costs time but no memory."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from lifecycle import events
from lifecycle.errors import JournalUnreadable
from lifecycle.events import Event
from lifecycle.journal import Journal, encode
from lifecycle.trace import verify, verify_file

from .forging import verdict_of
from .recordings import SCENARIOS, recording


def written(path: Path, trace: tuple[Event, ...]) -> list[bytes]:
    """Write a trace as a journal. Returns its lines."""
    journal = Journal(path)
    for event in trace:
        journal.write(event)
    journal.close()
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_journal_says_what_its_events_say(tmp_path: Path, name: str) -> None:
    """Nothing that the verdict needs is lost on the way through a file."""
    written(tmp_path / "journal.jsonl", recording(name))
    assert verify_file(tmp_path / "journal.jsonl") == verdict_of(recording(name))


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        (lambda line: line[:20] + b"\n", "not JSON"),
        (lambda line: line[:20], "not JSON"),
        (lambda _: b"\n", "not JSON"),
        (lambda _: b"\xff\xfe\n", "not JSON"),
        (lambda _: b'{"event":"Nonsense"}\n', "not an event"),
        (lambda _: b"[1,2]\n", "not an event"),
        (lambda line: line.replace(b'"epoch":', b'"epok":'), "epoch"),
        (lambda line: line.replace(b'"seq":', b'"seq":"x","was":'), "unknown fields"),
        (lambda line: line.replace(b'"cohort":"fleet"', b'"cohort":7'), "not of type"),
    ],
    ids=["cut", "joined to the next", "blank", "binary", "unknown", "a list", "renamed", "added", "of another type"],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, cut: "object", why: str) -> None:
    """Anything but a torn last line is an error that names the line, and not a violation."""
    path = tmp_path / "journal.jsonl"
    lines = written(path, recording("several publications"))
    lines[40] = cut(lines[40])  # type: ignore[operator]
    path.write_bytes(b"".join(lines))
    with pytest.raises(JournalUnreadable, match=why) as caught:
        verify_file(path)
    assert caught.value.line == 41


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    """A kill may cut the last line, wherever; what is before it counts."""
    path = tmp_path / "journal.jsonl"
    lines = written(path, recording("several publications"))
    for kept in (1, 20, len(lines[-1]) - 1):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
        verdict = verify_file(path)
        assert (verdict.sound, verdict.events, verdict.closed) == (True, len(lines) - 1, False)


def test_a_journal_that_was_cut_and_continued_is_sound(tmp_path: Path) -> None:
    """The next trainer mends the torn end, and goes on with the numbers."""
    path = tmp_path / "journal.jsonl"
    trace = recording("several publications")
    lines = written(path, trace)
    path.write_bytes(b"".join(lines[:100]) + lines[100][:30])
    journal = Journal(path)
    assert journal.last_seq == 100
    for event in trace:
        changed = evolve(event, seq=event.seq + 100)
        if isinstance(changed, events.EngineFact):
            changed = evolve(changed, request=changed.request + 100)
        journal.write(changed)
    journal.close()
    assert verify_file(path).sound


def _a_long_run(rollouts: int) -> Iterator[tuple[int, Event]]:
    """Yield one lifecycle in which rollout after rollout is generated and trained on."""
    trace = recording("several publications")
    running = 1 + next(i for i, event in enumerate(trace) if isinstance(event, events.RolloutAdmitted))
    seq, time = running - 1, trace[running - 1].monotonic
    yield from enumerate(trace[: running - 1], 1)
    for ticket in range(1, rollouts + 1):
        for event in (
            events.RolloutAdmitted(ticket=ticket),
            events.GenerationSent(ticket=ticket, engine="E1"),
            events.SegmentReceived(ticket=ticket, engine="E1", tokens=4, finish_reason="stop"),
            events.RolloutSettled(ticket=ticket, accepted=True, admitted=0),
            events.RolloutDiscarded(ticket=ticket, staleness=0),
        ):
            seq += 1
            yield seq, evolve(event, seq=seq, monotonic=time, version=0)


def test_a_long_journal_takes_little_memory() -> None:
    """What is settled is forgotten, so that memory does not grow with the journal."""
    verdict = verify(_a_long_run(10))
    assert verdict.sound
    tracemalloc.start()
    try:
        long = verify(_a_long_run(4_000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert long.sound
    assert long.tokens == 16_000
    assert peak < 300_000  # bytes; a remembered event takes about 300


def test_a_line_of_a_journal_is_what_was_encoded(tmp_path: Path) -> None:
    """One event a line, in the order of their numbers."""
    trace = recording("evaluation tickets")
    assert written(tmp_path / "journal.jsonl", trace) == [encode(event).encode() + b"\n" for event in trace]
