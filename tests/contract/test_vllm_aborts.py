"""vLLM's aborts: the ids that work, and the counts that mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .wire import PROMPT

if TYPE_CHECKING:
    from .dialects import VLLM
    from .flights import Flight

DIALECT = "vllm"


def completions(wire: VLLM, name: str) -> Flight:
    """Send a long streaming request of the other route."""
    body = {"prompt": PROMPT, "max_tokens": wire.long, "temperature": 0, "ignore_eos": True, "stream": True}
    return wire.later("/v1/completions", body, {"X-Request-Id": name}).begun()


@pytest.mark.parametrize(
    ("ids", "counted"),
    [(["nobody"], 1), (["nobody", "nobody"], 2), ("nobody", 6)],
    ids=["unknown", "twice", "text"],
)
def test_an_abort_counts_the_ids_that_were_sent(wire: VLLM, ids: object, counted: int) -> None:
    """Not the requests that it found; a text is taken for as many ids as it has letters."""
    flight = wire.fly()
    assert wire.post("/abort_requests", {"request_ids": ids}).body == {"status": "aborted", "aborted": counted}
    assert flight.goes_on()


def test_an_abort_of_an_empty_list_ends_everything(wire: VLLM) -> None:
    """No ids are all ids: a client that has nothing to abort must not say so."""
    flights = [wire.fly(), wire.fly()]
    assert wire.post("/abort_requests", {"request_ids": []}).body == {"status": "aborted", "aborted": 2}
    assert [flight.completed().finish for flight in flights] == ["abort", "abort"]


def test_an_abort_that_makes_no_sense_is_refused(wire: VLLM) -> None:
    """400 without a body, 500 for a number, and what runs goes on."""
    flight = wire.fly()
    assert wire.post("/abort_requests").status == 400
    assert wire.post("/abort_requests", {"request_ids": 123}).status == 500
    assert wire.post("/inference/v1/abort_requests", {}).status == 400
    assert flight.goes_on()


def test_a_generation_needs_its_content_type_and_an_abort_does_not(wire: VLLM) -> None:
    """JSON that does not say so is refused where tokens are made."""
    text = {"Content-Type": "text/plain"}
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert wire.later("/inference/v1/generate", body, text).answer().status == 400
    assert wire.later("/abort_requests", {}, text).answer().body == {"status": "aborted", "aborted": 0}


def test_a_completion_goes_by_its_prefix_name_and_index(wire: VLLM) -> None:
    """Not by the name that the client gave, and not by the id in the answer."""
    mine = wire.named("mine")
    flight = completions(wire, mine)
    assert flight.events[0]["id"] == f"cmpl-{mine}"
    for wrong in (mine, f"cmpl-{mine}"):
        wire.post("/abort_requests", {"request_ids": [wrong]})
        assert flight.goes_on()
    wire.post("/abort_requests", {"request_ids": [f"cmpl-{mine}-0"]})
    last: Any = flight.answer().body[-2:]
    assert (last[0]["choices"][0]["finish_reason"], last[1]) == ("abort", "[DONE]")


def test_a_generation_by_tokens_goes_by_the_id_in_its_answer(wire: VLLM) -> None:
    """The name that the client gave, behind a prefix."""
    flight, mine = wire.fly(name="mine"), wire.named("mine")
    assert flight.events[0]["request_id"] == f"generate-tokens-{mine}"
    wire.post("/abort_requests", {"request_ids": [mine]})
    assert flight.goes_on()
    wire.post("/abort_requests", {"request_ids": [f"generate-tokens-{mine}"]})
    assert flight.completed().finish == "abort"


def test_an_abort_works_in_a_pause_and_does_not_end_it(wire: VLLM) -> None:
    """Kept and queued requests come back at once."""
    kept = wire.fly(name="kept")
    wire.pause("keep")
    queued = wire.start(5, name="queued")
    wire.exchange()
    wire.abort("kept")
    assert kept.completed().finish == "abort"
    assert not queued.landed
    wire.abort_all()
    assert (queued.completed().finish, queued.completed().tokens) == ("abort", [])
    assert wire.paused()


def test_hanging_up_on_a_kept_request_ends_it(wire: VLLM) -> None:
    """It does not run after the continue: the cache is free at once."""
    flight = wire.fly()
    wire.pause("keep", clear_cache="false")
    assert not wire.flush()
    flight.hang_up()
    wire.until_idle()
    assert wire.paused()
