"""Whether tokens are what the weights of their version generate, by the trainer's own model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from tests.contract.conftest import Weights

    from .stage import Rollout

__all__ = ["assert_accounted", "assert_exact"]

ROUNDING = 0.25
"""How far bfloat16 moves a log-probability of these models, at most; the tokens of other weights are 3 off."""


def assert_accounted(rollout: Rollout, tokens: int) -> None:
    """Assert that there are exactly `tokens` tokens, each with a log-probability and a version that never falls."""
    generation = rollout.generation
    assert (len(generation.output_ids), generation.finish_reason) == (tokens, "length")
    assert (len(generation.logprobs), len(rollout.versions)) == (tokens, tokens)
    assert rollout.versions == sorted(rollout.versions)
    assert all(segment.exact for segment in generation.segments)


def assert_exact(
    rollouts: Sequence[Rollout], weights: Callable[[int], Weights], *, first_version_only: bool = False
) -> None:
    """Assert that each token is the likeliest under the weights of its version, with the log-probability it came with.

    The rollouts must be of one length. `first_version_only`: look at no token after a change of weights.
    """
    tokens = torch.tensor([rollout.generation.output_ids for rollout in rollouts])
    logprobs = torch.tensor([rollout.generation.logprobs for rollout in rollouts])
    versions = torch.tensor([rollout.versions for rollout in rollouts])
    sequences = torch.cat((torch.tensor([rollout.prompt for rollout in rollouts]), tokens), 1)
    looked_at = versions == versions[:, :1] if first_version_only else torch.ones_like(versions, dtype=torch.bool)
    known: dict[Path, Tensor] = {}
    for version in sorted(set(versions[looked_at].tolist())):
        of_it = weights(version)
        if of_it.path not in known:
            known[of_it.path] = _logprobs(of_it, sequences)[:, -tokens.shape[1] - 1 : -1]
        expected = known[of_it.path]
        chosen = expected.gather(2, tokens[..., None])[..., 0]
        here = looked_at & (versions == version)
        assert (expected.amax(2) - chosen)[here].max() < ROUNDING, f"not the likeliest tokens of version {version}"
        assert (chosen - logprobs)[here].abs().max() < ROUNDING, f"not the log-probabilities of version {version}"


def _logprobs(weights: Weights, sequences: Tensor) -> Tensor:
    """Return log-probabilities of shape `(batch, length, vocabulary)`, computed in float32."""
    with torch.no_grad():
        logits: Tensor = copy.deepcopy(weights.model).float()(sequences)
        return logits.log_softmax(-1)
