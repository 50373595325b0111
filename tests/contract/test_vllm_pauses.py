"""vLLM's pauses beyond what both dialects share: what is ignored, what is pending, what sleeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Weights
    from .dialects import VLLM

DIALECT = "vllm"


@pytest.mark.parametrize(
    ("body", "query"),
    [({"mode": "keep"}, {}), (None, {"wait_for_inflight_requests": "true"})],
    ids=["body", "old-option"],
)
def test_what_a_pause_does_not_know_is_ignored_and_it_aborts(wire: VLLM, body: object, query: dict[str, str]) -> None:
    """A mode in the body, or the option of older versions, is silently an abort."""
    flight = wire.fly()
    assert wire.post("/pause", body, **query).body == {"status": "paused"}
    assert flight.completed().finish == "abort"


def test_a_pending_wait_pause_says_paused_while_requests_run(wire: VLLM) -> None:
    """`is_paused` does not mean that nothing runs; the answer to the pause itself does."""
    flight = wire.fly(name="flight")
    pause = wire.pause_later("wait")
    wire.until(wire.paused)
    assert flight.goes_on()
    assert not pause.landed
    wire.abort("flight")
    assert pause.answer().body == {"status": "paused"}
    assert flight.completed().finish == "abort"


def test_a_continue_overtakes_a_pending_wait_pause_which_still_says_paused(wire: VLLM, old: Weights) -> None:
    """The pause is answered with 200 although the engine runs: such an answer is no proof."""
    flight = wire.fly(name="flight")
    pause = wire.pause_later("wait")
    wire.until(wire.paused)
    wire.resume()
    assert not wire.paused()
    wire.abort("flight")
    assert flight.completed().finish == "abort"
    assert pause.answer().body == {"status": "paused"}
    assert not wire.paused()
    assert wire.tokens() == old.tokens


def test_a_client_that_gives_up_on_a_wait_pause_leaves_the_engine_paused(wire: VLLM, old: Weights) -> None:
    """A timed-out pause is a pause: only a continue undoes it."""
    flight = wire.fly(name="flight")
    pause = wire.pause_later("wait")
    wire.until(wire.paused)
    pause.hang_up()
    wire.abort("flight")
    assert flight.completed().finish == "abort"
    assert wire.paused()
    later = wire.start(8)
    wire.exchange()
    assert not later.landed
    wire.resume()
    assert later.completed().tokens == old.tokens


@pytest.mark.parametrize("second", ["keep", "abort"])
def test_another_pause_ends_the_waiting_of_a_pending_one(wire: VLLM, second: str) -> None:
    """Both are answered at once; what counts is the last."""
    flight = wire.fly(name="flight")
    pause = wire.pause_later("wait")
    wire.until(wire.paused)
    assert wire.pause(second).status == 200
    assert pause.answer().status == 200
    if second == "keep":
        assert not flight.landed
        wire.resume()
        assert flight.goes_on()
        wire.abort("flight")
    assert flight.completed().finish == "abort"


def test_a_wait_pause_does_not_count_what_an_earlier_keep_preempted(wire: VLLM) -> None:
    """It is answered with a request still in the engine: "waited" is not "drained" after a keep."""
    flight = wire.fly(name="flight")
    wire.pause("keep")
    assert wire.pause("wait").status == 200
    assert not flight.landed
    wire.resume()
    assert flight.goes_on()


def test_an_abort_pause_ends_what_an_earlier_one_kept_or_queued(wire: VLLM) -> None:
    """Kept requests come back with their tokens, queued ones with none."""
    kept = wire.fly()
    wire.pause("keep")
    queued = wire.start(5)
    wire.exchange()
    wire.pause("abort")
    assert (kept.completed().finish, queued.completed().finish) == ("abort", "abort")
    assert len(kept.completed().tokens) >= 1
    assert queued.completed().tokens == []
    assert wire.paused()


def test_a_keep_that_clears_nothing_holds_the_cache(wire: VLLM) -> None:
    """`reset_prefix_cache` says so in a 200, unless it may preempt what is kept."""
    wire.fly()
    wire.pause("keep", clear_cache="false")
    assert wire.post("/reset_prefix_cache").body == {"success": False}
    assert wire.post("/reset_prefix_cache", reset_running_requests="true").body == {"success": True}


def test_a_pause_that_clears_nothing_leaves_a_stale_prefix_cache(wire: VLLM, new: Weights) -> None:
    """After an update a long prompt is answered out of the old weights' cache, until that is reset."""
    prompt = [token % 500 for token in range(700)]
    before = wire.generate(8, prompt).tokens
    wire.pause("abort", clear_cache="false")
    wire.load(new.path)
    wire.resume()
    stale = wire.generate(8, prompt).tokens
    assert wire.flush()
    fresh = wire.generate(8, prompt).tokens
    assert len(fresh) == 8
    assert stale != fresh
    assert before != fresh


def test_a_pause_looks_like_sleep_and_waking_up_ends_it(wire: VLLM, old: Weights) -> None:
    """`is_sleeping` is true of a merely paused engine, and `wake_up` continues it."""
    wire.pause("keep")
    assert wire.get("/is_sleeping").body == {"is_sleeping": True}
    assert wire.post("/wake_up").body == {"status": "awake", "tags": None}
    assert not wire.paused()
    assert wire.get("/is_sleeping").body == {"is_sleeping": False}
    assert wire.tokens() == old.tokens


def test_an_engine_that_sleeps_is_paused_and_runs_after_a_continue(wire: VLLM, old: Weights) -> None:
    """On CPU sleep frees nothing; continued, it serves, and still says that it sleeps."""
    assert wire.post("/sleep", level="1").body == {"status": "sleeping", "level": 1}
    assert wire.paused()
    wire.resume()
    assert not wire.paused()
    assert wire.get("/is_sleeping").body == {"is_sleeping": True}
    assert wire.tokens() == old.tokens
    assert wire.post("/wake_up").body == {"status": "awake", "tags": None}


def test_the_load_counts_what_a_pause_keeps_and_queues(wire: VLLM) -> None:
    """With load tracking on: the one way to see requests in a paused engine."""
    wire.fly()
    wire.pause("keep")
    assert wire.get("/load").body == {"server_load": 1}
    wire.start(5)
    wire.exchange()
    assert wire.get("/load").body == {"server_load": 2}
    wire.abort_all()
    wire.until(lambda: wire.get("/load").body == {"server_load": 0})
