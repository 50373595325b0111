"""Generation values: what may be asked for, and how segments become one generation."""

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import GenerationRequest, Segment
from lifecycle.generation import GenerationInProgress, VersionSpan
from tests.strategies import QUICK


def _request(prompt: int = 3, new: int = 10, **fields: Any) -> GenerationRequest:
    return GenerationRequest(input_ids=range(1, prompt + 1), max_new_tokens=new, **fields)


def _segment(tokens: int, reason: str = "abort", version: int = 0, **fields: Any) -> Segment:
    return Segment(
        output_ids=tuple(range(100, 100 + tokens)),
        logprobs=(-0.5,) * tokens,
        finish_reason=reason,
        versions=(version,) * tokens,
        **fields,
    )


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"input_ids": []}, "input_ids must hold at least one token"),
        ({"max_new_tokens": 0}, "'max_new_tokens' must be >= 1"),
        ({"max_new_tokens": -1}, "'max_new_tokens' must be >= 1"),
        ({"max_tokens": 0}, "'max_tokens' must be >= 1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(fields: dict[str, Any], complaint: str) -> None:
    """An empty prompt or budget raises `ValueError` where it is written."""
    with pytest.raises(ValueError, match=complaint):
        GenerationRequest(**{"input_ids": [1], "max_new_tokens": 1, **fields})


@pytest.mark.parametrize("value", [_request(), _segment(1), VersionSpan(label="run:1", start=0, end=1)])
def test_generation_values_are_frozen(value: Any) -> None:
    """Nothing that crosses a pause can be changed under somebody's hands."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.finish_reason = "stop"


def test_a_request_shares_nothing_with_what_it_was_made_of() -> None:
    """Lists and dictionaries are the request's own, and each retry's own again."""
    prompt, stop, extra = [1, 2], ["x"], {"regex": ["a"]}
    request = GenerationRequest(input_ids=prompt, max_new_tokens=2, stop=stop, extra=extra)
    retry = GenerationInProgress(request).next_request()
    prompt.append(3)
    stop.append("y")
    extra["regex"].append("b")
    retry.extra["regex"].append("c")
    assert (request.input_ids, request.stop, request.extra) == ((1, 2), ("x",), {"regex": ["a"]})


def test_no_attempt_shares_anything_with_another() -> None:
    """What a port does to the request it was given reaches neither the caller's nor the next attempt's."""
    request = GenerationRequest(input_ids=(1,), max_new_tokens=9, extra={"regex": ["a"], "deep": {"er": [1]}})
    progress = GenerationInProgress(request)
    for _ in range(3):
        attempt = progress.next_request()
        assert attempt.extra == {"regex": ["a"], "deep": {"er": [1]}}
        attempt.extra["regex"].append("b")
        attempt.extra["deep"]["er"].clear()
        attempt.extra["new"] = True
        progress.add(_segment(1))
    assert request.extra == {"regex": ["a"], "deep": {"er": [1]}}
    request.extra["regex"].append("the caller's")
    assert progress.next_request().extra["regex"] == ["a"]


def test_a_generation_goes_on_within_budget_and_context() -> None:
    """Prompt 3, budget 10, context 8, hops of 2, 0 and 3 tokens: (prompt, budget) is (3, 5), (5, 3), (5, 3)."""
    progress = GenerationInProgress(_request(3, 10, max_tokens=8))
    asked = []
    for tokens in (2, 0, 3):
        request = progress.next_request()
        asked.append((len(request.input_ids), request.max_new_tokens))
        over = progress.add(_segment(tokens))
    generation = progress.result()
    assert asked == [(3, 5), (5, 3), (5, 3)]
    assert (over, len(generation.output_ids), generation.finish_reason) == (True, 5, "length")
    assert (len(generation.segments), generation.interruptions) == (2, 1)


def test_what_is_asked_next_is_the_prompt_and_the_tokens_so_far() -> None:
    """Everything else about the request stays as it was asked for, under a name that servers do not confuse."""
    request = _request(2, 6, temperature=0.5, stop=("x",), session="s", request_id="r")
    progress = GenerationInProgress(request)
    first = progress.next_request()
    progress.add(_segment(2))
    second, third = progress.next_request(), progress.next_request()
    assert first == request
    assert second == attrs.evolve(request, input_ids=(1, 2, 100, 101), max_new_tokens=4, request_id="r-1")
    assert third.request_id == "r-2"


def test_an_unnamed_request_stays_unnamed() -> None:
    """No name is made up for what goes on after an interruption."""
    progress = GenerationInProgress(_request())
    progress.next_request()
    assert progress.next_request().request_id is None


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_real_stop_ends_a_generation(reason: str) -> None:
    """The last segment's reason is the generation's, also before the budget is used up, and also without a token."""
    progress = GenerationInProgress(_request())
    progress.add(_segment(2, version=6))
    over = progress.add(_segment(0, reason))
    generation = progress.result()
    assert (over, generation.finish_reason, generation.output_ids) == (True, reason, (100, 101))


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_a_stop_on_the_last_token_stays_a_stop(reason: str) -> None:
    """That the budget is used up as well changes a reason only where there was none."""
    progress = GenerationInProgress(_request(3, 4))
    assert progress.add(_segment(4, reason)) is True
    assert progress.result().finish_reason == ("stop" if reason == "stop" else "length")


def test_an_abort_exactly_at_the_budget_is_length() -> None:
    """Nothing was left to generate, so the abort cut nothing off."""
    progress = GenerationInProgress(_request(3, 4))
    assert progress.add(_segment(4)) is True
    assert progress.result().finish_reason == "length"
    assert progress.result("abort").finish_reason == "length"


def test_an_abort_by_the_user_keeps_what_was_made() -> None:
    """The result says that it was aborted, and holds the tokens so far."""
    progress = GenerationInProgress(_request())
    progress.add(_segment(2))
    generation = progress.result("abort")
    assert (generation.finish_reason, len(generation.output_ids)) == ("abort", 2)


def test_a_prompt_that_fills_the_context_generates_nothing() -> None:
    """There is no token left to ask for, and that is a length, not an error."""
    progress = GenerationInProgress(_request(8, 10, max_tokens=8))
    assert (progress.remaining, progress.result().finish_reason, progress.result().output_ids) == (0, "length", ())


@pytest.mark.parametrize(("new", "lost", "kept"), [(5, 3, 3), (3, 3, 1), (2, 3, 0)])
def test_what_was_lost_counts_only_tokens_that_are_kept(new: int, lost: int, kept: int) -> None:
    """Of 5 tokens of which the answer left out 3, those within the budget."""
    progress = GenerationInProgress(_request(3, new))
    progress.add(_segment(5, lost=lost))
    assert [segment.lost for segment in progress.result().segments] == [kept]


def test_without_partial_rollouts_tokens_are_discarded_when_it_begins_again() -> None:
    """Not before: until then they are what an abort by the user returns. Every attempt has the whole budget."""
    progress = GenerationInProgress(_request(2, 6, partial_rollout=False, request_id="r"))
    asked = []
    for tokens in (2, 0, 3):
        request = progress.next_request()
        asked.append((len(request.input_ids), request.max_new_tokens, request.request_id))
        assert progress.add(_segment(tokens)) is False
        assert len(progress.result("abort").output_ids) == tokens
    assert asked == [(2, 6, "r"), (2, 6, "r-1"), (2, 6, "r-2")]
    assert (progress.result().discarded, len(progress.result().segments)) == (2, 1)


@pytest.mark.parametrize(
    ("partial", "tokens", "explained", "fruitless"),
    [
        (True, 0, False, 3),
        (True, 0, True, 0),
        (True, 1, False, 0),
        (False, 0, False, 3),
        (False, 1, False, 3),
        (False, 1, True, 0),
    ],
)
def test_attempts_in_vain_are_counted(partial: bool, tokens: int, explained: bool, fruitless: int) -> None:
    """Tokens that are kept, and a pause that explains an abort, begin the count anew; discarded tokens do not."""
    progress = GenerationInProgress(_request(partial_rollout=partial))
    for attempt in ({"tokens": 0}, {"tokens": 0}, {"tokens": tokens, "explained": explained}):
        progress.next_request()
        progress.add(_segment(int(attempt["tokens"])), explained=bool(attempt.get("explained")))
    assert progress.fruitless == fruitless


def test_tokens_beyond_what_was_asked_for_are_dropped() -> None:
    """An engine that overshoots does not make a generation longer than its budget, in any of its lists."""
    progress = GenerationInProgress(_request(3, 3))
    spans = (
        VersionSpan(label="run:1", start=0, end=2),
        VersionSpan(label="run:2", start=2, end=5),
        VersionSpan(label="run:3", start=5, end=6),
    )
    assert progress.add(_segment(6, "stop", spans=spans)) is True
    generation = progress.result()
    [segment] = generation.segments
    assert (len(generation.output_ids), len(generation.logprobs), len(generation.versions)) == (3, 3, 3)
    assert generation.finish_reason == "length"
    assert segment.spans == (spans[0], VersionSpan(label="run:2", start=2, end=3))


@QUICK
@given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.none() | st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["abort", "abort", "stop", "length"])), max_size=8),
)
def test_a_generation_never_exceeds_what_was_asked_for(
    prompt: int, new: int, context: int | None, hops: list[tuple[int, str]]
) -> None:
    """However it is interrupted: one log-probability and one version a token, within budget and context."""
    progress = GenerationInProgress(_request(prompt, new, max_tokens=context))
    budget = min(new, max(0, (context if context is not None else 99) - prompt))
    for version, (tokens, reason) in enumerate(hops):
        if progress.remaining == 0:
            break
        request = progress.next_request()
        assert len(request.input_ids) + request.max_new_tokens == prompt + budget
        if progress.add(_segment(tokens, reason, version)):
            break
    generation = progress.result()
    count = len(generation.output_ids)
    assert count <= budget
    assert (len(generation.logprobs), len(generation.versions)) == (count, count)
    assert sum(len(segment.output_ids) for segment in generation.segments) == count
    assert list(generation.versions) == [v for s in generation.segments for v in s.versions]
    assert generation.finish_reason in ({"stop", "length"} if count == budget else {"stop", "length", "abort"})


@pytest.mark.parametrize("field", ["input_ids", "stop", "stop_token_ids", "images"])
def test_a_single_string_is_no_list(field: str) -> None:
    """It would be taken apart into characters."""
    wrong: dict[str, Any] = {field: "END"}
    with pytest.raises(TypeError, match="a list is wanted, not a single str"):
        attrs.evolve(GenerationRequest(input_ids=[1], max_new_tokens=1), **wrong)


def test_token_ids_become_plain_ints() -> None:
    """Whatever counts as an integer, such as an element of a tensor, travels as JSON does."""

    class Index:
        def __index__(self) -> int:
            return 7

    request = GenerationRequest(input_ids=[Index(), 2], max_new_tokens=1, stop_token_ids=[Index()])
    assert (request.input_ids, request.stop_token_ids) == ((7, 2), (7,))
    assert {type(token) for token in request.input_ids} == {int}
    with pytest.raises(TypeError):
        GenerationRequest(input_ids=[1.5], max_new_tokens=1)
