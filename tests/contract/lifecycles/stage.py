"""A lifecycle of one engine, and generations that are under way in it while something else happens."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import attrs
from anyio import to_thread

from adapters.engines import SGLangEngine, VLLMEngine
from adapters.transfers import Broadcast, ModuleSource
from lifecycle import Deadlines, Generation, GenerationRequest, Lifecycle, events
from lifecycle.trace import verify_file
from tests.contract.wire import PROMPT, TRANSFER_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from anyio.abc import TaskGroup

    from lifecycle.trace import Verdict
    from tests.contract.conftest import Weights
    from tests.contract.wire import Wire

__all__ = ["BUCKET_BYTES", "NAME", "RUN", "Rollout", "Rollouts", "Stage"]

NAME = "engine"
RUN = "contract"
BUCKET_BYTES = 150_000
"""Several buckets a publication."""

_ENGINES = {"sglang": SGLangEngine, "vllm": VLLMEngine}
_GRACE = 5.0
_FIRST = 20
"""First token of the first rollout's prompt; each has another, so that none is served from another's cache."""


class Stage:
    """What a test of a lifecycle needs.

    Args:
        wire: Client of the engine.
        versions: Weights of versions 0, 1, ...; they begin again after the last.
        journal: File for the lifecycle's events.
    """

    def __init__(self, wire: Wire, versions: tuple[Weights, ...], journal: Path) -> None:
        self.wire, self.server, self.journal = wire, wire.server, journal
        self._versions = versions

    def weights(self, version: int) -> Weights:
        """Return what the engine holds once `version` is published."""
        return self._versions[version % len(self._versions)]

    def source(self, version: int) -> ModuleSource:
        """Return the same as a trainer publishes it."""
        return ModuleSource(self.weights(version).model)

    def broadcast(self, *, packed: bool = False) -> Broadcast:
        """Return the transfer that the tests use where they ask for no other."""
        return Broadcast(backend="gloo", bucket_bytes=BUCKET_BYTES, packed=packed, timeout=self.seconds)

    def lifecycle(self, *, url: str | None = None, **options: Any) -> Lifecycle:
        """Return a lifecycle of the engine, reached at `url`, with a journal, that expects version 0 there."""
        engine = _ENGINES[self.server.kind.dialect](url or self.server.url, name=NAME)
        patience = self.server.kind.patience
        deadlines = Deadlines(**dict.fromkeys((field.name for field in attrs.fields(Deadlines)), patience))
        deadlines.grace = min(_GRACE, patience)
        chosen = {"name": RUN, "transfer": self.broadcast(), "journal": self.journal, "deadlines": deadlines}
        return Lifecycle([engine], **{**chosen, **options})

    @property
    def other_journal(self) -> Path:
        """A file in which nothing is told of what was before."""
        return self.journal.with_name("other.jsonl")

    def verdict(self, journal: Path | None = None) -> Verdict:
        """Return what the verifier says of the journal."""
        return verify_file(journal or self.journal)

    @asynccontextmanager
    async def rollouts(self, lifecycle: Lifecycle, tokens: int) -> AsyncIterator[Rollouts]:
        """Generate within the block; it ends when every rollout has.

        Cancellation: the rollouts are cancelled.
        """
        self.wire.brake()
        async with anyio.create_task_group() as group:
            yield Rollouts(lifecycle, self.wire, tokens, group)

    @property
    def seconds(self) -> float:
        """After how long the engine's half of a transfer gives up."""
        return min(TRANSFER_SECONDS, self.server.kind.patience)


@attrs.frozen
class Rollout:
    """A prompt and what came back."""

    prompt: list[int]
    generation: Generation

    @property
    def versions(self) -> list[int]:
        """The version of each token, all of which must be this run's."""
        known = [version for version in self.generation.versions if version is not None]
        assert len(known) == len(self.generation.versions), self.generation.versions
        return known


class Rollouts:
    """Greedy generations of `tokens` tokens through a lifecycle.

    Args:
        lifecycle: Running.
        wire: Client of the same engine.
        tokens: Number of tokens of each, int ≥ 1.
        group: Where they run.
    """

    def __init__(self, lifecycle: Lifecycle, wire: Wire, tokens: int, group: TaskGroup) -> None:
        self.landed: list[Rollout] = []
        self._lifecycle, self._wire, self._tokens, self._group = lifecycle, wire, tokens, group
        self._launched = 0

    async def launch(self) -> None:
        """Begin one more, and return when the engine makes tokens for it. Raises `TimeoutError` where it is not sent.

        Cancellation: it goes on.
        """
        prompt = [_FIRST + self._launched, *PROMPT[1:]]
        self._launched += 1
        sent = anyio.Event()
        unsubscribe = self._lifecycle.subscribe(
            lambda event: sent.set() if isinstance(event, events.GenerationSent) else None
        )
        self._group.start_soon(self._roll, prompt)
        with anyio.fail_after(self._wire.patience):
            await sent.wait()
        unsubscribe()
        # First come, first served: what is answered after it proves that it is being served.
        await to_thread.run_sync(self._wire.exchange)
        await to_thread.run_sync(self._wire.generate, 1)

    async def _roll(self, prompt: list[int]) -> None:
        request = GenerationRequest(input_ids=prompt, max_new_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        async with self._lifecycle.admit() as ticket:
            generation = await self._lifecycle.generate(request, ticket=ticket)
            ticket.accept()
        self.landed.append(Rollout(prompt, generation))
