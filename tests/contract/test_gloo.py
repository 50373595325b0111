"""Updates over a gloo group, and what a failed one leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .trainer import training

if TYPE_CHECKING:
    from .conftest import Weights
    from .wire import Named, Wire


def named(weights: Weights) -> Named:
    """All tensors of a model."""
    return list(weights.model.tensors())


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_an_update_over_gloo_serves_the_new_weights(wire: Wire, new: Weights, *, packed: bool) -> None:
    """Paused, begun, received, ended, continued: the new model's tokens, under the new version."""
    wire.pause("abort")
    with training(wire, packed=packed) as trainer:
        assert wire.begin().status == 200
        assert trainer.update(named(new)).status == 200
        assert wire.end("new").status == 200
    wire.resume()
    assert wire.version() == "new"
    assert (wire.tokens(), wire.generate(8).versions) == (new.tokens, [("new", 0, 8)])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_an_update_may_come_in_parts_and_split_a_fused_layer(wire: Wire, new: Weights, *, packed: bool) -> None:
    """Any number of updates fit in one session, wherever the tensors are cut."""
    tensors = named(new)
    cut = next(i for i, (name, _) in enumerate(tensors) if "q_proj" in name) + 1
    wire.pause("abort")
    with training(wire, packed=packed) as trainer:
        wire.begin()
        for part in (tensors[:cut], tensors[cut:-2], tensors[-2:]):
            assert trainer.update(part).status == 200
        assert wire.end("new").status == 200
    wire.resume()
    assert wire.flush()
    assert wire.tokens() == new.tokens


def test_a_session_without_all_tensors_is_mixed_in_silently(wire: Wire, old: Weights, new: Weights) -> None:
    """What was not sent keeps its old value, and nobody says so."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        assert trainer.update([pair for pair in named(new) if ".layers.1." not in pair[0]]).status == 200
        assert wire.end("new").status == 200
    wire.resume()
    assert wire.flush()
    assert wire.version() == "new"
    mixed = wire.tokens()
    assert len(mixed) == 8
    assert mixed not in (old.tokens, new.tokens)


def test_a_trainer_that_dies_fails_the_update_at_once(wire: Wire, old: Weights) -> None:
    """An error answer and no wait for a timeout; with the session closed or reopened, the old weights are whole."""
    wire.pause("abort")
    with training(wire) as trainer:
        assert wire.begin().status == 200
        flight = wire.announce(named(old))
        trainer.die()
        answer = flight.answer()
    assert answer.status == {"sglang": 400, "vllm": 500}[wire.dialect]
    if wire.dialect == "vllm":
        assert wire.begin().status == 200  # the failure closed the session; an empty one gives the old weights back
    assert wire.end().status == 200
    wire.resume()
    assert wire.version() == "old"
    assert wire.tokens() == old.tokens


def test_a_failed_update_is_cured_by_a_whole_one(wire: Wire, new: Weights) -> None:
    """A new group and a full update on the still paused engine, then continue: the new weights, whole."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        flight = wire.announce(named(new))
        trainer.send(named(new)[:5])
        trainer.die()
        assert flight.answer().status == {"sglang": 400, "vllm": 500}[wire.dialect]
    if wire.dialect == "sglang":
        assert wire.end().status == 200
        assert wire.post("/destroy_weights_update_group", {"group_name": "contract"}).status == 200
    with training(wire) as trainer:
        assert wire.begin().status == 200
        assert trainer.update(named(new)).status == 200
        assert wire.end("new").status == 200
    wire.resume()
    assert wire.flush()
    assert wire.tokens() == new.tokens


def test_a_failed_update_is_cured_by_a_load_from_disk(wire: Wire, new: Weights) -> None:
    """A full reload puts a whole model in place, whatever state the session was left in."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        flight = wire.announce(named(new))
        trainer.send(named(new)[:5])
        trainer.die()
        assert flight.answer().status != 200
    assert wire.load(new.path).status == 200
    wire.resume()
    assert wire.flush()
    assert wire.tokens() == new.tokens


def test_an_empty_session_keeps_the_weights_and_takes_the_version(wire: Wire, old: Weights) -> None:
    """A version is a word: nothing checks that any weights came with it."""
    wire.pause("abort")
    assert (wire.begin().status, wire.end("new").status) == (200, 200)
    wire.resume()
    assert wire.version() == "new"
    assert wire.tokens() == old.tokens
