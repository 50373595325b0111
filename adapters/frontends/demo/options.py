"""What can be chosen about a run of the demo."""

from pathlib import Path

from attrs import frozen

from lifecycle import PauseMode

_GROUPS, _FOREIGN_GROUPS = 32, 16
_FOREIGN_CONCURRENT = 64
"""Rollouts in flight at each server that is not ours. More would wait in its queue, to be aborted by each pause."""


@frozen(kw_only=True)
class Options:
    """What can be chosen."""

    engines: int = 2
    """Embedded engines to start, where there are no `urls`."""
    urls: tuple[str, ...] = ()
    """Running servers to train against instead."""
    steps: int = 60
    dialect: str = "sglang"
    transfer: str = "broadcast"
    groups: int | None = None
    """Prompts a step; `None` for as many as such engines answer in a few seconds on CPU."""
    group_size: int = 16
    """Samples a prompt."""
    max_staleness: int = 2
    pause_mode: PauseMode = PauseMode.ABORT
    seed: int = 0
    out: Path = Path("run")

    @property
    def groups_a_step(self) -> int:
        """Prompts a step."""
        if self.groups is not None:
            return self.groups
        return _FOREIGN_GROUPS if self.urls else _GROUPS

    @property
    def max_concurrent(self) -> int:
        """Rollouts in flight."""
        return _FOREIGN_CONCURRENT * len(self.urls) if self.urls else 2 * self.groups_a_step * self.group_size
