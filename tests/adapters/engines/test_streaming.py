"""The accounting of streams: what is new, what comes again, what never came."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.engines.streaming import Arrivals, Chunk
from lifecycle import errors
from lifecycle.generation import Segment, Tokens, VersionSpan

LENGTH = "length"


def chunk(ids: list[int], total: int | None = None, **more: Any) -> Chunk:
    """Return a chunk whose log-probabilities are known by their tokens."""
    return Chunk(ids=tuple(ids), logprobs=tuple(-token / 10 for token in ids), total=total, **more)


def taken(*chunks: Chunk) -> tuple[list[int], Segment]:
    """Return the tokens that were handed on, and the segment."""
    arrivals = Arrivals("E1")
    news = [tokens for one in chunks if (tokens := arrivals.add(one)) is not None]
    assert all(tokens.ids for tokens in news)
    segment = arrivals.segment()
    assert segment.logprobs == tuple(-token / 10 for token in segment.output_ids)
    assert [logprob for tokens in news for logprob in tokens.logprobs] == list(segment.logprobs)
    return [token for tokens in news for token in tokens.ids], segment


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 12), max_size=6), st.booleans())
def test_growing_lists_and_new_tokens_add_up_alike(made: list[int], cuts: list[int], cumulative: bool) -> None:
    """Whether each chunk holds everything or what is new, and whichever are left out or come twice."""
    counts = [*sorted(min(cut, len(made)) for cut in cuts), len(made)]
    chunks, before = [], 0
    for count in counts:
        chunks.append(chunk(made[:count] if cumulative else made[before:count], count))
        before = count
    ids, segment = taken(*chunks, chunk(made if cumulative else made[-1:], len(made), finish_reason="abort"))
    assert ids == list(segment.output_ids) == made
    assert (segment.finish_reason, segment.lost) == ("abort", 0)


def test_chunks_without_a_count_are_new() -> None:
    """A server that does not count is believed."""
    assert taken(chunk([1, 1]), chunk([1], finish_reason=LENGTH))[0] == [1, 1, 1]


@pytest.mark.parametrize(("total", "lost"), [(0, 3), (2, 1), (3, 0)])
def test_what_the_end_leaves_out_is_kept(total: int, lost: int) -> None:
    """An abort that comes back emptier than the stream was takes no token back; the segment says how many."""
    ids, segment = taken(chunk([1, 2, 3], 3), chunk([], total, finish_reason="abort"))
    assert (ids, segment.output_ids, segment.lost) == ([1, 2, 3], (1, 2, 3), lost)


@pytest.mark.parametrize(
    "end",
    [
        [chunk([], 10, finish_reason=LENGTH)],
        [chunk([10], 10, finish_reason=LENGTH)],
        [chunk([5], 5), chunk([6], 6, finish_reason=LENGTH)],
        [chunk([], 3, finish_reason=LENGTH), chunk([], 10)],
    ],
    ids=["nothing", "the last", "after a gap", "told afterwards"],
)
def test_a_generation_ends_before_tokens_that_never_came(end: list[Chunk]) -> None:
    """A server that made 10 and sent 3 has made 3: what comes after the gap is made again."""
    ids, segment = taken(chunk([1, 2, 3], 3), *end)
    assert (ids, segment.output_ids, segment.finish_reason) == ([1, 2, 3], (1, 2, 3), "abort")


@pytest.mark.parametrize("after", [chunk([]), chunk([2], 2)], ids=["an empty event", "a late token"])
def test_a_gap_is_not_forgotten_for_what_comes_after_the_end(after: Chunk) -> None:
    """A token that never came is made again, whatever else the server sends."""
    ids, segment = taken(chunk([1], 1), chunk([3], 3, finish_reason=LENGTH), after)
    assert (ids, segment.finish_reason) == ([1, *after.ids], "abort")


def test_a_gap_that_is_filled_is_none() -> None:
    """A later chunk may hold everything, also what one before it had left out."""
    ids, segment = taken(chunk([1, 2], 2), chunk([4], 4), chunk([1, 2, 3, 4, 5], 5, finish_reason=LENGTH))
    assert (ids, segment.finish_reason) == ([1, 2, 3, 4, 5], LENGTH)


def test_tokens_and_log_probabilities_come_in_step() -> None:
    """What came before the first that do not was handed on."""
    arrivals = Arrivals("E1")
    assert arrivals.add(chunk([1], 1)) == Tokens(ids=(1,), logprobs=(-0.1,))
    with pytest.raises(errors.EngineUnavailable, match="2 tokens came with 1 log-probabilities"):
        arrivals.add(Chunk(ids=(2, 3), logprobs=(-0.2,), total=3))
    assert arrivals.ids == [1]


def test_spans_end_where_the_tokens_do() -> None:
    """A span of tokens that never came labels none."""
    spans = tuple(
        VersionSpan(label=label, start=start, end=start + 2) for label, start in (("a", 0), ("b", 2), ("c", 4))
    )
    _, segment = taken(chunk([1, 2, 3], 3), chunk([6], 6, finish_reason=LENGTH, spans=spans))
    assert segment.spans == (VersionSpan(label="a", start=0, end=2), VersionSpan(label="b", start=2, end=3))


def test_any_other_ending_is_a_stop() -> None:
    """As where the whole answer comes at once."""
    assert taken(chunk([1], 1, finish_reason="repetition"))[1].finish_reason == "stop"
