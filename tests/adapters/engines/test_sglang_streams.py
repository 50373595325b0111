"""SGLang's streams, with plain values: growing lists, or what is new, and the ways they end."""

from typing import Any

import pytest

from adapters.engines.dialect import HttpEnd, HttpEvent, Streamed
from adapters.engines.sglang import SGLang
from adapters.engines.sglang_generation import generate_body
from lifecycle import errors
from lifecycle.generation import GenerationRequest, Segment, Tokens, VersionSpan

from .dialogue import CUT, END, LATE, answer, converse, event, listen
from .sglang_stage import MODEL, READY, ROUTES, SERVER, probed

REQUEST = GenerationRequest(input_ids=[5, 6], max_new_tokens=9)
LENGTH = {"type": "length", "length": 3}
QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
SPANS = [{"version": "run:7", "start": 0, "end": 3}]
MADE = [507, 345, 345]


def entries(ids: list[int]) -> list[list[Any]]:
    """Return log-probabilities that are known by their tokens."""
    return [[-token / 1000, token, None] for token in ids]


def said(
    ids: list[int], total: int | None = None, reason: Any = None, named: list[int] | None = None, **meta: Any
) -> HttpEvent:
    """Return an event of a generation; `named`: the tokens of its log-probabilities, where they are others."""
    counted = {} if total is None else {"completion_tokens": total}
    logprobs = {"output_token_logprobs": entries(ids if named is None else named)}
    spans = {} if reason is None else {"weight_versions": SPANS}
    return event(
        {"text": "", "output_ids": ids, "meta_info": {"finish_reason": reason, **logprobs, **counted, **spans, **meta}}
    )


def streamed(*events: Streamed) -> tuple[list[int], Segment]:
    """Return the tokens that were handed on, and the segment."""
    news: list[Tokens] = []
    segment = listen(SGLang().generate(REQUEST, engine="E1", stream=True), *events, news=news)
    ids = [token for tokens in news for token in tokens.ids]
    assert [logprob for tokens in news for logprob in tokens.logprobs] == [-token / 1000 for token in ids]
    return ids, segment


GROWING = [said([507], 1), said([507, 345], 2)]
NEW = [said([507], 1), said([345], 2)]


@pytest.mark.parametrize(
    "events",
    [
        [*GROWING, said(MADE, 3, LENGTH), END],
        [said([507], 1), said(MADE, 3, LENGTH), HttpEnd()],
        [*NEW, said([345], 3, LENGTH), END],
        [said(MADE, 3, LENGTH), END],
        [*GROWING, said(MADE, 3, LENGTH), CUT],
    ],
    ids=["growing", "with one left out", "new", "all at once", "cut after the end"],
)
def test_a_stream_is_read_in_either_way(events: list[Streamed]) -> None:
    """Each token is handed on once, and the segment is that of a whole answer."""
    ids, segment = streamed(*events)
    assert ids == MADE
    assert segment == Segment(
        output_ids=tuple(MADE),
        logprobs=(-0.507, -0.345, -0.345),
        finish_reason="length",
        spans=(VersionSpan(label="run:7", start=0, end=3),),
        engine="E1",
    )


@pytest.mark.parametrize(
    "end",
    [
        [*GROWING, said(MADE, 3), said(MADE, 3, QUEUE)],
        [*NEW, said([345], 3), said([345], 3, QUEUE, named=MADE)],
        [said([507], 1), said([345, 345, 345], 3, QUEUE, named=[345, 345, *MADE])],
        [said([507], 1), said([345], 2), said([345, 345], 3, QUEUE, named=[345, *MADE])],
        [*GROWING, said(MADE, 3), said(MADE, None, QUEUE)],
        [*NEW, said([345], 3), said([345], None, QUEUE)],
    ],
    ids=["growing", "new", "joined, two", "joined, one", "growing, uncounted", "new, uncounted"],
)
def test_an_abort_in_the_queue_repeats_nothing(end: list[Streamed]) -> None:
    """It tells every token once more, or the last one beside every log-probability; joined with what is new or not."""
    ids, segment = streamed(*end, END)
    assert (ids, segment.output_ids) == (MADE, tuple(MADE))
    assert (segment.finish_reason, segment.lost) == ("abort", 0)


def test_joined_chunks_end_with_a_repetition() -> None:
    """Behind what is new stands the last token again: the log-probabilities name the right ones."""
    ids, _ = streamed(said([1], 1), said([2, 3, 3], 3, QUEUE, named=[2, 3, 1, 2, 3]), END)
    assert ids == [1, 2, 3]


