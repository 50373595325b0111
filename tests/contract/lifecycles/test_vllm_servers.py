"""Real vLLMs that are started otherwise: with two workers, and with a weight-transfer backend of its own."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
from anyio import to_thread

from adapters.transfers import Disk
from lifecycle import State, errors
from tests.contract.dialects import wire_to
from tests.contract.engines.servers import KINDS, Server, vllm_command

from .exactness import assert_accounted, assert_exact
from .stage import Stage
from .transfers import Splitting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from tests.contract.conftest import Weights

ENGINES = {"vllm"}
TOKENS = 800
pytestmark = pytest.mark.anyio


@contextmanager
def serving(versions: tuple[Weights, ...], folder: Path, **options: Any) -> Iterator[Stage]:
    """Start a server for one test, and end it."""
    kind = attrs.evolve(KINDS["vllm"], command=partial(vllm_command, **options))
    server = Server(kind, versions[0].path, folder / "server.log")
    try:
        server.start()
        with wire_to(server) as wire:
            yield Stage(wire, versions, folder / "journal.jsonl")
    finally:
        server.stop()


async def test_two_workers_take_their_shares(old: Weights, new: Weights, newer: Weights, tmp_path: Path) -> None:
    """Two ranks behind one engine: cut off within a fused layer, cured, and exact under a long generation."""
    with serving((old, new, newer), tmp_path, workers=2) as stage:
        async with stage.lifecycle() as lifecycle:
            cut_off = Splitting("model.layers.1.self_attn.k_proj.weight")
            with pytest.raises(errors.PublicationFailed) as failed:
                await lifecycle.publish(stage.source(2), version=2, transfer=cut_off)
            assert re.search(r"rank [12] of 3 in gloo group", str(failed.value))
            await cut_off.close()
            await lifecycle.publish(stage.source(1), version=1)
            async with stage.rollouts(lifecycle, TOKENS) as rollouts:
                await rollouts.launch()
                report = await lifecycle.publish(stage.source(2), version=2)
                assert (report.state, report.fenced, report.failures) == (State.RUNNING, {}, ())
        (rollout,) = rollouts.landed
        assert_accounted(rollout, TOKENS)
        assert set(rollout.versions) == {1, 2}
        assert_exact([rollout], stage.weights)


async def test_a_server_with_a_backend_of_vllms_own_says_what_it_takes(
    old: Weights, new: Weights, newer: Weights, tmp_path: Path
) -> None:
    """A broadcast is refused in one sentence before any weight is touched; a disk publication goes on."""
    with serving((old, new, newer), tmp_path, backend="nccl") as stage:
        async with stage.lifecycle() as lifecycle:
            await lifecycle.publish(stage.source(1), version=1, transfer=Disk(tmp_path / "weights"))
            with pytest.raises(errors.PublicationFailed) as failed:
                await lifecycle.publish(stage.source(2), version=2)
            sentence = "weight-transfer backend 'nccl' does not meet a Broadcast(): publish through Disk(), or install"
            assert sentence in str(failed.value)
            assert (lifecycle.state, lifecycle.version, lifecycle.engines[0].dirty) == (State.RUNNING, 1, False)
            assert await to_thread.run_sync(stage.wire.tokens) == stage.weights(1).tokens
