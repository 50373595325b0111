"""Put the demo together: engines, lifecycle, rollouts, trainer; and tell how it went."""

import json
import signal
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.to_thread
import torch
from attrs import define, field, frozen
from rich.console import Console

from adapters.engines import EmbeddedEngine, SGLangEngine, VLLMEngine
from adapters.engines.embedded import save
from adapters.transfers import Broadcast, Disk, ModuleSource
from lifecycle import FleetPolicy, Lifecycle, PauseMode, PublishReport, StalenessBudget, Standing, State, errors
from lifecycle.diagram import markdown, mermaid
from lifecycle.ports import TransferPort
from lifecycle.trace import Verdict, verify_file

from .display import Display, Progress
from .rollouts import Rollouts
from .trainer import Trainer, new_model

_GROUPS, _GROUP_SIZE = 32, 16
_REWARDS_AVERAGED = 5
"""Steps over which the last reward is averaged."""
_SPEAKS = {"sglang": SGLangEngine, "vllm": VLLMEngine}


@frozen(kw_only=True)
class Options:
    """What can be chosen."""

    engines: int = 2
    steps: int = 60
    dialect: str = "sglang"
    transfer: str = "broadcast"
    max_staleness: int = 2
    pause_mode: PauseMode = PauseMode.ABORT
    seed: int = 0
    out: Path = Path("run")


@define(kw_only=True)
class Record:
    """What happened, step by step."""

    rewards: list[float] = field(factory=list)
    reports: list[PublishReport] = field(factory=list)
    interrupted_by_user: bool = False
    died: list[str] = field(factory=list)
    """Engines whose process ended before the demo did."""


@frozen(kw_only=True)
class Result:
    """How it went."""

    summary: dict[str, Any]
    """With the keys that `--json` promises."""
    sound: bool
    """No rule is broken, and no engine that lives is left paused."""
    interrupted: bool
    """A signal ended it early."""
    died: tuple[str, ...]


class DemoFailed(RuntimeError):
    """The demo could not go on."""


def run(options: Options, console: Console) -> Result:
    """Run the demo.

    Raises `ValueError` for options that make no sense, and `DemoFailed` when no engine is left to go on with.
    """
    journal = _prepare(options)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    record = Record()
    try:
        anyio.run(_main, options, record, journal, console)
    except (BaseExceptionGroup, errors.LifecycleError, RuntimeError, OSError) as error:
        cause = _the_cause(error)
        died = f"{' and '.join(record.died)} died, and " if record.died else ""
        raise DemoFailed(f"{died}{'nothing could go on: ' if died else ''}{cause}") from error
    verdict = verify_file(journal) if journal.exists() else Verdict()
    return Result(
        summary=summary(record, verdict),
        # What a process owed is no more when the process is no more.
        sound=verdict.sound and set(verdict.unmatched) <= set(record.died),
        interrupted=record.interrupted_by_user,
        died=tuple(record.died),
    )


def _prepare(options: Options) -> Path:
    """Check what can be checked, and make place for the files. Returns where the journal goes."""
    modes = _SPEAKS[options.dialect]("http://127.0.0.1").capabilities.pause_modes
    if options.pause_mode not in modes:
        known = ", ".join(sorted(mode.value for mode in modes))
        raise ValueError(f"{options.dialect} has no pause mode {options.pause_mode.value!r}; it has {known}")
    journal = options.out / "journal.jsonl"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        journal.unlink(missing_ok=True)
        (options.out / "lifecycle.mmd").write_text(mermaid(highlight=State.RUNNING), encoding="utf-8")
        (options.out / "lifecycle.md").write_text(markdown(), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{options.out} is no place for files: {error}") from error
    return journal


async def _main(options: Options, record: Record, journal: Path, console: Console) -> None:
    model = new_model(options.seed)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="rollout-lifecycle-")))
        await stack.enter_async_context(_ended_by_signals(record))
        save(model, directory / "model")
        console.print(f"starting {options.engines} embedded engines ({options.dialect}) ...", highlight=False)
        engines = await _start(stack, options, directory / "model", record)
        lifecycle = Lifecycle(
            [engine.engine for engine in engines],
            transfer=_transfer(options, directory),
            budget=StalenessBudget(
                batch_size=_GROUPS * _GROUP_SIZE,
                max_staleness=options.max_staleness,
                max_concurrent=2 * _GROUPS * _GROUP_SIZE,
            ),
            name="demo",
            pause_mode=options.pause_mode,
            # One engine is enough to go on, and to learn: more slowly.
            policy=FleetPolicy(min_engines=1),
            journal=journal,
        )
        await stack.enter_async_context(lifecycle)
        display = stack.enter_context(Display(lifecycle, console))
        await _train(options, record, lifecycle, model, display)


