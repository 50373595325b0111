"""SGLang's updates beyond what both dialects share: sessions, refusals, half-truths about versions and caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from .trainer import training
from .wire import GROUP

if TYPE_CHECKING:
    from .conftest import Weights
    from .dialects import SGLang
    from .wire import Named

DIALECT = "sglang"
NOT_FLUSHED = "Weights were updated, but the cache was not flushed"


def named(weights: Weights) -> Named:
    """All tensors of a model."""
    return list(weights.model.tensors())


def checksum(wire: SGLang) -> Any:
    """What the server says its weights add up to."""
    return wire.post("/weights_checker", {}).body["per_engine_checksum"]


def test_a_broken_order_is_refused_and_breaks_nothing(wire: SGLang, old: Weights) -> None:
    """400 with the reason: update or end without a session, begin twice, destroy what is not there."""
    refusals = [
        wire.announce([]).answer(),
        wire.end(),
        wire.post("/destroy_weights_update_group", {"group_name": "nobody"}),
    ]
    assert wire.begin().status == 200
    refusals += [wire.begin(), wire.announce([]).answer()]
    assert wire.end().status == 200
    refusals.append(wire.end())
    no_end = "no weight-update session is open; call begin_weight_update() first"
    expected = [
        "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()",
        no_end,
        "The group to be destroyed does not exist.",
        "a weight-update session is already open; call end_weight_update() first",
        f"Failed to receive weights: Group {GROUP} not in [].",
        no_end,
    ]
    assert [(answer.status, answer.body["success"]) for answer in refusals] == [(400, False)] * len(expected)
    for answer, reason in zip(refusals, expected, strict=True):
        assert str(answer.body["message"]).startswith(reason.split(" Please")[0][:60])
    assert wire.tokens() == old.tokens


def test_a_dtype_that_torch_does_not_know_is_refused_before_anything_is_received(wire: SGLang, new: Weights) -> None:
    """400: a trainer that has begun to send is left waiting, unless it looks at the answer."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        flight = wire.later(
            "/update_weights_from_distributed",
            {"names": ["model.norm.weight"], "dtypes": ["torch.bfloat16"], "shapes": [[128]], "group_name": GROUP},
        )
        answer = flight.answer()
        assert (answer.status, answer.body["success"]) == (400, False)
        assert trainer.update(named(new)).status == 200  # nothing was received, so that the group still serves
    wire.end("new")
    wire.resume()
    assert wire.tokens() == new.tokens


def test_an_update_while_requests_stand_in_place_succeeds_and_is_answered_as_a_failure(
    wire: SGLang, old: Weights, new: Weights
) -> None:
    """400, yet the weights are the new ones: an error is no disproof. What the server says of itself stays behind."""
    flight = wire.fly(name="flight")
    wire.pause("in_place")
    answer = wire.load(new.path, weight_version="new")
    assert (answer.status, answer.body["success"]) == (400, False)
    assert answer.body["message"].startswith(NOT_FLUSHED)
    info = wire.get("/model_info").body
    assert (info["model_path"], info["weight_version"]) == (str(old.path), "old")
    wire.resume()
    wire.generate(2)  # which runs beside it
    wire.abort("flight")
    assert [version for version, _, _ in flight.completed().versions] == ["old", "new"]
    wire.until_idle()
    assert wire.tokens() == new.tokens
    assert (wire.version(), wire.generate(8).versions) == ("old", [("new", 0, 8)])


def test_the_same_over_gloo_is_answered_as_a_failure_too(wire: SGLang, new: Weights) -> None:
    """400 after the tensors have come and been loaded."""
    wire.fly(name="flight")
    wire.pause("in_place")
    with training(wire) as trainer:
        wire.begin()
        answer = trainer.update(named(new))
        assert (answer.status, answer.body["message"][: len(NOT_FLUSHED)]) == (400, NOT_FLUSHED)
        assert wire.end().status == 200
    wire.resume()
    wire.abort_all()
    wire.until_idle()
    assert wire.tokens() == new.tokens


