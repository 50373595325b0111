"""Server-sent events, however their bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.engines.sse import EventParser

_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
_ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """Return the bytes of a stream, and the data of its events."""
    end = draw(_ENDS)
    said: list[str] = []
    lines: list[str] = []
    for data in draw(st.lists(st.lists(_TEXTS, min_size=1, max_size=3), max_size=5)):
        lines += [f": {comment}" for comment in draw(st.lists(_TEXTS, max_size=2))]
        lines += draw(st.sampled_from([[], ["event: x"], ["id"], ["retry: 1"], ["", ""]]))
        lines += [f"data: {line}" for line in data] + [""]
        said.append("\n".join(data))
    return "".join(line + end for line in lines).encode(), said


@given(streams(), st.lists(st.integers(0, 200), max_size=12))
def test_every_way_to_cut_a_stream_gives_the_same_events(stream: tuple[bytes, list[str]], cuts: list[int]) -> None:
    """Characters, line ends and events may lie across any number of pieces."""
    wire, said = stream
    parser = EventParser()
    places = sorted({0, len(wire), *(min(cut, len(wire)) for cut in cuts)})
    assert [event for start, end in pairwise(places) for event in parser.feed(wire[start:end])] == said


@given(streams())
def test_a_stream_may_come_byte_by_byte(stream: tuple[bytes, list[str]]) -> None:
    """No piece is too small, and an event comes with its last byte or the one after."""
    wire, said = stream
    parser = EventParser()
    assert [event for byte in wire for event in parser.feed(bytes([byte]))] == said


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (b"data: 1\n\ndata: 2\n", ["1"]),
        (b"data:1\n\n", ["1"]),
        (b"data:  1\n\n", [" 1"]),
        (b"data\n\n", [""]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"\xef\xbb\xbfdata: 1\r\n\r\n", ["1"]),
        (b"event: x\n\n\n\n: keep-alive\n\n", []),
        (b"database: 1\n data: 2\n\n", []),
        (b"data: \xff\n\n", ["\ufffd"]),
    ],
)
def test_a_line_means_what_the_standard_says(wire: bytes, said: list[str]) -> None:
    """Of the data one space goes; what is no data says nothing; what has not ended was never said."""
    assert EventParser().feed(wire) == said
