"""An embedded engine in its own process: started, spoken to in both dialects, ended whatever its state."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attrs import evolve

from adapters.engines import EmbeddedEngine, HttpEngine
from adapters.engines.embedded import CausalLM, LlamaConfig, save
from lifecycle import events as e
from lifecycle.fleet import EngineFacts
from lifecycle.generation import GenerationRequest
from lifecycle.ports import Acknowledgement, Bucket, Channel
from lifecycle.states import PauseMode

FACTS = EngineFacts(name="E1")
REQUEST = GenerationRequest(input_ids=[1, 2, 3], max_new_tokens=6, temperature=0.0, ignore_eos=True)
MODES = {
    "sglang": [PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE],
    "vllm": [PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny models that generate differently."""
    directory = tmp_path_factory.mktemp("models")
    saved = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, dtype="float32")
        saved.append(save(CausalLM(config), directory / str(seed)))
    return saved[0], saved[1]


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def embedded(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> Iterator[EmbeddedEngine]:
    """A running engine of each dialect."""
    with EmbeddedEngine(model=checkpoints[0], dialect=request.param) as engine:
        yield engine


async def performed(engine: HttpEngine, request: e.Request, facts: EngineFacts = FACTS) -> Acknowledgement:
    """Perform a request that must succeed."""
    ack = await engine.perform(request, facts, timeout=20)
    assert ack.done, f"{type(request).__name__}: {ack}"
    return ack


async def disk_update(engine: HttpEngine, path: Path, label: str, mode: PauseMode) -> None:
    """Put the model in `path` into the engine, in the legal order."""
    channel = Channel(kind="disk", name="disk")
    bucket = Bucket(index=0, last=True, path=str(path))
    pause = await performed(engine, e.PauseGeneration(mode=mode))
    assert pause.stopped
    paused = evolve(FACTS, paused=True)
    proof = await performed(engine, e.ProvePaused(mode=mode), paused)
    assert (proof.stopped, proof.idle) == (True, pause.idle)
    for request in (
        e.OpenTransfer(channel=channel),
        e.BeginUpdate(kind="disk", label=label),
        e.TransferWeights(bucket=bucket, channel=channel, label=label, mode=mode),
        e.FinishUpdate(kind="disk", label=label),
        e.VerifyWeights(kind="disk", label=label),
        e.FlushCache(mode=mode),
        e.LabelVersion(label=label),
        e.ContinueGeneration(),
        e.Canary(),
        e.CloseTransfer(channel=channel),
    ):
        await performed(engine, request, paused)


@pytest.mark.anyio
async def test_each_dialect_carries_a_whole_disk_update(
    embedded: EmbeddedEngine, checkpoints: tuple[Path, Path]
) -> None:
    """In every pause mode the new weights generate afterwards, and every token is labelled with its version."""
    engine = embedded.engine
    dialect = (await performed(engine, e.ProbeEngine())).report
    assert dialect is not None
    generated: dict[int, tuple[int, ...]] = {}
    for number, mode in enumerate(MODES[dialect.kind] * 2):
        label = f"run:{number}"
        await disk_update(engine, checkpoints[number % 2], label, mode)
        segment = await engine.generate(REQUEST, timeout=20)
        assert (len(segment.output_ids), segment.finish_reason) == (6, "length")
        assert segment.spans is not None
        assert [(span.label, span.start, span.end) for span in segment.spans] == [(label, 0, 6)]
        assert generated.setdefault(number % 2, segment.output_ids) == segment.output_ids
        report = (await performed(engine, e.ProbeEngine())).report
        assert report is not None
        assert (report.label, report.paused, report.world_size) == (label, False, 1)
    assert generated[0] != generated[1]
    await engine.aclose()


@pytest.mark.anyio
async def test_an_engine_found_paused_reports_it(embedded: EmbeddedEngine) -> None:
    """A probe sees a pause that somebody else made, and a running engine is not proven paused."""
    engine = embedded.engine
    assert (await performed(engine, e.ProvePaused())).stopped is False
    await performed(engine, e.PauseGeneration(mode=PauseMode.ABORT))
    report = (await performed(engine, e.ProbeEngine())).report
    assert report is not None
    assert report.paused is True
    await performed(engine, e.AbandonUpdate(kind="broadcast"), evolve(FACTS, paused=True))
    await performed(engine, e.ContinueGeneration())
    await engine.aclose()


@pytest.mark.anyio
async def test_a_killed_engine_is_unreachable_and_can_be_started_anew(checkpoints: tuple[Path, Path]) -> None:
    """Its process group is gone with the block; before that, a killed engine answers nothing and starts again."""
    async with EmbeddedEngine(model=checkpoints[0], name="left") as embedded:
        first = embedded.pid
        assert embedded.engine.name == "left"
        await performed(embedded.engine, e.ContinueGeneration())
        embedded.kill()
        assert not embedded.running
        ack = await embedded.engine.perform(e.ContinueGeneration(), FACTS, timeout=10)
        assert (ack.done, ack.unreachable) == (False, True)
        embedded.stop()
        second = embedded.start().pid
        assert second != first
        await performed(embedded.engine, e.ContinueGeneration())
    embedded.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(second, 0)
    with pytest.raises(RuntimeError, match="not started"):
        _ = embedded.url


def test_an_engine_that_does_not_heed_sigterm_is_killed(checkpoints: tuple[Path, Path]) -> None:
    """A stopped process can't end by itself; it is gone all the same."""
    with EmbeddedEngine(model=checkpoints[0], stop_seconds=0.2) as embedded:
        pid = embedded.pid
        with pytest.raises(RuntimeError, match="running already"):
            embedded.start()
        os.killpg(pid, signal.SIGSTOP)
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_an_engine_that_ends_at_once_tells_its_last_words(tmp_path: Path) -> None:
    """The error of a start that failed quotes what the process said."""
    engine = EmbeddedEngine(model=tmp_path / "nothing-here")
    with pytest.raises(RuntimeError, match=r"ended with code 2; its last lines: .*nothing-here"):
        engine.start()
    assert not engine.running


def test_an_engine_that_does_not_listen_in_time_is_ended(checkpoints: tuple[Path, Path]) -> None:
    """A start has a deadline, and leaves no process when it passes."""
    engine = EmbeddedEngine(model=checkpoints[0], start_seconds=0.01)
    with pytest.raises(RuntimeError, match="did not listen"):
        engine.start()
    assert not engine.running


def test_senseless_options_are_refused(tmp_path: Path) -> None:
    """What can't work is refused when the engine is described."""
    with pytest.raises(ValueError, match="dialect must be one of"):
        EmbeddedEngine(model=tmp_path, dialect="trtllm")
    with pytest.raises(ValueError, match="must be positive"):
        EmbeddedEngine(model=tmp_path, start_seconds=0)
