"""SGLang's pauses beyond what both dialects share: the deadlock, the health check, what an abort does meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Weights
    from .dialects import SGLang

DIALECT = "sglang"


def test_a_pause_needs_a_body(wire: SGLang, old: Weights) -> None:
    """400 without one, and nothing is paused."""
    assert wire.post("/pause_generation").status == 400
    assert not wire.paused()
    assert wire.tokens() == old.tokens


def test_a_body_needs_its_content_type(wire: SGLang, old: Weights) -> None:
    """JSON that does not say so is taken for text, and refused."""
    for path, body in (("/pause_generation", {"mode": "abort"}), ("/generate", {"input_ids": [1]})):
        flight = wire.later(path, body, {"Content-Type": "text/plain"})
        assert flight.answer().status == 400
    assert not wire.paused()
    assert wire.tokens() == old.tokens


def test_fields_that_it_does_not_know_are_ignored(wire: SGLang) -> None:
    """A misspelt mode is the default, an abort; nobody says so."""
    flight = wire.fly()
    assert wire.post("/pause_generation", {"moed": "in_place"}).status == 200
    assert flight.completed().finish == "abort"


def test_a_mode_may_follow_another(wire: SGLang) -> None:
    """Requests that stand in place can be retracted, which frees the cache."""
    flight = wire.fly(name="flight")
    wire.pause("in_place")
    assert not wire.flush()
    assert wire.pause("retract").status == 200
    assert wire.flush()
    wire.resume()
    wire.generate(2)  # first come, first served: the other has been taken up again
    wire.abort("flight")
    assert flight.completed().finish == "abort"
    assert flight.events[-2]["meta_info"]["num_retractions"] == 1


def test_an_abort_pause_after_an_in_place_one_hangs_and_takes_the_continue_with_it(wire: SGLang, old: Weights) -> None:
    """The abort waits for a forward pass that never comes. Hanging up on the request in flight is the way out."""
    flight = wire.fly()
    wire.pause("in_place")
    stuck = wire.pause_later("abort")
    wire.exchange()
    after = wire.later("/continue_generation", {})
    wire.abort_all()
    wire.exchange()
    assert not stuck.landed
    assert not after.landed
    assert not flight.landed
    assert wire.get("/model_info").status == 200
    flight.hang_up()
    assert stuck.answer().status == 200
    assert after.answer().status == 200
    wire.hurry()
    assert not wire.paused()
    assert wire.tokens() == old.tokens


def test_the_health_check_takes_a_paused_engine_for_dead_and_remembers_it(wire: SGLang, old: Weights) -> None:
    """503 after its timeout; `/ready` then stays 503 after the continue, until another health check has succeeded."""
    wire.pause("in_place")
    assert wire.get("/health").status == 503
    wire.resume()
    assert wire.tokens() == old.tokens
    assert wire.get("/ready").status == 503
    assert wire.get("/health").status == 200
    assert wire.get("/ready").status == 200


def test_an_abort_in_an_in_place_pause_waits_for_the_continue(wire: SGLang) -> None:
    """200 at once; the request comes back after the continue, with its next token."""
    flight = wire.fly(name="flight")
    wire.pause("in_place")
    assert wire.abort("flight").status == 200
    wire.exchange()
    assert not flight.landed
    wire.resume()
    assert (flight.completed().finish, flight.completed().detail) == ("abort", "Aborted")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_abort_in_a_retract_pause_answers_out_of_the_queue(wire: SGLang, *, stream: bool) -> None:
    """At once; a whole answer has lost the tokens that were made, and a stream has brought them before."""
    flight = wire.fly(stream=stream, name="flight")
    wire.pause("retract")
    wire.abort("flight")
    completed = flight.completed()
    assert (completed.finish, completed.detail) == ("abort", "Abort in waiting queue")
    assert (completed.tokens == []) == (not stream)
    assert wire.paused()


def test_an_abort_does_not_reach_what_waits_at_the_gate(wire: SGLang) -> None:
    """A request sent while paused has not come to the scheduler: aborted by name or with all others, it runs."""
    wire.pause("abort")
    flight = wire.start(5, name="gated")
    wire.exchange()
    assert [wire.abort("gated").status, wire.abort_all().status] == [200, 200]
    assert not flight.landed
    wire.resume()
    assert (flight.completed().finish, len(flight.completed().tokens)) == ("length", 5)


def test_an_abort_takes_every_name_that_begins_with_its_own(wire: SGLang) -> None:
    """It is a prefix: "step-1" ends "step-10" as well. An empty one ends nothing."""
    flights = [wire.fly(name=name) for name in ("step-1", "step-10", "other")]
    assert wire.post("/abort_request", {}).status == 200
    assert all(flight.goes_on() for flight in flights)
    assert wire.abort("step-1").status == 200
    assert [flight.completed().finish for flight in flights[:2]] == ["abort", "abort"]
    assert flights[2].goes_on()


def test_a_flush_can_wait_for_the_engine_to_be_idle(wire: SGLang) -> None:
    """With a timeout it is answered when nothing runs any more."""
    flight = wire.fly(name="flight")
    flush = wire.later("/flush_cache", timeout=wire.patience)
    wire.exchange()
    assert not flush.landed
    assert flight.goes_on()
    wire.abort("flight")
    assert flight.completed().finish == "abort"
    assert flush.answer().status == 200


def test_a_batch_is_aborted_as_a_whole(wire: SGLang) -> None:
    """A list of answers, each of them cut short."""
    wire.post("/slow_down", {"forward_sleep_time": 0.02})
    params = {"max_new_tokens": wire.long, "temperature": 0, "ignore_eos": True}
    batch = wire.later("/generate", {"input_ids": [[1, 2], [3, 4]], "sampling_params": params})
    wire.exchange()
    wire.generate(1)
    wire.pause("abort")
    assert [one["meta_info"]["finish_reason"]["type"] for one in batch.answer().body] == ["abort", "abort"]


def test_the_loads_tell_what_runs(wire: SGLang) -> None:
    """A request in flight is counted, and no longer when it is gone."""
    assert wire.get("/v1/loads").body["loads"][0]["num_running_reqs"] == 0
    flight = wire.fly(name="flight")
    wire.until(lambda: wire.get("/v1/loads").body["loads"][0]["num_running_reqs"] == 1)
    wire.abort("flight")
    assert flight.completed().finish == "abort"
    wire.until(lambda: wire.get("/v1/loads").body["loads"][0]["num_running_reqs"] == 0)
