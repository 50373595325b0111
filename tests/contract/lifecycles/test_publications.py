"""Publications to a server that generates: clean, exact, and the same as a start from those weights."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from anyio import to_thread

from adapters.transfers import Disk
from lifecycle import PauseMode, State
from tests.contract.dialects import wire_to
from tests.contract.engines.servers import Server
from tests.contract.expectations import MODES
from tests.contract.wire import PROMPT

from .exactness import assert_accounted, assert_exact
from .stage import RUN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lifecycle.ports import TransferPort
    from tests.contract.conftest import Weights
    from tests.contract.wire import Wire

    from .stage import Rollout, Stage

    Ask = Callable[[Wire], list[list[int]]]

pytestmark = pytest.mark.anyio

TEN = range(1, 11)
SHORT = {"sglang": 30, "vllm": 200}
"""Tokens of a rollout that a publication, begun when it is under way, finds still there."""


async def ten_publications(stage: Stage, transfer: TransferPort, mode: PauseMode) -> list[Rollout]:
    """Publish ten times, each time with another generation under way, and look at each report. Returns the rollouts.

    Cancellation: the lifecycle is closed.
    """
    async with stage.lifecycle(transfer=transfer, pause_mode=mode) as lifecycle:
        async with stage.rollouts(lifecycle, SHORT[stage.wire.dialect]) as rollouts:
            for version in TEN:
                await rollouts.launch()
                report = await lifecycle.publish(stage.source(version), version=version)
                assert (report.version, report.previous, report.state) == (version, version - 1, State.RUNNING)
                assert (report.fenced, report.failures) == ({}, ())
                assert report.interrupted >= 1
        assert (lifecycle.state, lifecycle.version) == (State.RUNNING, TEN[-1])
        assert [(view.version, view.debt, view.dirty) for view in lifecycle.engines] == [(TEN[-1], None, False)]
    return rollouts.landed


def assert_left_well(stage: Stage) -> None:
    """Assert that the engine serves the last version, and that the journal of it all is sound."""
    stage.wire.hurry()
    assert (stage.wire.version(), stage.wire.paused()) == (f"{RUN}:{TEN[-1]}", False)
    assert stage.wire.tokens() == stage.weights(TEN[-1]).tokens
    verdict = stage.verdict()
    assert (verdict.violations, verdict.unmatched, verdict.closed) == ([], (), True)
    assert (verdict.version, verdict.pauses, verdict.continues) == (TEN[-1], len(TEN), len(TEN))


async def test_ten_publications_in_a_row_are_clean_while_it_generates(stage: Stage, mode: str) -> None:
    """In every mode: nothing fenced, nothing failed, no debt left, and every token accounted for."""
    landed = await ten_publications(stage, stage.broadcast(), PauseMode(mode))
    assert len(landed) == len(TEN)
    for rollout in landed:
        assert_accounted(rollout, SHORT[stage.wire.dialect])
    if not MODES[stage.wire.dialect][mode].flushes:
        stage.wire.until_idle()  # what stood in place kept the old cache, and later prompts may find it
    assert_left_well(stage)


async def test_ten_publications_from_disk_are_clean_while_it_generates(stage: Stage, tmp_path: Path) -> None:
    """The same where weights travel as files."""
    landed = await ten_publications(stage, Disk(tmp_path / "weights", fsync=False), PauseMode.ABORT)
    for rollout in landed:
        assert_accounted(rollout, SHORT[stage.wire.dialect])
    assert_exact(landed, stage.weights)
    assert_left_well(stage)


async def test_each_token_is_what_the_weights_of_its_version_generate(stage: Stage, mode: str) -> None:
    """Over two publications; a request that stood in place goes on with the old weights' cache, and only says so."""
    pause = MODES[stage.wire.dialect][mode]
    tokens = stage.wire.enough
    async with (
        stage.lifecycle(transfer=stage.broadcast(packed=True), pause_mode=PauseMode(mode)) as lifecycle,
        stage.rollouts(lifecycle, tokens) as rollouts,
    ):
        for version in (1, 2):
            await rollouts.launch()
            await lifecycle.publish(stage.source(version), version=version)
    for rollout in rollouts.landed:
        assert_accounted(rollout, tokens)
        assert (len(set(rollout.versions)) == 1) is (pause.in_flight == "finished")
        if pause.in_flight == "kept":
            assert_reported(rollout)
    assert_exact(rollouts.landed, stage.weights, first_version_only=not pause.flushes)


def assert_reported(rollout: Rollout) -> None:
    """Assert that the engine itself reports the versions: spans of one request, without a gap."""
    (segment,) = rollout.generation.segments
    spans = segment.spans or ()
    assert len(spans) >= 2
    assert (spans[0].start, spans[-1].end) == (0, len(segment.output_ids))
    assert all(before.end == after.start for before, after in pairwise(spans))
    labels = [f"{RUN}:{version}" for version in segment.versions]
    assert labels == [span.label for span in spans for _ in range(span.start, span.end)]


@pytest.fixture(scope="session")
def started_anew(
    server: Server, new: Weights, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Ask], list[list[int]]]:
    """Ask a second server of the same kind, started from the new weights by the first test that asks."""

    @functools.cache
    def answers(ask: Ask) -> list[list[int]]:
        other = Server(server.kind, new.path, tmp_path_factory.mktemp("logs") / f"{server.kind.name}-anew.log")
        try:
            other.start()
            with wire_to(other) as client:
                return ask(client)
        finally:
            other.stop()

    return answers


def ask(wire: Wire) -> list[list[int]]:
    """Return greedy tokens after several prompts."""
    return [wire.generate(20, prompt=[first, *PROMPT[1:]]).tokens for first in (5, 6, 7)]


@pytest.mark.parametrize("route", ["plain", "packed", "disk"])
async def test_after_a_publication_it_generates_what_a_server_started_from_the_weights_does(
    stage: Stage, started_anew: Callable[[Ask], list[list[int]]], route: str, tmp_path: Path
) -> None:
    """However they travelled, and although the prompts were answered before out of the old weights."""
    transfer = Disk(tmp_path / "weights") if route == "disk" else stage.broadcast(packed=route == "packed")
    before = ask(stage.wire)
    async with stage.lifecycle(transfer=transfer) as lifecycle:
        await lifecycle.publish(stage.source(1), version=1)
    after = ask(stage.wire)
    assert before != after
    assert after == await to_thread.run_sync(started_anew, ask)
