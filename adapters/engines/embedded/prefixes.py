"""The prefix cache: keys and values of whole prompts, kept for the next request with the same one.

It makes the silent trap of the real servers reproducible: after an update without a flush, a prompt that was seen
before is continued over keys and values of the old weights, and gives the tokens of neither model.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PrefixCache"]

_MAX_BYTES = 64 << 20


class PrefixCache:
    """Keep keys and values by prompt; the least recently used go first. Unlike the real ones, it shares no parts.

    Args:
        shortest: Fewest tokens that are worth keeping; `None` to keep nothing.
        max_bytes: Most bytes to hold.
    """

    def __init__(self, shortest: int | None, *, max_bytes: int = _MAX_BYTES) -> None:
        self._shortest, self._max_bytes = shortest, max_bytes
        self._entries: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._bytes = 0

    def wants(self, prompt: list[int]) -> bool:
        """Whether this prompt should be kept: its last token never is, since a request must compute something."""
        cached = len(prompt) - 1
        return self._shortest is not None and cached >= max(1, self._shortest) and tuple(prompt) not in self._entries

    def keep(self, prompt: list[int], keys_and_values: Tensor) -> None:
        """Keep what was computed for all tokens of `prompt` but the last.

        Args:
            prompt: Token ids.
            keys_and_values: Shape `(layers, 2, kv_heads, len(prompt) - 1, head_dim)`; must not change later.
        """
        self._entries[tuple(prompt)] = keys_and_values
        self._bytes += keys_and_values.nbytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._entries.popitem(last=False)[1].nbytes

    def find(self, prompt: list[int]) -> Tensor | None:
        """Return what was kept for `prompt`, or `None`."""
        key = tuple(prompt)
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._bytes = 0
