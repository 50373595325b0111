"""Choose one token for every row of a batch in a handful of tensor operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["sample"]


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    scaled_logprobs: bool,
    generator: torch.Generator,
    own_generators: Iterable[tuple[int, torch.Generator]] = (),
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, and say how probable it was.

    SGLang reports log-probabilities after the temperature and before top-k and top-p (its sampler takes the logarithm
    of softmax(logits / temperature), unless SGLANG_RETURN_ORIGINAL_LOGPROB is set); vLLM reports those of the raw
    logits (`--logprobs-mode raw_logprobs`, its default). A greedy row is scaled by nothing in both.

    Args:
        logits: Shape `(batch, vocab_size)`.
        temperature: Shape `(batch,)`, float32, 0 for greedy rows; `None` when all are.
        top_k: Shape `(batch,)`, int64, from 1 to `vocab_size`; `None` when no row is cut.
        top_p: Shape `(batch,)`, float32; given together with `top_k`.
        scaled_logprobs: Whether log-probabilities are those after the temperature.
        generator: Where rows without a generator of their own draw from.
        own_generators: Pairs of row and its generator.

    Returns:
        Token ids, shape `(batch,)`, int64, and their natural log-probabilities, shape `(batch,)`, float32.
    """
    logits = logits.float()
    tokens = logits.argmax(dim=-1)
    if temperature is None:
        return tokens, _logprobs(logits, tokens)
    greedy = temperature <= 0
    scaled = logits / temperature.masked_fill(greedy, 1.0).unsqueeze(1)
    candidates = scaled if top_k is None or top_p is None else _truncate(scaled, top_k, top_p)
    noise = torch.empty_like(logits).exponential_(generator=generator)
    for row, own in own_generators:
        noise[row].exponential_(generator=own)
    # The Gumbel-max trick: adding -log(exponential noise) and taking the largest samples from the softmax.
    tokens = torch.where(greedy, tokens, (candidates - noise.log()).argmax(dim=-1))
    return tokens, _logprobs(scaled if scaled_logprobs else logits, tokens)


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - logits.logsumexp(dim=-1)


def _truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return `logits` with -inf where a token is outside its row's top k or top p; the best one always stays."""
    ordered, order = logits.sort(dim=-1, descending=True)
    outside = torch.arange(logits.shape[1]) >= top_k.unsqueeze(1)
    probabilities = ordered.masked_fill(outside, float("-inf")).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    outside |= before >= top_p.unsqueeze(1)
    outside[:, 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), float("-inf"))
