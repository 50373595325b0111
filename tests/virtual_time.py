"""Both backends on a virtual clock: it jumps to the next deadline whenever nothing else can run.

A test that waits for a deadline takes no time, and no load of the machine can make a deadline pass too early.
"""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

import trio.testing

_A_DAY = 24 * 3600.0


class _Jumping(selectors.SelectSelector):
    """Passes virtual time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is None or timeout > 0 else timeout)
        # anyio sleeps for ever by a timer at infinity, for which asyncio waits a day: a thread is awaited then.
        if not ready and (timeout is None or timeout >= _A_DAY):
            return super().select(None)
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return super().get_map()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is that of its selector."""

    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def on_virtual_clock(backend: str) -> dict[str, Any]:
    """Return the options that put `backend` on a virtual clock."""
    if backend == "asyncio":
        return {"loop_factory": VirtualTimeLoop}
    return {"clock": trio.testing.MockClock(autojump_threshold=0)}