def test_an_abort_without_its_tokens_keeps_those_of_the_stream() -> None:
    """Other versions answer an abort in the queue with nothing."""
    ids, segment = streamed(*GROWING, said([], 0, QUEUE), END)
    assert (ids, segment.output_ids, segment.lost) == ([507, 345], (507, 345), 2)


def test_a_final_chunk_that_counts_more_than_came_is_an_abort() -> None:
    """What never came is made again."""
    ids, segment = streamed(*NEW, said([9], 10, LENGTH), END)
    assert (ids, segment.finish_reason, segment.output_ids) == ([507, 345], "abort", (507, 345))


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (said(MADE, 3, named=[]), "3 tokens came with 0"),
        (said(MADE, 3, named=[507, 345, 9]), "3 tokens came with 0"),
        (said([507, 9, 345], 3), "contradicts"),
        (event({"text": ""}), "not a generation"),
        (event({"output_ids": 7, "meta_info": {"finish_reason": None, "completion_tokens": 3}}), "not a generation"),
        (event([1]), "not a JSON object"),
        (HttpEvent(text="what?"), "not a JSON object"),
        (CUT, "the stream broke off: the connection broke before a reply"),
        (LATE, "the stream broke off: no reply in time"),
        (END, "ended before the generation did"),
        (event({"error": {"message": "boom", "code": 500}}), "error 500 in the stream: boom"),
        (event({"error": {"message": "no", "code": 400}}), "error 400 in the stream: no"),
        (said([], 2, {"type": "abort", "message": "late", "status_code": 503, "err_type": "X"}), r"X \(503\): late"),
        (said([], 2, {"type": "abort", "message": "long", "status_code": 400, "err_type": "X"}), r"X \(400\): long"),
    ],
)
def test_what_breaks_a_stream_comes_after_its_tokens(last: Streamed, words: str) -> None:
    """The engine is unavailable, never the request refused; what had come was handed on."""
    news: list[Tokens] = []
    steps = SGLang().generate(REQUEST, engine="E1", stream=True)
    with pytest.raises(errors.EngineUnavailable, match=words):
        listen(steps, *GROWING, last, news=news)
    assert [token for tokens in news for token in tokens.ids] == [507, 345]


@pytest.mark.parametrize(
    "first",
    [
        event({"error": {"message": "too long", "type": "invalid_request_error", "code": 400, "retryable": False}}),
        event({"object": "error", "message": "too long", "code": 400}),
        said([], 0, {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}),
    ],
)
def test_a_refusal_may_come_in_a_stream(first: HttpEvent) -> None:
    """Before the first token a 4xx is the caller's, behind a status of 200, too."""
    with pytest.raises(errors.GenerationRefused, match=r"^E1 refused a generation request: .*too long"):
        streamed(first, END)


def test_a_refusal_by_status_is_read_as_a_whole() -> None:
    """A body that does not validate is answered with 400, and nothing is streamed."""
    with pytest.raises(errors.GenerationRefused, match="validation"):
        converse(SGLang().generate(REQUEST, engine="E1", stream=True), answer({"message": "1 validation error"}, 400))


def test_a_whole_answer_to_a_request_for_a_stream_is_news_too() -> None:
    """Something in between may wait for the end; the tokens are handed on all the same."""
    steps = SGLang().generate(REQUEST, engine="E1", stream=True)
    next(steps)
    meta = {"finish_reason": LENGTH, "output_token_logprobs": entries(MADE)}
    asked: Any = steps.send(answer({"output_ids": MADE, "meta_info": meta}))
    assert asked.news.ids == tuple(MADE)
    with pytest.raises(StopIteration) as stop:
        steps.send(HttpEnd())
    assert stop.value.value.output_ids == tuple(MADE)


def test_only_a_stream_asks_for_one() -> None:
    """The same request otherwise."""
    whole, stream = generate_body(REQUEST), generate_body(REQUEST, stream=True)
    assert {**whole, "stream": True} == stream
    assert next(SGLang().generate(REQUEST, engine="E1")).stream is False  # type: ignore[union-attr]


@pytest.mark.parametrize(("keys", "streams"), [(("stream", "rid"), True), (("rid",), False), ((), True)])
def test_a_server_whose_body_has_no_stream_does_not_stream(keys: tuple[str, ...], streams: bool) -> None:
    """By its own description; one that does not describe the body is taken to stream."""
    schema: Any = {"properties": {key: {} for key in keys}} if keys else {}
    body = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
    dialect, ack = probed(MODEL, SERVER, READY, answer({"paths": {**ROUTES.data["paths"], "/generate": body}}))
    assert (ack.done, dialect.capabilities.streams) == (True, streams)
