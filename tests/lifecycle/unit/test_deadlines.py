"""Deadlines: one for every request to an engine, and none that makes no sense."""

import math

import attrs
import pytest

from lifecycle import Deadlines
from lifecycle import events as e

TO_ENGINES = sorted(
    (kind for kind in e.all_events().values() if issubclass(kind, e.Request) and kind.fact is not None),
    key=lambda kind: kind.__name__,
)
FIELDS = [field.name for field in attrs.fields(Deadlines)]


@pytest.mark.parametrize("kind", TO_ENGINES, ids=lambda kind: kind.__name__)
def test_every_request_to_an_engine_has_a_deadline(kind: type[e.Request]) -> None:
    """No request can be waited for without an end."""
    seconds = Deadlines().of(kind)
    assert 0 < seconds < math.inf


def test_a_deadline_is_read_when_it_is_needed() -> None:
    """A run can change its deadlines while it goes on."""
    deadlines = Deadlines(pause=3)
    before = deadlines.of(e.PauseGeneration)
    deadlines.pause = 4.5
    assert (before, deadlines.of(e.PauseGeneration)) == (3.0, 4.5)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_a_deadline_that_makes_no_sense_is_refused(name: str, value: float) -> None:
    """Zero, negative and undefined seconds are refused when given, and when set later."""
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds"):
        Deadlines(**{name: value})
    deadlines = Deadlines()
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds"):
        setattr(deadlines, name, value)