def test_an_update_without_a_flush_leaves_a_stale_prefix_cache(wire: SGLang, new: Weights) -> None:
    """The same prompt is answered out of the old weights' cache, silently, until it is flushed."""
    prompt = [token % 500 for token in range(700)]
    before = wire.generate(8, prompt).tokens
    assert wire.load(new.path, flush_cache=False).status == 200
    stale = wire.generate(8, prompt).tokens
    assert wire.flush()
    fresh = wire.generate(8, prompt).tokens
    assert len(fresh) == 8
    assert stale != fresh
    assert before != fresh


def test_an_update_while_not_paused_waits_for_what_runs(wire: SGLang, new: Weights) -> None:
    """A running request ends on the old weights; one sent after the update runs after it, on the new ones."""
    running = wire.fly(tokens=wire.enough, name="running")
    update = wire.later("/update_weights_from_disk", {"model_path": str(new.path), "weight_version": "new"})
    wire.exchange()
    later = wire.start(8)
    wire.exchange()
    assert not update.landed
    assert not later.landed
    assert not running.landed
    wire.hurry()
    assert running.completed().versions == [("old", 0, wire.enough)]
    assert update.answer().status == 200
    assert later.completed().versions == [("new", 0, 8)]
    assert later.completed().tokens == new.tokens


def test_a_session_while_not_paused_waits_for_what_runs(wire: SGLang, old: Weights) -> None:
    """Begin is answered when the last request has ended."""
    running = wire.fly(name="running")
    begin = wire.later("/begin_weight_update", {})
    wire.exchange()
    assert not begin.landed
    assert running.goes_on()
    wire.abort("running")
    assert running.completed().finish == "abort"
    assert begin.answer().status == 200
    assert wire.tokens() == old.tokens  # an open session does not keep generation out
    assert wire.end().status == 200


def test_an_update_takes_path_and_name_of_the_model_along(wire: SGLang, new: Weights) -> None:
    """Clients that ask for the model by its first name are at a loss afterwards."""
    answer = wire.load(new.path, weight_version="new")
    assert answer.body == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to new.",
        "num_paused_requests": 0,
    }
    info = wire.get("/model_info").body
    assert (info["model_path"], info["weight_version"]) == (str(new.path), "new")
    assert wire.get("/v1/models").body["data"][0]["id"] == str(new.path)


def test_an_update_in_a_retract_pause_is_whole_and_the_request_goes_on(wire: SGLang, new: Weights) -> None:
    """200: nothing holds the cache; the request's tokens have two versions."""
    flight = wire.fly(name="flight")
    wire.pause("retract")
    assert wire.load(new.path, weight_version="new").status == 200
    wire.resume()
    wire.generate(2)  # which runs beside it
    wire.abort("flight")
    assert [version for version, _, _ in flight.completed().versions] == ["old", "new"]
    assert wire.tokens() == new.tokens


def test_the_checksum_is_the_same_however_the_weights_came(wire: SGLang, old: Weights, new: Weights) -> None:
    """The best proof of what is loaded: a function of the weights alone."""
    before = checksum(wire)
    wire.load(new.path)
    from_disk = checksum(wire)
    wire.load(old.path)
    assert checksum(wire) == before
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        assert trainer.update(named(new)).status == 200
        wire.end()
    assert checksum(wire) == from_disk
    assert from_disk != before


def test_a_wrong_shape_over_gloo_leaves_the_weights_half_written(wire: SGLang, new: Weights) -> None:
    """400 that says so; the version stays, the server lives, and a whole update cures it."""
    tensors = named(new)
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        answer = trainer.update([*tensors[:3], ("model.norm.weight", torch.zeros(64, dtype=torch.bfloat16))])
        assert answer.status == 400
        assert answer.body["message"].startswith("Failed to update parameter online:")
        assert "partially updated" in answer.body["message"]
        assert wire.version() == "old"
        assert trainer.update(tensors).status == 200
        assert wire.end().status == 200
    wire.resume()
    assert wire.tokens() == new.tokens


