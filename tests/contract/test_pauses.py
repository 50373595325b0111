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
    """By mode, what is in flight comes back at once with part of its tokens, whole before the pause, or later."""
    fate = MODES[wire.dialect][mode].in_flight
    asked = wire.enough if fate == "finished" else wire.long
    flight = wire.fly(stream=stream, name="flight", tokens=asked)
    assert wire.pause(mode).status == 200
    assert wire.paused()
    if fate == "kept":
        assert not flight.landed
        assert wire.label("new").status == 200
        assert wire.resume().status == 200
        wire.generate(2)  # which runs beside it
        wire.abort("flight")
        completed = flight.completed()
        (first, start, middle), (second, again, end) = completed.versions
        assert (first, start, second, again, end) == ("old", 0, "new", middle, len(completed.tokens))
        assert 1 <= middle < end
    else:
        completed = flight.completed()
        assert completed.versions == [("old", 0, len(completed.tokens))]
        assert wire.paused()
    assert completed.finish == ("length" if fate == "finished" else "abort")
    assert (1 <= len(completed.tokens) < asked) == (fate != "finished")


def test_what_a_pause_keeps_comes_to_its_own_end_afterwards(wire: Wire, keeping: str) -> None:
    """A kept request ends as if there had been no pause: no token is lost, and none is another."""
    expected = wire.generate(wire.enough).tokens
    flight = wire.fly(tokens=wire.enough)
    wire.pause(keeping)
    wire.resume()
    wire.hurry()
    completed = flight.completed()
    assert (completed.finish, completed.tokens) == ("length", expected)


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


def test_the_cache_is_dropped_when_idle_and_not_while_a_request_runs(wire: Wire) -> None:
    """The answer says which: idle is proven by the engine."""
    assert wire.flush()
    wire.fly()
    assert not wire.flush()
    wire.abort_all()
    wire.until_idle()


def test_the_cache_is_dropped_in_a_pause_unless_that_keeps_requests_in_place(wire: Wire, mode: str) -> None:
    """Aborted, finished and retracted requests hold nothing; those that stand still do."""
    pause = MODES[wire.dialect][mode]
    wire.fly(tokens=wire.enough if pause.in_flight == "finished" else wire.long)
    wire.pause(mode)
    assert wire.flush() == pause.flushes
    assert wire.paused()
