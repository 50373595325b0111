"""Everything that can happen to a small fleet: no predicate is ever broken. `closures.py` goes further."""

from typing import Any

import pytest

from lifecycle.explore import Truth, explore
from lifecycle.states import PauseMode

SMALL: dict[str, dict[str, Any]] = {
    "two buckets": {"engines": 1, "buckets": 2},
    "two engines": {"engines": 2},
    "one of two is enough": {"engines": 2, "min_engines": 1},
    "weights at risk from the begin": {"engines": 1, "buckets": 2, "at_risk_from_begin": True},
    "requests are kept": {"engines": 1, "mode": PauseMode.KEEP},
    "whole publications": {"engines": 1, "publish": True},
    "found paused": {"engines": 1, "found": (Truth(paused=True),)},
    "found half-way through an update": {
        "engines": 1,
        "found": (Truth(paused=True, whole=False, session=True, received=1),),
    },
    "found with another version": {"engines": 1, "found": (Truth(holds=0, label=0),)},
    "found dead": {"engines": 1, "found": (Truth(alive=False),)},
}


@pytest.mark.parametrize("options", SMALL.values(), ids=SMALL)
def test_one_fault_breaks_nothing(options: dict[str, Any]) -> None:
    """Whatever goes wrong once, and whatever is done about it, every predicate holds and RUNNING can be reached."""
    found = explore(faults=1, **options)
    assert found.counterexample is None, str(found)
    assert found.states > 100


def test_two_faults_break_nothing() -> None:
    """The same for two faults at one engine: the second may meet the cure of the first."""
    found = explore(engines=1, faults=2)
    assert found.counterexample is None, str(found)
    assert found.states > 1000


def test_without_faults_there_are_few_states() -> None:
    """Engines that behave go round one cycle, alike: however many they are, the states are the same."""
    one, three = explore(engines=1, faults=0), explore(engines=3, faults=0)
    assert one.counterexample is three.counterexample is None
    assert one.states == three.states
    assert one.edges == three.edges
