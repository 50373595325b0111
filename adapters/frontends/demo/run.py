"""Put the demo together: engines, lifecycle, rollouts, trainer; and tell how it went."""

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

from adapters.engines import EmbeddedEngine
from adapters.engines.embedded import save
from adapters.transfers import Broadcast, ModuleSource
from lifecycle import FleetPolicy, Lifecycle, PauseMode, PublishReport, StalenessBudget, State, errors
from lifecycle.diagram import markdown, mermaid
from lifecycle.ports import EnginePort, TransferPort
from lifecycle.trace import Verdict, verify_file

from .display import Display, Progress
from .rollouts import Rollouts
from .trainer import Trainer, new_model

_GROUPS, _GROUP_SIZE = 32, 16
_REWARDS_AVERAGED = 5
"""Steps over which the last reward is averaged."""


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


def run(options: Options, console: Console) -> tuple[dict[str, Any], bool]:
    """Run the demo. Returns its summary, with the keys that `--json` promises, and whether a signal ended it early.

    Raises `errors.LifecycleError` when too few engines are left to go on.
    """
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    journal = options.out / "journal.jsonl"
    journal.unlink(missing_ok=True)
    record = Record()
    try:
        anyio.run(_main, options, record, journal, console)
    except BaseExceptionGroup as group:
        raise _the_cause(group) from group
    finally:
        (options.out / "lifecycle.mmd").write_text(mermaid(highlight=State.RUNNING), encoding="utf-8")
        (options.out / "lifecycle.md").write_text(markdown(), encoding="utf-8")
    return summary(record, verify_file(journal)), record.interrupted_by_user


async def _main(options: Options, record: Record, journal: Path, console: Console) -> None:
    model = new_model(options.seed)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="rollout-lifecycle-")))
        await stack.enter_async_context(_ended_by_signals(record))
        save(model, directory / "model")
        console.print(f"starting {options.engines} embedded engines ({options.dialect}) ...", highlight=False)
        engines = await _start(stack, options, directory / "model")
        lifecycle = Lifecycle(
            engines,
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
    except errors.PublicationFailed:
        if all(view.standing.name != "LOST" for view in lifecycle.engines):
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


def _the_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the lifecycle's own error from among what a failed task group collected, or else the whole collection."""
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, errors.LifecycleError):
            return error
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
    return group


async def _start(stack: AsyncExitStack, options: Options, model: Path) -> list[EnginePort]:
    """Start the engines side by side, each in a process of its own."""
    started = [EmbeddedEngine(model=model, dialect=options.dialect, name=f"engine-{i}") for i in range(options.engines)]
    for engine in started:
        # Entered one after the other, so that each is ended whatever becomes of the next.
        await stack.enter_async_context(engine)
    return [engine.engine for engine in started]


def _transfer(options: Options, directory: Path) -> TransferPort:
    if options.transfer == "disk":
        from adapters.transfers import Disk
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
