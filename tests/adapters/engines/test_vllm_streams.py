"""vLLM's streams, with plain values: by tokens, and as completions."""

from typing import Any

import pytest

from adapters.engines.dialect import HttpEvent, Streamed
from adapters.engines.vllm import VLLM
from lifecycle import errors
from lifecycle.generation import GenerationRequest, Segment, Tokens, VersionSpan

from .dialogue import CUT, END, OPENED, answer, converse, event, listen
from .vllm_stage import FORBIDDEN, probed

REQUEST = GenerationRequest(input_ids=[5, 6], max_new_tokens=3)
SPANS = [{"version": "run:7", "start": 0, "end": 1}, {"version": "run:8", "start": 1, "end": 3}]


def by_tokens(ids: list[int], total: int | None = None, reason: Any = None, spans: Any = None) -> HttpEvent:
    """Return an event of `/inference/v1/generate`."""
    logprobs = {"content": [{"token_id": token, "logprob": -token / 10, "rank": 1} for token in ids]}
    choice = {"index": 0, "finish_reason": reason, "token_ids": ids, "logprobs": logprobs, "weight_versions": spans}
    return event({"request_id": "r", "usage": counted(total), "choices": [choice]})


def completion(ids: list[int], total: int | None = None, reason: Any = None) -> HttpEvent:
    """Return an event of `/v1/completions`."""
    choice = {"text": "", "logprobs": {"token_logprobs": [-token / 10 for token in ids]}, "finish_reason": reason}
    return event({"choices": [{**choice, "token_ids": ids}], **({} if total is None else {"usage": counted(total)})})


def counted(total: int | None) -> Any:
    """Return the number of tokens so far, where the server was asked for it."""
    return None if total is None else {"prompt_tokens": 2, "completion_tokens": total}


def last(total: int) -> HttpEvent:
    """Return the event after the last choice."""
    return event({"choices": [], "usage": counted(total)})


def streamed(*events: Streamed, completions: bool = False) -> tuple[list[int], Segment]:
    """Return the tokens that were handed on, and the segment."""
    dialect, _ = probed(tokens=FORBIDDEN) if completions else probed()
    news: list[Tokens] = []
    segment = listen(dialect.generate(REQUEST, engine="E1", stream=True), *events, news=news)
    return [token for tokens in news for token in tokens.ids], segment


def test_a_stream_by_tokens_adds_up_with_its_spans() -> None:
    """What is new in each event, and in the last of them which version made which token."""
    ids, segment = streamed(by_tokens([9], 1), by_tokens([8, 7], 3, "length", SPANS), last(3), END)
    assert ids == [9, 8, 7]
    assert segment == Segment(
        output_ids=(9, 8, 7),
        logprobs=(-0.9, -0.8, -0.7),
        finish_reason="length",
        spans=(VersionSpan(label="run:7", start=0, end=1), VersionSpan(label="run:8", start=1, end=3)),
        engine="E1",
    )


def test_completions_add_up_without_spans() -> None:
    """That route tells no versions."""
    ids, segment = streamed(completion([9], 1), completion([8], 2, "stop"), last(2), END, completions=True)
    assert (ids, segment.finish_reason, segment.spans, segment.logprobs) == ([9, 8], "stop", None, (-0.9, -0.8))


@pytest.mark.parametrize("forbidden", [False, True])
def test_every_event_is_asked_to_count(forbidden: bool) -> None:
    """Otherwise a token that got lost would be missed by nobody."""
    steps = VLLM().generate(REQUEST, engine="E1", stream=True)
    call: Any = next(steps)
    if forbidden:
        call = steps.send(FORBIDDEN)
    assert (call.path, call.stream) == ("/v1/completions" if forbidden else "/inference/v1/generate", True)
    assert call.body["stream"] is True
    assert call.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert not hasattr(steps.send(OPENED), "path")


