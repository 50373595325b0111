"""Put the demo together: engines, lifecycle, rollouts, trainer; and tell how it went."""

import signal
import statistics
import uuid
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

from adapters.engines import HttpEngine
from adapters.engines.embedded import save
from adapters.frontends.examination import SPEAKS
from adapters.transfers import Broadcast, Disk, ModuleSource
from lifecycle import (
    Deadlines,
    FleetPolicy,
    Lifecycle,
    PublishReport,
    RolloutExecutor,
    RolloutStatus,
    StalenessBudget,
    Standing,
    State,
    errors,
)
from lifecycle.diagram import markdown, mermaid
from lifecycle.ports import TransferPort
from lifecycle.trace import Verdict, verify_file

from . import fleet
from .display import Display, Progress
from .options import Options
from .rollouts import answer, groups_of, prompts
from .trainer import Trainer, new_model

_FOREIGN_ATTACH_SECONDS = 10.0
"""Servers are given by URL when they run, so one that does not answer is told soon."""
_REWARDS_AVERAGED = 5
"""Steps over which the last reward is averaged."""


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
    fleet.at(options.urls, dialect=options.dialect)
    modes = SPEAKS[options.dialect]("http://127.0.0.1").capabilities.pause_modes
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
        engines = await _engines(stack, options, directory / "model", record, console)
        lifecycle = _lifecycle(options, engines, directory, journal)
        if options.urls:
            await fleet.attach(stack, lifecycle, engines, dialect=options.dialect)
        else:
            await stack.enter_async_context(lifecycle)
        display = stack.enter_context(Display(lifecycle, console))
        await _train(options, record, lifecycle, model, display)


async def _engines(
    stack: AsyncExitStack, options: Options, model: Path, record: Record, console: Console
) -> list[HttpEngine]:
    """Start engines, or take those that run already."""
    if options.urls:
        engines = fleet.at(options.urls, dialect=options.dialect)
        names = ", ".join(engine.name for engine in engines)
        console.print(f"attaching to {names} ({options.dialect}) ...", highlight=False, soft_wrap=True)
        fleet.write_processes(options.out, [])
        return engines
    console.print(f"starting {options.engines} embedded engines ({options.dialect}) ...", highlight=False)
    return await fleet.start(
        stack, options.engines, dialect=options.dialect, model=model, out=options.out, died=record.died
    )


def _lifecycle(options: Options, engines: list[HttpEngine], directory: Path, journal: Path) -> Lifecycle:
    return Lifecycle(
        engines,
        transfer=_transfer(options, directory),
        budget=StalenessBudget(
            batch_size=options.groups_a_step * options.group_size,
            max_staleness=options.max_staleness,
            max_concurrent=options.max_concurrent,
        ),
        # A server that outlives this run must not take the next one's labels for its own.
        name=f"demo-{uuid.uuid4().hex[:8]}" if options.urls else "demo",
        # What others were started from is any model of the demo, trained or not.
        initial_version=None if options.urls else 0,
        pause_mode=options.pause_mode,
        deadlines=Deadlines(attach=_FOREIGN_ATTACH_SECONDS) if options.urls else None,
        # One engine is enough to go on, and to learn: more slowly.
        policy=FleetPolicy(min_engines=1),
        journal=journal,
    )


async def _train(options: Options, record: Record, lifecycle: Lifecycle, model: Any, display: Display) -> None:
    trainer = Trainer(model)
    source = ModuleSource(model)
    # Servers of others are left whole: what has begun to move is finished first when a signal ends the demo.
    whole = bool(options.urls)
    if lifecycle.version is None:
        with anyio.CancelScope(shield=whole):
            await _publish_first(lifecycle, source)
    async with RolloutExecutor(lifecycle, group_size=options.group_size) as executor:
        dataset = prompts(options.seed)
        for step in range(1, options.steps + 1):
            rollouts = await executor.batch(dataset, answer, size=options.groups_a_step)
            # In a thread, so that engines are fed and rollouts accepted while the trainer computes.
            reward = await anyio.to_thread.run_sync(trainer.step, groups_of(rollouts))
            with anyio.CancelScope(shield=whole):
                report = await publish(lifecycle, source, step)
            record.rewards.append(reward)
            record.reports.append(report)
            display.show(
                Progress(
                    step=step,
                    steps=options.steps,
                    reward=reward,
                    pause_seconds=report.pause_seconds,
                    staleness=max(rollout.staleness or 0 for rollout in rollouts),
                    dropped=executor.outcomes[RolloutStatus.STALE],
                )
            )


async def _publish_first(lifecycle: Lifecycle, source: ModuleSource) -> None:
    """Give every engine the weights that training begins with, and open submission."""
    report = await lifecycle.publish(source, version=0)
    if report.fenced:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in report.fenced.items())
        raise DemoFailed(f"the first weights were not taken by {reasons}")
    await lifecycle.resume()


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


def _transfer(options: Options, directory: Path) -> TransferPort:
    if options.transfer == "disk":
        return Disk(directory / "weights", template=directory / "model")
    if options.urls:
        return Broadcast(address=fleet.own_address(options.urls))
    return Broadcast(backend="gloo")  # also where there is a GPU: embedded engines have none


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
