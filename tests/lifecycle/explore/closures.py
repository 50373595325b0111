"""The closures that take minutes. Not collected by default: `python -m pytest tests/lifecycle/explore/closures.py`."""

from typing import Any

import pytest

from lifecycle.explore import explore

LARGE: dict[str, dict[str, Any]] = {
    "two engines, three faults": {"engines": 2, "faults": 3},
    "three engines, two faults": {"engines": 3, "faults": 2},
    "one of two is enough, two faults": {"engines": 2, "faults": 2, "min_engines": 1},
    "whole publications, two faults": {"engines": 1, "faults": 2, "publish": True},
    "weights at risk from the begin, two faults": {"engines": 2, "faults": 2, "at_risk_from_begin": True},
}


@pytest.mark.parametrize("options", LARGE.values(), ids=LARGE)
def test_nothing_is_broken(options: dict[str, Any]) -> None:
    """Whatever goes wrong within the bounds, every predicate holds and RUNNING can be reached."""
    found = explore(**options)
    print(found)
    assert found.counterexample is None, str(found)
