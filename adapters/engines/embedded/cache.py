"""The key/value cache: one slot per running sequence, slots kept dense so that a batch is a slice and not a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the field's own name for it

from adapters.engines.embedded.model import attend

if TYPE_CHECKING:
    from torch import Tensor

    from adapters.engines.embedded.model import LayerCache, LlamaConfig

__all__ = ["KVCache"]

_FIRST_SLOTS = 16
_FIRST_LENGTH = 64


class KVCache:
    """Keys and values of up to `slots` sequences; both dimensions grow by doubling when they are needed.

    Args:
        config: The model's shape.
        dtype: What the model computes in.
    """

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        self._heads, self._head_dim = config.num_key_value_heads, config.head_dim
        self._layers, self._dtype = config.num_hidden_layers, dtype
        self.store = self._allocate(_FIRST_SLOTS, _FIRST_LENGTH)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens, and keep what is there."""
        old_slots, old_length = self.store.shape[2], self.store.shape[4]
        if slots <= old_slots and length <= old_length:
            return
        while old_slots < slots:
            old_slots *= 2
        while old_length < length:
            old_length *= 2
        old, self.store = self.store, self._allocate(old_slots, old_length)
        self.store[:, :, : old.shape[2], :, : old.shape[4]] = old

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `sources` into the slots `targets`."""
        if sources:
            self.store[:, :, targets, :, :length] = self.store[:, :, sources, :, :length]

    def prefill(self, first_slot: int) -> list[LayerCache]:
        """Return one cache per layer that fills the slots from `first_slot` on, from position 0."""
        return [_Prefill(self.store[layer], first_slot) for layer in range(self._layers)]

    def decode(self, positions: Tensor) -> list[LayerCache]:
        """Return one cache per layer that appends one token at `positions`, shape `(batch,)`, to the first slots."""
        shortest, longest = (int(value) for value in positions.aminmax())
        length = longest + 1
        mask = None
        if shortest < longest:
            mask = (torch.arange(length) <= positions.unsqueeze(1)).view(-1, 1, 1, length)
        rows = torch.arange(len(positions))
        return [_Decode(self.store[layer], rows, positions, length, mask) for layer in range(self._layers)]

    def _allocate(self, slots: int, length: int) -> Tensor:
        # Zeros and not empty: masked positions are multiplied by 0, and 0 times a stray NaN is NaN.
        return torch.zeros(self._layers, 2, slots, self._heads, length, self._head_dim, dtype=self._dtype)


class _Prefill:
    """Right-padded prompts: padding is written too, and overwritten or masked later."""

    def __init__(self, store: Tensor, first_slot: int) -> None:
        self._store, self._first = store, first_slot

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, _, length, _ = key.shape
        slots = slice(self._first, self._first + batch)
        self._store[0, slots, :, :length] = key
        self._store[1, slots, :, :length] = value
        return attend(query, key, value, mask=None)


class _Decode:
    """One new token per sequence."""

    def __init__(self, store: Tensor, rows: Tensor, positions: Tensor, length: int, mask: Tensor | None) -> None:
        self._store, self._rows, self._positions, self._length, self._mask = store, rows, positions, length, mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._store[0], self._store[1]
        keys[self._rows, :, self._positions] = key.squeeze(2)
        values[self._rows, :, self._positions] = value.squeeze(2)
        batch, heads, _, head_dim = query.shape
        # The query heads of one key/value head stand where a longer query would: no key is repeated.
        grouped = query.reshape(batch, keys.shape[1], -1, head_dim)
        mixed = F.scaled_dot_product_attention(
            grouped, keys[:batch, :, : self._length], values[:batch, :, : self._length], attn_mask=self._mask
        )
        return mixed.reshape(batch, heads, 1, head_dim)
