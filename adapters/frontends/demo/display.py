"""What a person sees while the demo runs."""

from types import TracebackType
from typing import Self

from attrs import frozen
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lifecycle import Lifecycle

_BAR = "▁▂▃▄▅▆▇█"
_LINE_EVERY = 10
"""Steps between two lines where there is no terminal to draw on."""


@frozen(kw_only=True)
class Progress:
    """One training step."""

    step: int
    steps: int
    reward: float
    pause_seconds: float
    staleness: int
    dropped: int


class Display:
    """A live table on a terminal, and a line every few steps elsewhere."""

    def __init__(self, lifecycle: Lifecycle, console: Console) -> None:
        self._lifecycle = lifecycle
        self._console = console
        self._rewards: list[float] = []
        self._last: Progress | None = None
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._table, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Take in a step."""
        self._last = progress
        self._rewards.append(progress.reward)
        if not self._console.is_terminal and (progress.step % _LINE_EVERY == 0 or progress.step in {1, progress.steps}):
            self._console.print(
                f"step {progress.step:3d}/{progress.steps}  reward {progress.reward:.3f}  "
                f"{self._lifecycle.state.name}  pause {progress.pause_seconds * 1000:.0f} ms  "
                f"capacity {self._lifecycle.budget.capacity()}  staleness {progress.staleness}",
                highlight=False,
                soft_wrap=True,
            )

    def _table(self) -> Table:
        table = Table(title="asynchronous RL over a rollout lifecycle", show_header=False, min_width=64)
        table.add_column(style="bold")
        table.add_column()
        lifecycle, last = self._lifecycle, self._last
        table.add_row("state", f"{lifecycle.state.name}" + (f" · {t.name}" if (t := lifecycle.in_flight) else ""))
        table.add_row("version", str(lifecycle.version))
        table.add_row("engines", "  ".join(f"{view.name} {view.standing.name}" for view in lifecycle.engines))
        table.add_row("rollouts", f"{lifecycle.running} running, capacity {lifecycle.budget.capacity()}")
        if last is not None:
            table.add_row("step", f"{last.step} of {last.steps}")
            table.add_row("reward", f"{last.reward:.3f}  {_curve(self._rewards)}")
            table.add_row("pause", f"{last.pause_seconds * 1000:.0f} ms")
            table.add_row("staleness", f"{last.staleness} versions, {last.dropped} groups dropped as too old")
        return table


def _curve(rewards: list[float]) -> str:
    """Return the rewards, which are between 0 and 1, as a row of bars."""
    return "".join(_BAR[min(len(_BAR) - 1, int(reward * len(_BAR)))] for reward in rewards[-40:])
