"""Ending requests: by their name, all of them, or by hanging up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conftest import Weights
    from .wire import Wire


def test_an_abort_by_name_ends_that_request_alone(wire: Wire) -> None:
    """The named one comes back with what it has; the other goes on."""
    other = wire.fly(stream=True, name="other")
    named = wire.fly(stream=True, name="named")
    assert wire.abort("named").status == 200
    completed = named.completed()
    assert completed.finish == "abort"
    assert 1 <= len(completed.tokens) < wire.long
    assert other.goes_on()
    wire.abort("other")
    assert len(other.completed().tokens) > 1


def test_an_abort_of_all_ends_everything(wire: Wire, old: Weights) -> None:
    """Whole and streamed answers come back with what they have, and the engine serves on."""
    flights = [wire.fly(stream=True), wire.fly(stream=False)]
    assert wire.abort_all().status == 200
    for flight in flights:
        completed = flight.completed()
        assert completed.finish == "abort"
        assert 1 <= len(completed.tokens) < wire.long
    assert wire.tokens() == old.tokens


def test_an_abort_of_a_name_that_nobody_has_is_answered_as_any_other(wire: Wire) -> None:
    """200: the answer does not prove that anything was aborted."""
    flight = wire.fly(stream=True, name="somebody")
    assert wire.abort("nobody").status == 200
    assert flight.goes_on()
    wire.abort("somebody")
    assert flight.completed().finish == "abort"


def test_a_client_that_hangs_up_ends_its_request(wire: Wire) -> None:
    """The engine becomes idle long before the request would have ended."""
    flight = wire.fly(stream=True)
    assert not wire.flush()
    flight.hang_up()
    wire.until_idle()
    assert wire.flush()
