"""vLLM's updates beyond what both dialects share: their order, their traps, and what blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from .trainer import training

if TYPE_CHECKING:
    from .conftest import Weights
    from .dialects import VLLM
    from .flights import Answer
    from .wire import Named

DIALECT = "vllm"

NO_START = "finish_weight_update called without a matching start_weight_update."
ACTIVE = "start_weight_update called while a weight update is already active. Call finish_weight_update first."


def named(weights: Weights) -> Named:
    """All tensors of a model."""
    return list(weights.model.tensors())


def said(answer: Answer) -> str:
    """What the worker said, in the frame in which vLLM puts it."""
    assert (answer.status, answer.body["error"]["type"]) == (500, "InternalServerError")
    message = str(answer.body["error"]["message"])
    assert message.startswith("Call to collective_rpc method failed: Worker failed with error '")
    return message


def test_a_broken_order_is_refused_and_breaks_nothing(wire: VLLM, old: Weights, new: Weights) -> None:
    """500 with the reason: update or finish before start, start twice, shutdown within."""
    wire.pause("abort")
    assert NO_START in said(wire.end("never"))
    assert "start_weight_update must be called before update_weights." in said(wire.announce([]).answer())
    assert wire.begin().status == 200
    assert ACTIVE in said(wire.begin())
    assert "Cannot release a trainer connection during a weight update" in said(
        wire.post("/shutdown_weight_transfer_engine")
    )
    assert wire.end().status == 200
    assert NO_START in said(wire.end("never"))
    wire.resume()
    assert wire.version() == "old"
    assert wire.tokens() == old.tokens
    assert new.tokens != old.tokens


def test_a_start_refused_does_not_end_the_session(wire: VLLM, new: Weights) -> None:
    """What an earlier trainer left open can be used, or finished."""
    wire.pause("abort")
    with training(wire) as trainer:
        assert wire.begin().status == 200
        assert wire.begin().status == 500
        assert trainer.update(named(new)).status == 200
        assert wire.end("new").status == 200
    wire.resume()
    assert wire.tokens() == new.tokens


def test_shutting_the_connection_down_may_be_repeated(wire: VLLM) -> None:
    """200, whether there is one or not."""
    for _ in range(2):
        answer = wire.post("/shutdown_weight_transfer_engine")
        assert (answer.status, answer.body) == (200, {"message": "Weight transfer shut down"})


def test_a_failed_update_closes_its_session_and_an_empty_one_brings_the_old_weights_back(
    wire: VLLM, old: Weights
) -> None:
    """The finish after it is refused; a start and a finish with nothing between put the old tensors in place."""
    wire.pause("abort")
    assert wire.begin().status == 200
    said(wire.announce(named(old)).answer())  # no group was joined
    assert NO_START in said(wire.end("never"))
    assert (wire.begin().status, wire.end().status) == (200, 200)
    wire.resume()
    assert (wire.version(), wire.tokens()) == ("old", old.tokens)


def test_an_unknown_name_fails_the_update(wire: VLLM, new: Weights) -> None:
    """500 that names it; a whole update makes it good."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        answer = trainer.update([("model.nope", torch.zeros(4, dtype=torch.bfloat16))])
        assert "nope" in said(answer)
    with training(wire) as trainer:
        wire.begin()
        assert trainer.update(named(new)).status == 200
        assert wire.end("new").status == 200
    wire.resume()
    assert wire.tokens() == new.tokens


def test_a_tensor_that_comes_twice_fails_the_update(wire: VLLM, new: Weights) -> None:
    """On CPU a layer that is complete is given away at once, and takes nothing more."""
    wire.pause("abort")
    tensors = named(new)
    twice = [pair for pair in tensors if "o_proj" in pair[0]][:1]
    with training(wire) as trainer:
        wire.begin()
        assert trainer.update(tensors).status == 200
        assert "Attempted to load weight" in said(trainer.update(twice))


