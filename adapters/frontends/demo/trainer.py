"""The trainer: GRPO on whole groups, off-policy by as much as the lifecycle allows."""

from collections.abc import Sequence

import torch
from attrs import frozen

from adapters.engines.embedded import CausalLM, LlamaConfig

from . import task

_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28
_LEARNING_RATE = 4e-3
_WARM_UP = 5
_MAX_GRADIENT_NORM = 1.0


@frozen(kw_only=True)
class Sample:
    """One rollout: a prompt, what was generated, and what it is worth."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-probabilities, one a token of `output`."""
    versions: tuple[int | None, ...]
    reward: float


@frozen(kw_only=True)
class Group:
    """All samples of one prompt: GRPO compares them with each other."""

    samples: tuple[Sample, ...]


def new_model(seed: int) -> CausalLM:
    """Return the policy: 2 layers, width 64, which starts from (almost) uniform guesses.

    Heads are 32 wide, since vLLM's attention on CPU takes multiples of 32 only.
    """
    config = LlamaConfig(
        vocab_size=task.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        eos_token_id=task.END,
    )
    return CausalLM(config, seed=seed)


class Trainer:
    """Owns the policy and its optimiser."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self._optimiser = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
        self._warm_up = torch.optim.lr_scheduler.LambdaLR(self._optimiser, lambda step: min(1.0, (step + 1) / _WARM_UP))

    def step(self, groups: Sequence[Group]) -> float:
        """Train on `groups` once. Returns their mean reward."""
        samples = [sample for group in groups for sample in group.samples]
        tokens, targets, mask, behaviour = _padded(samples)
        advantages = torch.cat([_advantages(group) for group in groups])
        logprobs = torch.log_softmax(self.model(tokens).float(), dim=-1)
        chosen = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        ratio = (chosen - behaviour).exp()
        clipped = ratio.clamp(1 - _CLIP_LOW, 1 + _CLIP_HIGH)
        gain = torch.minimum(ratio * advantages.unsqueeze(-1), clipped * advantages.unsqueeze(-1))
        loss = -(gain * mask).sum() / mask.sum()
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT_NORM)
        self._optimiser.step()
        self._warm_up.step()
        return sum(sample.reward for sample in samples) / len(samples)


def _advantages(group: Group) -> torch.Tensor:
    """Return reward minus the group's mean, over its deviation (GRPO, arXiv:2402.03300), shape `(samples,)`."""
    rewards = torch.tensor([sample.reward for sample in group.samples])
    return (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)


def _padded(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, targets, mask and behaviour log-probabilities, each of shape `(samples, longest - 1)`."""
    longest = max(len(s.prompt) + len(s.output) for s in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros(len(samples), longest)
    behaviour = torch.zeros(len(samples), longest)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt), len(sample.prompt) + len(sample.output)
        tokens[row, :end] = torch.tensor([*sample.prompt, *sample.output])
        mask[row, start:end] = 1.0
        behaviour[row, start:end] = torch.tensor(sample.logprobs)
    return tokens[:, :-1], tokens[:, 1:], mask[:, 1:], behaviour[:, 1:]
