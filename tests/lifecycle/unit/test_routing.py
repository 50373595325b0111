"""Which engine a generation request goes to."""

from collections import Counter

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle import routing
from lifecycle.routing import Router
from tests.strategies import QUICK

NAMES = ("a", "b", "c")


def test_requests_one_after_the_other_take_turns() -> None:
    """Between idle engines none is always the first: each gets as many as the others."""
    router = Router(NAMES)
    asked = [router.choose(NAMES, None) for _ in range(9)]
    assert asked == list(NAMES) * 3


def test_the_engine_with_the_fewest_in_flight_is_asked() -> None:
    """Turns are taken only between engines that are as busy as each other."""
    router = Router(NAMES)
    for name in ("a", "b", "b"):
        router.sent(name)
    assert [router.choose(NAMES, None) for _ in range(2)] == ["c", "c"]
    router.landed("a")
    assert [router.choose(NAMES, None) for _ in range(2)] == ["a", "c"]


@QUICK
@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), max_size=60), st.integers(0, 20))
def test_nobody_is_left_out(serving: list[set[str]], rounds: int) -> None:
    """Only engines that serve are chosen; and whatever was before, in every n choices each of n idle ones has one."""
    router = Router(NAMES)
    for some in serving:
        assert router.choose(sorted(some), None) in some
    for _ in range(rounds):
        assert Counter(router.choose(NAMES, None) for _ in NAMES) == Counter(NAMES)


def test_a_session_stays_where_it_is_and_stays_where_it_moved() -> None:
    """It keeps its engine whatever the load, moves when that does not serve, and does not move back."""
    router = Router(NAMES)
    first = router.choose(NAMES, "chat")
    router.sent(first)
    assert [router.choose(NAMES, "chat") for _ in range(3)] == [first] * 3
    left = [name for name in NAMES if name != first]
    second = router.choose(left, "chat")
    assert second in left
    assert [router.choose(NAMES, "chat") for _ in range(3)] == [second] * 3


def test_new_sessions_are_spread() -> None:
    """Sessions that begin one after the other do not all begin at the first engine."""
    router = Router(NAMES)
    assert Counter(router.choose(NAMES, f"chat-{n}") for n in range(6)) == {"a": 2, "b": 2, "c": 2}


def test_the_session_used_least_lately_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is bounded, and a session in use is never forgotten."""
    monkeypatch.setattr(routing, "_SESSIONS_REMEMBERED", 2)
    router = Router(NAMES)
    assert [router.choose(NAMES, session) for session in ("one", "two", "one", "three")] == ["a", "b", "a", "c"]
    assert list(router._sessions) == ["one", "three"]


@pytest.mark.anyio
async def test_an_engine_that_did_not_answer_is_asked_last_until_it_answers() -> None:
    """Neither load nor a session outweighs it; but where nobody else is left it is asked."""
    router = Router(NAMES)
    assert router.choose(NAMES, "chat") == "a"
    router.suspect("a")
    router.sent("b")
    assert router.choose(("a", "b"), None) == "b"
    assert router.choose(("a",), None) == "a"
    moved = router.choose(NAMES, "chat")
    assert moved == "c"
    router.trust("a")
    assert router.choose(("a", "b"), None) == "a"


@pytest.mark.anyio
async def test_suspicion_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds an engine is asked like any other, even if nobody has asked it since."""
    router = Router(NAMES)
    router.suspect("a")
    assert router.choose(("a", "b"), None) == "b"
    later = anyio.current_time() + 60
    monkeypatch.setattr(anyio, "current_time", lambda: later)
    assert router.choose(("a", "b"), None) == "a"
