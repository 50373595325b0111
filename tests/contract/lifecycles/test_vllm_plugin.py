"""Our plugin in a real vLLM: what it takes, and what it says when it refuses."""

from __future__ import annotations

import re
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch
from anyio import to_thread

from adapters.transfers import StateDictSource
from lifecycle import State, errors
from tests.contract.engines import install
from tests.contract.trainer import training

from .transfers import Splitting

if TYPE_CHECKING:
    from collections.abc import Callable

    from adapters.transfers import Broadcast
    from lifecycle.ports import WeightSource
    from tests.contract.conftest import Weights
    from tests.contract.wire import Wire

    from .stage import Stage

    Broken = Callable[[Weights], tuple[Broadcast, WeightSource, str]]

ENGINES = {"vllm"}
pytestmark = pytest.mark.anyio


async def test_an_update_need_not_hold_the_whole_model(stage: Stage) -> None:
    """A tensor that is not sent stays as it was; in another dtype it is converted."""
    whole = dict(stage.weights(1).model.tensors())
    half = {name: tensor.float() for name, tensor in whole.items() if "layers.1" not in name}
    rest = {name: tensor for name, tensor in whole.items() if "layers.1" in name}
    async with stage.lifecycle() as lifecycle:
        await lifecycle.publish(StateDictSource(half), version=1)
        assert await to_thread.run_sync(stage.wire.tokens) not in (stage.weights(0).tokens, stage.weights(1).tokens)
        await lifecycle.publish(StateDictSource(rest), version=2)
        assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(1).tokens


def cut_off(weights: Weights) -> tuple[Broadcast, WeightSource, str]:
    """Return an update whose trainer is cut off between query and key projection, which are one layer in vLLM."""
    name = "model.layers.1.self_attn.k_proj.weight"
    source = StateDictSource(dict(weights.model.tensors()))
    return Splitting(name), source, rf"rank 1 of 2 in gloo group \S+ failed while it received '{name}'"


def misshapen(weights: Weights) -> tuple[Broadcast, WeightSource, str]:
    """Return an update with a tensor of a wrong shape."""
    tensors = dict(weights.model.tensors()) | {"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}
    return Splitting(), StateDictSource(tensors), r"the model refused 'model.norm.weight' \(bfloat16 \[64\]\): \w+"


def misnamed(weights: Weights) -> tuple[Broadcast, WeightSource, str]:
    """Return an update with a tensor that the model does not have."""
    tensors = {**dict(weights.model.tensors()), "model.nope.weight": torch.ones(3)}
    return Splitting(), StateDictSource(tensors), r"the model refused 'model.nope.weight' .*no module or par"


@pytest.mark.parametrize("broken", [cut_off, misshapen, misnamed], ids=lambda function: function.__name__)
async def test_a_failed_update_says_why_and_the_next_cures_it(stage: Stage, broken: Broken) -> None:
    """The reason names rank, group and tensor; a good update over the next group puts the engine back into service."""
    transfer, source, reason = broken(stage.weights(1))
    async with stage.lifecycle() as lifecycle:
        with pytest.raises(errors.PublicationFailed) as failed:
            await lifecycle.publish(source, version=1, transfer=transfer)
        assert any(re.search(reason, str(failure)) for failure in failed.value.exceptions), failed.value.exceptions
        assert (lifecycle.state, lifecycle.engines[0].dirty, stage.wire.paused()) == (State.PAUSED, True, True)
        report = await lifecycle.publish(stage.source(1), version=1)
        assert (report.state, report.fenced, report.failures) == (State.RUNNING, {}, ())
        assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(1).tokens
        await transfer.close()


def test_nobody_to_join_is_said_within_the_time_given(wire: Wire) -> None:
    """A trainer that is not there, or accepts and keeps silent, blocks the engine for no longer than timeout_s."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        causes = {9: "nothing listens there", silent.getsockname()[1]: "a rank keeps silent"}
        for port, cause in causes.items():
            info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            answer = wire.post("/init_weight_transfer_engine", {"init_info": {**info, "timeout_s": 1.0}})
            assert answer.status == 500
            said = rf"did not meet the others at 127.0.0.1:{port} in 1 s: {cause}"
            assert re.search(said, str(answer.body)), answer


def test_the_plugin_registers_once_and_imports_nothing_of_the_project() -> None:
    """Every process of vLLM calls it, some twice, and the engine's environment has neither of our packages."""
    program = (
        "import sys; from rollout_lifecycle_vllm import register; register(); register()\n"
        "from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as F\n"
        "print(F._registry['gloo']().__name__, sorted({'lifecycle', 'adapters'} & set(sys.modules)))"
    )
    command = [str(install.ENGINES["vllm"].python), "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env={})
    assert done.stdout.splitlines()[-1] == "GlooWeightTransferEngine []"


def test_a_silent_trainer_is_given_up_and_a_new_group_needs_no_shutdown(wire: Wire) -> None:
    """An update that nobody sends ends within the group's time; joining anew works after that, and while one stands."""
    norm = [("model.norm.weight", torch.ones(128, dtype=torch.bfloat16))]
    wire.pause("abort")
    with training(wire), training(wire):
        assert wire.begin().status == 200
        answer = wire.announce(norm).answer()
        assert answer.status == 500
        assert "failed while it received 'model.norm.weight' (bfloat16 [128]): Timed out" in str(answer.body)
        with training(wire) as trainer:
            assert wire.begin().status == 200
            assert trainer.update(norm).status == 200
