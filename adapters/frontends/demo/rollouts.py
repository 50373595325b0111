"""Rollouts for the trainer: groups are started as the gate lets them, and handed over oldest first."""

import random

import anyio
from attrs import define, field

from lifecycle import GenerationRequest, Lifecycle

from . import task
from .trainer import Group, Sample

_NEW_TOKENS = task.LENGTH + 2
"""Two more than a right answer needs before it ends: a policy that forgets to stop is told so."""


@define(eq=False)
class _Open:
    """A group whose samples are still being generated."""

    prompt: tuple[int, ...]
    samples: list[Sample] = field(factory=list)


class Rollouts:
    """Keeps `in_progress` groups going, each of `group_size` samples that pass the gate one by one."""

    def __init__(self, lifecycle: Lifecycle, *, group_size: int, in_progress: int, seed: int) -> None:
        self._lifecycle = lifecycle
        self._group_size = group_size
        self._in_progress = in_progress
        self._random = random.Random(seed)
        self._finished: list[Group] = []
        self._changed = anyio.Event()
        self.dropped = 0
        """Groups that had become older than the bound before training wanted them."""

    async def run(self) -> None:
        """Start groups until cancelled.

        Cancellation: samples in progress are given up and their tickets returned.
        """
        limiter = anyio.CapacityLimiter(self._in_progress)
        async with anyio.create_task_group() as tasks:
            while True:
                # A token a group; released by the group's last sample.
                await limiter.acquire_on_behalf_of(group := _Open(task.draw_prompt(self._random)))
                for _ in range(self._group_size):
                    tasks.start_soon(self._sample, group, limiter)

    async def batch(self, groups: int, max_staleness: int) -> list[Group]:
        """Wait for `groups` groups, oldest first; those that are too old by now are dropped, which makes room.

        Cancellation: groups that were waiting stay.
        """
        while True:
            version = self._lifecycle.version or 0
            old = [group for group in self._finished if version - group.version > max_staleness]
            for group in old:
                self._lifecycle.discard(sample.ticket for sample in group.samples)
            self.dropped += len(old)
            self._finished = sorted((g for g in self._finished if g not in old), key=lambda group: group.version)
            if len(self._finished) >= groups:
                batch, self._finished = self._finished[:groups], self._finished[groups:]
                return batch
            self._changed = anyio.Event()
            await self._changed.wait()

    async def _sample(self, group: _Open, limiter: anyio.CapacityLimiter) -> None:
        request = GenerationRequest(
            input_ids=group.prompt, max_new_tokens=_NEW_TOKENS, temperature=1.0, stop_token_ids=[task.END]
        )
        async with self._lifecycle.admit() as ticket:
            generation = await self._lifecycle.generate(request, ticket=ticket)
            sample = Sample(
                prompt=group.prompt,
                output=generation.output_ids,
                logprobs=generation.logprobs,
                versions=generation.versions,
                reward=task.reward(group.prompt, generation.output_ids),
                ticket=ticket,
            )
            ticket.accept()
        group.samples.append(sample)
        if len(group.samples) == self._group_size:
            limiter.release_on_behalf_of(group)
            self._finished.append(Group(samples=tuple(group.samples)))
            self._changed.set()