def test_another_dtype_is_converted(wire: VLLM, new: Weights) -> None:
    """float32 for a model in bfloat16 is taken without a word."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        assert trainer.update([(name, tensor.float()) for name, tensor in named(new)]).status == 200
        assert wire.end("new").status == 200
    wire.resume()
    assert wire.tokens() == new.tokens


def test_an_update_blocks_the_engine_and_only_aborts_are_answered(wire: VLLM, old: Weights, new: Weights) -> None:
    """Until the trainer sends, control calls wait; health says well; aborted requests come back."""
    wire.pause("keep")
    queued = wire.start(5)
    with training(wire) as trainer:
        wire.begin()
        update = wire.announce(named(new))
        asked = wire.later("/resume")
        wire.exchange()
        assert wire.get("/health").status == 200
        wire.abort_all()
        assert queued.completed().finish == "abort"
        assert not update.landed
        assert not asked.landed
        trainer.send(named(new))
        assert update.answer().status == 200
        assert asked.answer().status == 200
        assert wire.end("new").status == 200
    assert wire.tokens() == new.tokens
    assert new.tokens != old.tokens


def test_a_client_that_gives_up_on_an_update_does_not_end_it(wire: VLLM, new: Weights) -> None:
    """The engine still receives, and the session can be finished: never send an update again before asking."""
    wire.pause("abort")
    with training(wire) as trainer:
        wire.begin()
        update = wire.announce(named(new))
        wire.exchange()
        update.hang_up()
        trainer.send(named(new))
        assert wire.end("new").status == 200
    wire.resume()
    assert wire.tokens() == new.tokens


def test_a_group_that_nobody_hosts_is_given_up_after_its_timeout(wire: VLLM, old: Weights) -> None:
    """500, and the engine serves on; meanwhile it is blocked."""
    info: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    init = wire.later("/init_weight_transfer_engine", {"init_info": {**info, "timeout_s": 1.0}})
    said(init.answer())
    assert wire.tokens() == old.tokens


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/init_weight_transfer_engine", {"init_info": {"foo": 1}}, 500),
        ("/init_weight_transfer_engine", {}, 400),
        ("/update_weights", {}, 400),
        ("/update_weight_version", {"new_version": 7}, 400),
        ("/collective_rpc", {}, 400),
        ("/collective_rpc", {"method": "nope"}, 500),
    ],
)
def test_a_wrong_body_is_refused(wire: VLLM, path: str, body: dict[str, Any], status: int) -> None:
    """400 for what the front end sees, 500 for what the worker sees, though both are the caller's fault."""
    answer = wire.post(path, body)
    assert answer.status == status
    assert answer.body["error"]["code"] == status
    assert wire.version() == "old"


def test_a_path_sticks(wire: VLLM, old: Weights, new: Weights) -> None:
    """A reload without a path reads the last one given, good or bad."""
    wire.pause("abort")
    again = {"method": "reload_weights", "kwargs": {}}
    assert wire.load(new.path).status == 200
    assert wire.post("/collective_rpc", again).status == 200
    assert wire.load(new.path / "nowhere").status == 500
    assert wire.post("/collective_rpc", again).status == 500
    assert wire.load(old.path).status == 200
    wire.resume()
    assert wire.flush()
    assert wire.tokens() == old.tokens


def test_a_reload_while_requests_run_mixes_weights_in_them(wire: VLLM, new: Weights) -> None:
    """It goes in between two steps: the request runs on, under the old label for all of its tokens."""
    flight = wire.fly(name="flight")
    assert wire.load(new.path).status == 200
    assert flight.goes_on()
    wire.abort("flight")
    assert [version for version, _, _ in flight.completed().versions] == ["old"]
    assert wire.tokens() == new.tokens


def test_a_version_is_a_word_that_nothing_checks(wire: VLLM, old: Weights) -> None:
    """Any text at any time, also while a request runs, which then has two spans."""
    flight = wire.fly(name="flight")
    assert wire.label("word").body == {"success": True, "new_version": "word"}
    assert flight.goes_on()
    wire.generate(1)
    wire.abort("flight")
    (first, _, middle), (second, start, _) = flight.completed().versions
    assert (first, second, start) == ("old", "word", middle)
    assert wire.tokens() == old.tokens


def test_the_world_is_as_large_as_its_workers(wire: VLLM) -> None:
    """One here; a trainer's group has one rank more."""
    assert wire.get("/get_world_size").body == {"world_size": 1}
