"""One classification of replies, and the pieces that dialects share."""

import pytest

from adapters.engines.dialect import Missing, NoReply, Reply, classify, message_of
from adapters.engines.generation import generation_body, new_tokens, segment, version_spans
from lifecycle import errors
from lifecycle.generation import GenerationRequest, VersionSpan
from lifecycle.states import Outcome

from .dialogue import CUT, LATE, REFUSED, answer, words

DEAD = {"error": {"message": "boom", "type": "EngineDeadError", "code": 500}}


@pytest.mark.parametrize(
    ("reply", "outcome", "unreachable"),
    [
        (REFUSED, Outcome.NOT_DONE, True),
        (NoReply(kind=Missing.CONNECT, sent=True), Outcome.UNKNOWN, True),
        (LATE, Outcome.UNKNOWN, False),
        (NoReply(kind=Missing.TIMEOUT, sent=False), Outcome.NOT_DONE, False),
        (CUT, Outcome.UNKNOWN, False),
        (NoReply(kind=Missing.MALFORMED), Outcome.UNKNOWN, False),
        (answer({"status": "ok"}), Outcome.DONE, False),
        (answer(None), Outcome.DONE, False),
        (answer({"success": False, "message": "no"}), Outcome.NOT_DONE, False),
        (answer({"status": "error"}), Outcome.NOT_DONE, False),
        (answer({"message": "bad"}, 400), Outcome.NOT_DONE, False),
        (answer({"detail": "Not Found"}, 404), Outcome.NOT_DONE, False),
        (answer({}, 307), Outcome.NOT_DONE, False),
        (answer({"error": {"message": "boom"}}, 500), Outcome.UNKNOWN, False),
        (answer({}, 503), Outcome.UNKNOWN, False),
        (answer(DEAD, 500), Outcome.NOT_DONE, True),
        (words("<html>proxy</html>"), Outcome.UNKNOWN, False),
    ],
)
def test_a_reply_or_its_absence_means_one_outcome(reply: Reply, outcome: Outcome, unreachable: bool) -> None:
    """Each kind of reply, and each way in which none comes, is one outcome."""
    ack = classify(reply)
    assert (ack.outcome, ack.unreachable) == (outcome, unreachable)


def test_text_is_fine_where_text_is_due() -> None:
    """A body that is not JSON is suspicious only where JSON is due."""
    assert classify(words("Cache flushed.\n"), json=False).done


def test_every_failure_says_why() -> None:
    """An outcome other than DONE carries a sentence, with the server's own words where it gave some."""
    assert classify(REFUSED).detail == "no connection could be made: Connection refused"
    assert classify(answer({"error": {"message": "out of\n memory"}}, 500)).detail == "HTTP 500: out of memory"
    assert classify(answer(None, 503)).detail == "HTTP 503"


def test_messages_never_quote_a_prompt() -> None:
    """What a validator quotes of the request is cut off, and nothing is longer than 300 characters."""
    quoted = "1 validation error: [{'type': 'int', 'msg': 'not an int', 'input': [1, 2, 3]}]"
    assert message_of(answer({"message": quoted}, 400)) == "1 validation error: [{'type': 'int', 'msg': 'not an int', "
    assert len(message_of(answer({"message": "x" * 1000}, 400))) == 300


def test_the_context_bounds_a_generation() -> None:
    """At most what is left of the context is asked for; a prompt that fills it is refused at once."""
    request = GenerationRequest(input_ids=[1, 2, 3], max_new_tokens=10, max_tokens=8)
    assert new_tokens(request) == 5
    with pytest.raises(errors.GenerationRefused, match="leaves no room"):
        new_tokens(GenerationRequest(input_ids=[1, 2, 3], max_new_tokens=10, max_tokens=3))


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_refused_generation_is_refused_for_good(status: int) -> None:
    """A 4xx would be answered to the same request again."""
    with pytest.raises(errors.GenerationRefused, match="E1 refused"):
        generation_body(answer({"message": "no"}, status), engine="E1")


@pytest.mark.parametrize(
    "reply", [REFUSED, LATE, CUT, answer({}, 500), answer({}, 429), answer([]), answer({"error": "x"}), words("hm")]
)
def test_an_unanswered_generation_may_be_tried_elsewhere(reply: Reply) -> None:
    """Everything else that is no generation means that the engine did not answer."""
    with pytest.raises(errors.EngineUnavailable) as caught:
        generation_body(reply, engine="E1")
    assert caught.value.engine == "E1"
    assert caught.value.detail


def test_tokens_without_their_log_probabilities_are_no_segment() -> None:
    """A segment has one log-probability a token, or none is returned."""
    with pytest.raises(errors.EngineUnavailable, match="2 tokens came with 1"):
        segment(engine="E1", ids=[1, 2], logprobs=[-0.5], finish_reason="stop", spans=None)
    with pytest.raises(errors.EngineUnavailable):
        segment(engine="E1", ids=[1], logprobs=[None], finish_reason="stop", spans=None)


def test_spans_that_cannot_be_read_are_no_spans() -> None:
    """Version spans are taken whole or not at all."""
    good = {"version": "r:7", "start": 0, "end": 4}
    assert version_spans([good]) == (VersionSpan(label="r:7", start=0, end=4),)
    assert version_spans([good, {"version": "r:8"}]) is None
    assert version_spans(None) is None
