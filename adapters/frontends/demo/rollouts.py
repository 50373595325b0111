"""The demo's workflow: generate an answer and judge it. `RolloutExecutor` does everything else."""

import random
from collections.abc import Iterator

from lifecycle import Episode, GenerationRequest, Rollout

from . import task
from .trainer import Group, Sample

_NEW_TOKENS = task.LENGTH + 2
"""Two more than a right answer needs before it ends: a policy that forgets to stop is told so."""

Prompt = tuple[int, ...]


def prompts(seed: int) -> Iterator[Prompt]:
    """Draw prompts for ever."""
    numbers = random.Random(seed)
    while True:
        yield task.draw_prompt(numbers)


async def answer(episode: Episode, prompt: Prompt) -> Sample:
    """Generate one answer, and judge it.

    Cancellation: the answer is given up.
    """
    request = GenerationRequest(
        input_ids=prompt, max_new_tokens=_NEW_TOKENS, temperature=1.0, stop_token_ids=[task.END]
    )
    generation = await episode.generate(request)
    return Sample(
        prompt=prompt,
        output=generation.output_ids,
        logprobs=generation.logprobs,
        versions=generation.versions,
        reward=task.reward(prompt, generation.output_ids),
    )


def groups_of(rollouts: list[Rollout]) -> list[Group]:
    """Return what the trainer takes: the samples of each prompt, without those that were lost."""
    return [Group(samples=rollout.values) for rollout in rollouts]
