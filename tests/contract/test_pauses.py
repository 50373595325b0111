"""What each pause does to requests, and what undoes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .expectations import MODES

if TYPE_CHECKING:
    from .conftest import Weights
    from .wire import Wire


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_pause_aborts_finishes_or_keeps_what_is_in_flight(wire: Wire, mode: str, *, stream: bool) -> None:
    """By mode, the request in flight comes back at once with part of its tokens, whole before the pause, or later."""
    flight = wire.fly(stream=stream)
    answer = wire.pause(mode)
    assert answer.status == 200
    assert wire.paused()
    fate = MODES[wire.dialect][mode].in_flight
    if fate == "kept":
        assert wire.label("new").status == 200
        assert not flight.landed
        assert wire.resume().status == 200
        wire.hurry()
        completed = flight.completed()
        (first, start, middle), (second, again, end) = completed.versions
        assert (first, start, second, again, end) == ("old", 0, "new", middle, wire.long)
        assert middle >= 1
    else:
        completed = flight.completed()
        assert [(version, start) for version, start, _ in completed.versions] == [("old", 0)]
        assert wire.paused()
    if fate == "aborted":
        assert completed.finish == "abort"
        assert 1 <= len(completed.tokens) < wire.long
    else:
        assert completed.finish == "length"
        assert len(completed.tokens) == wire.long


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_request_sent_while_paused_hangs_until_continue(wire: Wire, mode: str, *, stream: bool) -> None:
    """Nothing refuses it and no time ends it: all of its tokens are made after the continue, by what is there then."""
    wire.pause(mode)
    flight = wire.start(5, stream=stream)
    wire.exchange()
    wire.label("new")
    assert not flight.landed
    wire.resume()
    completed = flight.completed()
    assert completed.versions == [("new", 0, 5)]
    assert completed.finish == "length"


def test_pausing_twice_is_undone_by_one_continue(wire: Wire, old: Weights, mode: str) -> None:
    """Pauses are not counted."""
    assert [wire.pause(mode).status for _ in range(2)] == [200, 200]
    assert wire.paused()
    wire.resume()
    assert not wire.paused()
    assert wire.tokens() == old.tokens


def test_continue_when_not_paused_is_answered_and_harmless(wire: Wire, old: Weights) -> None:
    """A continue may be repeated until it is acknowledged."""
    expected = {
        "sglang": {"message": "Generation continued successfully.", "status": "ok"},
        "vllm": {"status": "resumed"},
    }
    for _ in range(2):
        answer = wire.resume()
        assert (answer.status, answer.body) == (200, expected[wire.dialect])
    assert wire.tokens() == old.tokens


def test_a_mode_that_does_not_exist_is_refused_and_pauses_nothing(wire: Wire, old: Weights) -> None:
    """400."""
    assert wire.pause("bogus").status == 400
    assert not wire.paused()
    assert wire.tokens() == old.tokens


def test_the_cache_is_dropped_unless_a_request_holds_it(wire: Wire, mode: str) -> None:
    """A flush fails while a request runs, and succeeds in a pause unless that keeps the cache of requests in place."""
    assert wire.flush()
    wire.fly(stream=True)
    assert not wire.flush()
    wire.pause(mode)
    assert wire.flush() == MODES[wire.dialect][mode].flushes
