"""The recorder: events numbered without gaps, in one order for everybody."""

import logging

import pytest
from attrs import define, field

from lifecycle import events as e
from lifecycle.recorder import Recorder

from .workbench import serving_cohort


@define
class Sink:
    """A journal that keeps its events, and may be unwritable."""

    last_seq: int = 0
    log: list[str] = field(factory=list)
    broken: bool = False

    def write(self, event: e.Event) -> None:
        """Keep the event."""
        self.log.append(f"{event.seq} {type(event).__name__}")

    def sync(self) -> None:
        """Keep the promise, or raise."""
        if self.broken:
            raise OSError("no space left")
        self.log.append("sync")

    def close(self) -> None:
        """Note the end."""
        self.log.append("close")


def test_events_are_stamped_with_what_was_true_then() -> None:
    """Number, cohort, epoch and version are those of the moment; both clocks are read."""
    cohort = serving_cohort(version=7)
    recorder = Recorder(cohort)
    cohort.epoch = 3
    first = recorder.emit(e.GenerationHeld)
    cohort.version, cohort.epoch = 8, 4
    second = recorder.emit(e.GenerationReleased, seconds=1.5)
    assert [(ev.seq, ev.cohort, ev.epoch, ev.version) for ev in (first, second)] == [
        (1, "fleet", 3, 7),
        (2, "fleet", 4, 8),
    ]
    assert second.seconds == 1.5
    assert 0 < first.at <= second.at
    assert 0 < first.monotonic <= second.monotonic


def test_a_history_is_continued_where_the_journal_ends() -> None:
    """A second process numbers on after the first."""
    recorder = Recorder(serving_cohort(), Sink(last_seq=41))
    assert recorder.emit(e.GenerationHeld).seq == 42


def test_an_event_is_written_before_anybody_hears_of_it() -> None:
    """What a subscriber acts on is in the journal already."""
    sink = Sink()
    recorder = Recorder(serving_cohort(), sink)
    recorder.subscribe(lambda event: sink.log.append(f"heard {event.seq}"))
    recorder.emit(e.GenerationHeld)
    assert sink.log == ["1 GenerationHeld", "heard 1"]


def test_all_subscribers_see_one_order_though_one_of_them_causes_events() -> None:
    """An event emitted from within a subscriber follows the one it was caused by, for everybody, without a gap."""
    recorder = Recorder(serving_cohort(), sink := Sink())
    heard: dict[str, list[int]] = {"first": [], "second": []}

    def causing(event: e.Event) -> None:
        heard["first"].append(event.seq)
        if event.seq < 4:
            recorder.emit(e.SubmissionSuspended)
            recorder.emit(e.SubmissionResumed)

    recorder.subscribe(causing)
    recorder.subscribe(lambda event: heard["second"].append(event.seq))
    recorder.emit(e.GenerationHeld)
    assert heard == {"first": list(range(1, 8)), "second": list(range(1, 8))}
    assert [int(line.split()[0]) for line in sink.log] == list(range(1, 8))


def test_a_subscriber_that_raises_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The emitter goes on, the others hear the event, and the log tells what failed."""
    recorder = Recorder(serving_cohort())
    heard: list[int] = []

    def failing(_: e.Event) -> None:
        raise ZeroDivisionError

    recorder.subscribe(failing)
    recorder.subscribe(lambda event: heard.append(event.seq))
    with caplog.at_level(logging.ERROR, "lifecycle"):
        recorder.emit(e.GenerationHeld)
        recorder.emit(e.GenerationReleased)
    assert heard == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "a subscriber failed on GenerationHeld (seq 1)",
        "a subscriber failed on GenerationReleased (seq 2)",
    ]


def test_delivery_goes_on_after_a_subscriber_was_interrupted() -> None:
    """A keyboard interrupt passes through; the next event finds the recorder in order."""
    recorder = Recorder(serving_cohort())
    heard: list[int] = []

    def interrupted(event: e.Event) -> None:
        if event.seq == 1:
            raise KeyboardInterrupt

    recorder.subscribe(interrupted)
    recorder.subscribe(lambda event: heard.append(event.seq))
    with pytest.raises(KeyboardInterrupt):
        recorder.emit(e.GenerationHeld)
    recorder.emit(e.GenerationReleased)
    assert heard == [2]


def test_whoever_unsubscribes_hears_nothing_more() -> None:
    """Ending a subscription twice is harmless, and ends no other."""
    recorder = Recorder(serving_cohort())
    heard: list[str] = []
    leave = recorder.subscribe(lambda _: heard.append("a"))
    recorder.subscribe(lambda _: heard.append("b"))
    recorder.emit(e.GenerationHeld)
    leave()
    leave()
    recorder.emit(e.GenerationReleased)
    assert heard == ["a", "b", "b"]


def test_each_subscription_of_one_callback_ends_by_itself() -> None:
    """A callback that was subscribed twice is called twice, and once after one of the two has ended."""
    recorder = Recorder(serving_cohort())
    heard: list[int] = []

    def hear(event: e.Event) -> None:
        heard.append(event.seq)

    leave = recorder.subscribe(hear)
    recorder.subscribe(hear)
    recorder.emit(e.GenerationHeld)
    leave()
    leave()
    recorder.emit(e.GenerationReleased)
    assert heard == [1, 1, 2]


def test_syncing_tells_what_the_journal_could_not_keep() -> None:
    """The recorder passes on whether events are durable; without a journal there is nothing to do."""
    Recorder(serving_cohort()).sync()
    Recorder(serving_cohort()).close()
    recorder = Recorder(serving_cohort(), sink := Sink())
    recorder.sync()
    sink.broken = True
    with pytest.raises(OSError, match="no space left"):
        recorder.sync()
    recorder.close()
    assert sink.log == ["sync", "close"]
