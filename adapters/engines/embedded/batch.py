"""The running batch: which sequence holds which slot, and the two forward passes, prefill and decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from adapters.engines.embedded.cache import KVCache
from adapters.engines.embedded.prefixes import PrefixCache
from adapters.engines.embedded.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from adapters.engines.embedded.model import CausalLM
    from adapters.engines.embedded.sequence import Sequence

__all__ = ["RunningBatch"]

_TOKEN, _LENGTH, _TOP_K = range(3)
_TEMPERATURE, _TOP_P = range(2)


class RunningBatch:
    """Sequences that decode together; slot `i` belongs to `sequences[i]`.

    Args:
        model: The model to run; others may change its weights between calls.
        max_prefill_tokens: How many tokens, padding included, one prefill may hold.
        scaled_logprobs: See `sampling.sample`.
        seed: Seed for sequences without a generator of their own.
        shortest_prefix: See `PrefixCache`.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_prefill_tokens: int,
        scaled_logprobs: bool,
        seed: int,
        shortest_prefix: int | None = None,
    ) -> None:
        self._model = model
        self._max_prefill_tokens = max_prefill_tokens
        self._scaled_logprobs = scaled_logprobs
        self._generator = torch.Generator().manual_seed(seed)
        self._cache = KVCache(model.config, next(model.parameters()).dtype)
        self._integers = torch.zeros(0, 3, dtype=torch.int64)
        self._floats = torch.zeros(0, 2)
        self.prefixes = PrefixCache(shortest_prefix)
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def prefill(self, sequences: Iterable[Sequence]) -> None:
        """Take sequences in: compute keys and values of all their tokens, and make one new token each.

        A sequence whose prompt is cached makes its first token with the next `decode` instead.
        """
        ordered = []
        for sequence in sequences:
            found = self.prefixes.find(sequence.prompt) if not sequence.output else None
            if found is None:
                ordered.append(sequence)
            else:
                self._revive(sequence, found)
        ordered.sort(key=_tokens)
        while ordered:
            count = 1
            while count < len(ordered) and (count + 1) * _tokens(ordered[count]) <= self._max_prefill_tokens:
                count += 1
            self._prefill(ordered[:count])
            ordered = ordered[count:]

    def decode(self) -> None:
        """Make one new token for every sequence."""
        batch = len(self.sequences)
        positions = self._integers[:batch, _LENGTH]
        self._cache.reserve(batch, int(positions.max()) + 1)
        hidden = self._model.model(
            self._integers[:batch, _TOKEN].unsqueeze(1), positions.unsqueeze(1), caches=self._cache.decode(positions)
        )
        self._integers[:batch, _LENGTH] += 1
        self._choose(hidden[:, 0], self.sequences, first_slot=0)

    def remove(self, gone: set[Sequence]) -> None:
        """Free the slots of `gone`, and close the gaps with the last slots."""
        if not gone:
            return
        left = len(self.sequences) - len(gone)
        holes = [slot for slot in range(left) if self.sequences[slot] in gone]
        movers = [slot for slot in range(left, len(self.sequences)) if self.sequences[slot] not in gone]
        if movers:
            self._cache.move(movers, holes, int(self._integers[movers, _LENGTH].max()))
            self._integers[holes] = self._integers[movers]
            self._floats[holes] = self._floats[movers]
        for hole, mover in zip(holes, movers, strict=True):
            self.sequences[hole] = self.sequences[mover]
        del self.sequences[left:]

    def _prefill(self, sequences: list[Sequence]) -> None:
        first = len(self.sequences)
        rows = [sequence.prompt + sequence.output for sequence in sequences]
        longest = len(rows[-1])
        self._cache.reserve(first + len(rows), longest)
        self._describe(sequences, rows, first)
        input_ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        hidden = self._model.model(input_ids, caches=self._cache.prefill(first))
        for slot, sequence in enumerate(sequences, start=first):
            if self.prefixes.wants(sequence.prompt):
                cached = len(sequence.prompt) - 1
                self.prefixes.keep(sequence.prompt, self._cache.store[:, :, slot, :, :cached].clone())
        last = self._integers[first : first + len(rows), _LENGTH] - 1
        self.sequences.extend(sequences)
        self._choose(hidden[torch.arange(len(rows)), last], sequences, first_slot=first)

    def _revive(self, sequence: Sequence, keys_and_values: Tensor) -> None:
        """Take in a sequence whose prompt but for the last token is cached."""
        slot, prompt = len(self.sequences), sequence.prompt
        self._cache.reserve(slot + 1, len(prompt))
        self._cache.store[:, :, slot, :, : len(prompt) - 1] = keys_and_values
        self._describe([sequence], [prompt[:-1]], slot)
        self._integers[slot, _TOKEN] = prompt[-1]
        sequence.cached_tokens = len(prompt) - 1
        self.sequences.append(sequence)

    def _describe(self, sequences: list[Sequence], rows: list[list[int]], first: int) -> None:
        """Write what the slots from `first` on need to know of their sequences."""
        slots = first + len(rows)
        if slots > len(self._integers):
            more = max(slots, 2 * len(self._integers)) - len(self._integers)
            self._integers = torch.cat((self._integers, torch.zeros(more, 3, dtype=torch.int64)))
            self._floats = torch.cat((self._floats, torch.zeros(more, 2)))
        vocab_size = self._model.config.vocab_size
        params = [sequence.params for sequence in sequences]
        self._integers[first:slots] = torch.tensor(
            [
                (0, len(row), min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size)
                for row, p in zip(rows, params, strict=True)
            ]
        )
        self._floats[first:slots] = torch.tensor([(p.temperature, p.top_p) for p in params])

    def _choose(self, hidden: Tensor, sequences: list[Sequence], first_slot: int) -> None:
        """Sample from the final hidden states, shape `(batch, hidden_size)`, and hand each sequence its token."""
        slots = slice(first_slot, first_slot + len(sequences))
        integers, floats = self._integers[slots], self._floats[slots]
        random = bool((floats[:, _TEMPERATURE] > 0).any())
        cut = random and bool(((floats[:, _TOP_P] < 1) | (integers[:, _TOP_K] < self._model.config.vocab_size)).any())
        tokens, logprobs = sample(
            self._model.lm_head(hidden),
            temperature=floats[:, _TEMPERATURE] if random else None,
            top_k=integers[:, _TOP_K] if cut else None,
            top_p=floats[:, _TOP_P] if cut else None,
            scaled_logprobs=self._scaled_logprobs,
            generator=self._generator,
            own_generators=[
                (row, sequence.generator) for row, sequence in enumerate(sequences) if sequence.generator is not None
            ],
        )
        integers[:, _TOKEN] = tokens
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.append(token, logprob)


def _tokens(sequence: Sequence) -> int:
    return len(sequence.prompt) + len(sequence.output)