async def _train(options: Options, record: Record, lifecycle: Lifecycle, model: Any, display: Display) -> None:
    trainer = Trainer(model)
    source = ModuleSource(model)
    rollouts = Rollouts(lifecycle, group_size=_GROUP_SIZE, in_progress=2 * _GROUPS, seed=options.seed)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rollouts.run)
        for step in range(1, options.steps + 1):
            groups = await rollouts.batch(_GROUPS, options.max_staleness)
            staleness = lifecycle.consume(sample.ticket for group in groups for sample in group.samples)
            # In a thread, so that engines are fed and rollouts accepted while the trainer computes.
            reward = await anyio.to_thread.run_sync(trainer.step, groups)
            report = await publish(lifecycle, source, step)
            record.rewards.append(reward)
            record.reports.append(report)
            display.show(
                Progress(
                    step=step,
                    steps=options.steps,
                    reward=reward,
                    pause_seconds=report.pause_seconds,
                    staleness=max(staleness),
                    dropped=rollouts.dropped,
                )
            )
        tasks.cancel_scope.cancel()


async def publish(lifecycle: Lifecycle, source: ModuleSource, version: int) -> PublishReport:
    """Publish, and once more with the engines that are left when one died in the middle.

    Cancellation: as in `Lifecycle.publish`.
    """
    try:
        return await lifecycle.publish(source, version=version)
    except errors.OperationFailed:
        lost = any(view.standing is Standing.LOST for view in lifecycle.engines)
        if lifecycle.state is State.FAULTED or not lost:
            raise
        return await lifecycle.publish(source, version=version)


def summary(record: Record, verdict: Verdict) -> dict[str, Any]:
    """Return what happened in the words of `--json`."""
    pauses = [report.pause_seconds for report in record.reports]
    last = record.rewards[-_REWARDS_AVERAGED:]
    return {
        "steps": len(record.reports),
        "version": verdict.version,
        "reward_first": record.rewards[0] if record.rewards else None,
        "reward_last": statistics.fmean(last) if last else None,
        "pauses": verdict.pauses,
        "continues": verdict.continues,
        "unmatched": len(verdict.unmatched),
        "max_staleness_seen": verdict.max_staleness_seen,
        "tokens": verdict.tokens,
        "interrupted_generations": verdict.interrupted,
        "pause_seconds_p50": statistics.median(pauses) if pauses else None,
        "pause_seconds_max": max(pauses, default=None),
        "transfer_seconds_p50": statistics.median(r.transfer_seconds for r in record.reports) if pauses else None,
        "bytes_per_publication": record.reports[-1].nbytes if record.reports else None,
        "verdict": str(verdict),
    }


def _the_cause(error: BaseException) -> BaseException:
    """Return what a task group that failed failed of: the lifecycle's own error before any other."""
    pending, leaves = [error], []
    while pending:
        error = pending.pop(0)
        if isinstance(error, errors.OperationFailed):
            return error
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, errors.LifecycleError)), leaves[0])


async def _start(stack: AsyncExitStack, options: Options, model: Path, record: Record) -> list[EmbeddedEngine]:
    """Start the engines side by side, each in a process of its own, and write down which those are."""
    engines = [EmbeddedEngine(model=model, dialect=options.dialect, name=f"engine-{i}") for i in range(options.engines)]
    async with anyio.create_task_group() as tasks:
        for engine in engines:
            stack.push_async_exit(engine)  # before it starts: it is ended whatever becomes of the others
            tasks.start_soon(engine.__aenter__)
    processes = [{"name": engine.engine.name, "pid": engine.pid, "url": engine.url} for engine in engines]
    (options.out / "engines.json").write_text(json.dumps(processes, indent=2) + "\n", encoding="utf-8")
    stack.callback(lambda: record.died.extend(engine.engine.name for engine in engines if not engine.running))
    return engines


def _transfer(options: Options, directory: Path) -> TransferPort:
    if options.transfer == "disk":
        return Disk(directory / "weights", template=directory / "model")
    return Broadcast()


@asynccontextmanager
async def _ended_by_signals(record: Record) -> AsyncIterator[None]:
    """Let Ctrl-C and SIGTERM end what runs within, with everything closed on the way out."""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    record.interrupted_by_user = True
                    tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()