def test_names_that_the_model_does_not_have_are_taken_silently(wire: SGLang, old: Weights) -> None:
    """200, and nothing is loaded."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        answer = trainer.update([("model.nope", torch.zeros(4, dtype=torch.bfloat16))])
        assert (answer.status, answer.body["success"]) == (200, True)
        wire.end()
    wire.resume()
    assert wire.tokens() == old.tokens


def test_a_list_of_dtypes_that_is_too_short_is_taken_silently(wire: SGLang, old: Weights, new: Weights) -> None:
    """200: what has no dtype is neither received nor loaded."""
    wire.pause("abort")
    with training(wire):
        wire.begin()
        names = [name for name, _ in named(new)]
        shapes = [list(tensor.shape) for _, tensor in named(new)]
        body = {"names": names, "dtypes": [], "shapes": shapes, "group_name": GROUP}
        answer = wire.later("/update_weights_from_distributed", body).answer()
        assert (answer.status, answer.body["success"]) == (200, True)
        wire.end()
    wire.resume()
    assert wire.tokens() == old.tokens


def test_a_continue_waits_for_an_update_that_is_being_received(wire: SGLang, new: Weights) -> None:
    """Paused, the update holds the gate, so that nothing is generated out of half of it."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        update = wire.announce(named(new))
        wire.exchange()
        resume = wire.later("/continue_generation", {})
        wire.exchange()
        assert not update.landed
        assert not resume.landed
        trainer.send(named(new))
        assert (update.answer().status, resume.answer().status) == (200, 200)
        wire.end()
    assert wire.tokens() == new.tokens


def test_a_client_that_gives_up_on_an_update_does_not_end_it(wire: SGLang, new: Weights) -> None:
    """The engine still receives and loads: never send an update again before asking."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        update = wire.announce(named(new))
        wire.exchange()
        update.hang_up()
        trainer.send(named(new))
        assert wire.end().status == 200
    wire.resume()
    assert wire.tokens() == new.tokens


def test_a_group_may_be_left_and_made_anew(wire: SGLang, new: Weights) -> None:
    """Under the same name, at another port."""
    wire.pause("abort")
    for _ in range(2):
        with training(wire) as trainer:
            wire.begin()
            assert trainer.update(named(new)).status == 200
            wire.end()
        assert wire.post("/destroy_weights_update_group", {"group_name": GROUP}).status == 200
    wire.resume()
    assert wire.tokens() == new.tokens


def test_a_new_label_aborts_everything_unless_it_is_told_not_to(wire: SGLang) -> None:
    """The default of the field is true."""
    flight = wire.fly()
    answer = wire.post("/update_weight_version", {"new_version": "word"})
    assert answer.body == {"success": True, "message": "Weight version updated to word", "new_version": "word"}
    assert flight.completed().finish == "abort"
    gentle = wire.fly(name="gentle")
    assert wire.label("other").status == 200
    wire.generate(2)  # which runs beside it
    wire.abort("gentle")
    assert [version for version, _, _ in gentle.completed().versions] == ["word", "other"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_disk", {}),
        ("/update_weight_version", {"new_version": 7}),
        ("/update_weights_from_distributed", {"names": []}),
        ("/begin_weight_update", {"selector": "bogus"}),
        ("/weights_checker", {"action": "bogus"}),
    ],
)
def test_a_wrong_body_is_refused(wire: SGLang, old: Weights, path: str, body: dict[str, Any]) -> None:
    """400, and nothing changed."""
    assert wire.post(path, body).status == 400
    assert (wire.version(), wire.tokens()) == ("old", old.tokens)
