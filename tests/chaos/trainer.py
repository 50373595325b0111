"""The victim: a trainer that publishes without a rest while rollouts are generated, until it is killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import torch
from attrs import frozen

from adapters.frontends.demo.trainer import new_model
from adapters.frontends.examination import SPEAKS
from adapters.transfers import Broadcast, Disk, ModuleSource
from lifecycle import GenerationRequest, Lifecycle, PauseMode, events
from lifecycle.ports import TransferPort

REQUEST = GenerationRequest(input_ids=[0, 1, 2, 3, 4], max_new_tokens=32, ignore_eos=True)
_ROLLOUTS = 8


@frozen(kw_only=True)
class Life:
    """What a trainer does, and how it ends."""

    run: str
    urls: tuple[str, ...]
    dialect: str
    transfer: str
    pause_mode: PauseMode
    model: Path
    """What the engines were started from."""
    out: Path
    """Where its files go."""
    dies: tuple[int, int] | None
    """In which pause, from 1, and how many lines of the journal after it began. `None`: it lives on."""

    @property
    def journal(self) -> Path:
        """Where its journal is."""
        return self.out / "journal.jsonl"

    def lifecycle(self) -> Lifecycle:
        """Return a lifecycle over the engines, which goes on with the journal where there is one."""
        broadcast: TransferPort = Broadcast(backend="gloo")
        by_disk = self.transfer == "disk"
        return Lifecycle(
            [SPEAKS[self.dialect](url) for url in self.urls],
            transfer=Disk(self.out / "weights", template=self.model) if by_disk else broadcast,
            name=self.run,
            initial_version=None,
            pause_mode=self.pause_mode,
            journal=self.journal,
        )


def live(life: Life) -> None:
    """Publish version after version of the same policy, until killed."""
    torch.set_num_threads(1)
    anyio.run(_live, life)


async def _live(life: Life) -> None:
    lifecycle = life.lifecycle()
    if life.dies is not None:
        lifecycle.subscribe(_death(*life.dies))
    source = ModuleSource(new_model(seed=0))
    async with lifecycle, anyio.create_task_group() as tasks:
        await lifecycle.publish(source, version=0)
        await lifecycle.resume()
        for _ in range(_ROLLOUTS):
            tasks.start_soon(_roll_out, lifecycle)
        for version in range(1, 10**6):
            await lifecycle.publish(source, version=version)


async def _roll_out(lifecycle: Lifecycle) -> None:
    while True:
        async with lifecycle.admit() as ticket:
            await lifecycle.generate(REQUEST, ticket=ticket)
            ticket.accept()


def _death(pause: int, line: int) -> Callable[[events.Event], None]:
    """Return what ends this process by SIGKILL so many lines after generation was held for the `pause`-th time."""
    held = left = 0

    def count(event: events.Event) -> None:
        nonlocal held, left
        if isinstance(event, events.GenerationHeld):
            held += 1
            left = line + 1 if held == pause else left
        if held >= pause:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return count