def test_a_whole_answer_is_not_asked_to_count() -> None:
    """Servers refuse these options without a stream."""
    assert "stream_options" not in next(VLLM().generate(REQUEST, engine="E1")).body  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        ([by_tokens([], 2, "abort", [])], [9, 8]),
        ([by_tokens([7], 3, "abort", SPANS)], [9, 8, 7]),
        ([by_tokens([8], 2, "abort", [])], [9, 8]),
        ([by_tokens([7], None, "abort", SPANS)], [9, 8, 7]),
        ([by_tokens([8, 7], None, "abort", SPANS)], [9, 8, 7]),
    ],
    ids=["empty", "one more", "repeated", "uncounted", "counted by spans"],
)
def test_an_abort_loses_and_repeats_nothing(end: list[Streamed], kept: list[int]) -> None:
    """It comes empty, with one token more, or with one that had come; the count tells which."""
    ids, segment = streamed(by_tokens([9], 1), by_tokens([8], 2), *end, END)
    assert (ids, list(segment.output_ids), segment.finish_reason, segment.lost) == (kept, kept, "abort", 0)


@pytest.mark.parametrize(
    "end",
    [[by_tokens([6], 4, "length")], [by_tokens([], None, "length", SPANS)], [by_tokens([], 1, "length"), last(10)]],
    ids=["in an event", "by the spans", "at the end"],
)
def test_tokens_that_never_came_make_it_an_abort(end: list[Streamed]) -> None:
    """By any of the counts that vLLM gives."""
    ids, segment = streamed(by_tokens([9], 1), *end, END)
    assert (ids, segment.output_ids, segment.finish_reason) == ([9], (9,), "abort")


def test_a_completion_that_was_aborted_in_the_queue_ends_without_a_word() -> None:
    """Only its count comes, of no tokens: it may be sent again."""
    ids, segment = streamed(last(0), END, completions=True)
    assert (ids, segment.output_ids, segment.finish_reason) == ([], (), "abort")


@pytest.mark.parametrize(
    ("events", "completions"),
    [([last(0), END], False), ([completion([9], 1), END], True), ([last(0), CUT], True)],
    ids=["by tokens", "after a token", "cut off"],
)
def test_any_other_stream_without_an_end_is_no_answer(events: list[Streamed], completions: bool) -> None:
    """Nobody knows what became of it."""
    with pytest.raises(errors.EngineUnavailable, match=r"the stream (ended|broke off)"):
        streamed(*events, completions=completions)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"message": "Token id 99 is out of vocabulary", "type": "BadRequestError", "code": 400}, "Refused"),
        ({"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}, "Unavailable"),
        ({"message": "too many", "code": 429}, "Unavailable"),
        ("what?", "Unavailable"),
    ],
)
def test_an_error_behind_a_200_is_the_one_it_names(said: Any, error: str) -> None:
    """A stream that was opened has no other way to say it."""
    with pytest.raises((errors.GenerationRefused, errors.EngineUnavailable)) as caught:
        streamed(event({"error": said}), END)
    assert error in type(caught.value).__name__


@pytest.mark.parametrize(
    "broken",
    [
        {"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1.0}]}},
        {"token_ids": [1], "logprobs": {"content": [{"logprob": None}]}},
        {"token_ids": [1], "logprobs": {"content": [{"logprob": -1.0, "token_id": 2}]}},
        {"token_ids": [1], "logprobs": None},
        {"token_ids": [], "finish_reason": "error"},
        {"token_ids": 3},
    ],
)
def test_an_event_that_does_not_add_up_is_no_answer(broken: dict[str, Any]) -> None:
    """Tokens without their log-probabilities, or with those of others."""
    with pytest.raises(errors.EngineUnavailable):
        streamed(event({"choices": [broken]}), END)


def test_the_route_that_there_is_is_asked_for_a_stream_once_it_is_known() -> None:
    """A refusal of the first route is read as a whole, and the other one streams."""
    dialect = VLLM()
    steps = dialect.generate(REQUEST, engine="E1", stream=True)
    next(steps)
    steps.send(FORBIDDEN)
    steps.send(OPENED)
    steps.send(completion([9], 1, "length"))
    with pytest.raises(StopIteration):
        steps.send(END)
    assert next(dialect.generate(REQUEST, engine="E1", stream=True)).path == "/v1/completions"  # type: ignore[union-attr]


def test_a_refusal_by_status_is_read_as_a_whole() -> None:
    """What does not validate is answered with 400, and nothing is streamed."""
    with pytest.raises(errors.GenerationRefused, match="top_p"):
        converse(probed()[0].generate(REQUEST, engine="E1", stream=True), answer({"error": {"message": "top_p"}}, 400))
