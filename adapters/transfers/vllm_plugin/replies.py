"""Keeps the replies of several workers in step, which a failed update would otherwise put out of step for good.

vLLM 0.32 stops at the first worker that failed and leaves the replies of those after it in their queues, where nothing
tells them apart: each later call takes the reply to the one before for its own, so that good calls fail with old
errors and bad ones succeed (https://github.com/vllm-project/vllm/issues/49972). Here they are taken out.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_step"]


class _Noted:
    """A worker's queue that remembers whether its reply was taken."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.taken = False

    def dequeue(self, *arguments: Any, **options: Any) -> Any:
        """Wait for the reply."""
        reply = self._queue.dequeue(*arguments, **options)
        self.taken = True
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def in_step(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    """Return `MultiprocExecutor.collective_rpc` so that it takes every worker's reply before it raises one's error."""

    @functools.wraps(collective_rpc)
    def taking_all(self: Any, *arguments: Any, **options: Any) -> Any:
        # Where one worker replies for all, or later, no other reply may be waited for.
        if len(arguments) > 4 or options.get("non_block") or options.get("unique_reply_rank") is not None:
            return collective_rpc(self, *arguments, **options)
        queues = self.response_mqs
        self.response_mqs = noted = [_Noted(queue) for queue in queues]
        try:
            return collective_rpc(self, *arguments, **options)
        except RuntimeError:
            if any(queue.taken for queue in noted):
                for queue in noted:
                    with suppress(Exception):  # the first error is the one to tell
                        queue.taken or queue.dequeue()
            raise
        finally:
            self.response_mqs = queues

    taking_all.keeps_in_step = True  # type: ignore[attr-defined]
    return taking_all
