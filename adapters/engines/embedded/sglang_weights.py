"""SGLang's ways to take new weights, as they run in the scheduler: each returns whether it worked, and what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from adapters.engines.embedded.checkpoint import CheckpointError
from adapters.engines.embedded.scheduler import Fatal
from adapters.engines.embedded.weights import WeightsError, is_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from adapters.engines.embedded.scheduler import Scheduler
    from adapters.engines.embedded.weights import Weights

__all__ = ["Outcome", "WeightUpdater"]

_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_LOAD_FORMATS = (None, "auto", "safetensors", "pt", "dummy")


@attrs.frozen
class Outcome:
    """What an update came to.

    Args:
        success: What the answer's `success` says; false does not rule out that the weights are the new ones.
        message: What the answer's `message` says.
    """

    success: bool
    message: str


@attrs.frozen(kw_only=True)
class Announcement:
    """The tensors that the trainer is about to broadcast, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group: str
    bucket: bool


class WeightUpdater:
    """The scheduler's half of the update calls; every method runs in the scheduler's thread.

    Args:
        scheduler: Whose version and cache follow the weights.
        weights: What is updated.
    """

    def __init__(self, scheduler: Scheduler, weights: Weights) -> None:
        self._scheduler, self._weights = scheduler, weights
        self._session_open = False
        self._released: set[str] = set()

    def from_disk(self, path: str, *, load_format: str | None, version: str | None, flush: bool) -> Outcome:
        """Load a checkpoint; tensors that it lacks keep their old values, silently."""
        if not is_checkpoint(path):
            return Outcome(False, f"Failed to get weights iterator: {path} holds no weights")
        if load_format not in _LOAD_FORMATS:
            raise Fatal(f"load format {load_format!r}")
        try:
            self._weights.from_disk(path, strict=False)
        except (CheckpointError, WeightsError) as error:
            # The real server's rollback loads from the new path again, which raises again, uncaught.
            raise Fatal(str(error)) from error
        return self._loaded("Succeeded to update model weights.", version=version, flush=flush)

    def join(
        self, name: str, *, address: str, port: int, rank: int, world_size: int, backend: str, timeout: float
    ) -> Outcome:
        """Join a trainer's group; blocks the scheduler until the trainer is there or `timeout` seconds are over."""
        if backend != "gloo":
            return Outcome(
                False, f"Failed to initialize custom process group: backend {backend!r} needs an accelerator."
            )
        try:
            self._weights.join(
                name,
                master_address=address,
                master_port=port,
                rank=rank,
                world_size=world_size,
                backend=backend,
                timeout=timeout,
            )
        except WeightsError as error:
            return Outcome(False, f"Failed to initialize custom process group: {error}.")
        return Outcome(True, "Succeeded to initialize custom process group.")

    def leave(self, name: str) -> Outcome:
        """Leave a group."""
        if not self._weights.leave(name):
            return Outcome(False, "The group to be destroyed does not exist.")
        return Outcome(True, "Succeeded to destroy custom process group.")

    def begin(self) -> Outcome:
        """Open the session that updates over a group need."""
        if self._session_open:
            return Outcome(False, "a weight-update session is already open; call end_weight_update() first")
        self._session_open = True
        return Outcome(True, "Succeeded to begin weight update.")

    def end(self) -> Outcome:
        """Close the session; says nothing about the weights."""
        if not self._session_open:
            return Outcome(False, "no weight-update session is open; call begin_weight_update() first")
        self._session_open = False
        return Outcome(True, "Succeeded to end weight update.")

    def from_group(self, announced: Announcement, *, version: str | None, flush: bool) -> Outcome:
        """Receive the announced tensors, then load them; refusals come before anything is received."""
        if not self._session_open:
            return Outcome(
                False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if announced.group not in self._weights.groups:
            known = list(self._weights.groups)
            return Outcome(False, f"Failed to receive weights: Group {announced.group} not in {known}.")
        try:
            tensors = self._receive(announced)
        except WeightsError as error:
            return Outcome(False, f"Failed to receive weights: {error}")
        try:
            self._weights.load(tensors, strict=False)
        except WeightsError as error:
            return Outcome(
                False,
                f"Failed to update parameter online: {error} The full weights of the ModelRunner are partially "
                "updated. Please discard the whole weights.",
            )
        return self._loaded("Succeeded to update parameter online.", version=version, flush=flush)

    def flush(self) -> bool:
        """Drop the cache if nothing needs it, and say whether it was dropped."""
        idle = self._scheduler.idle()
        if idle:
            self._scheduler.clear_prefixes()
        return idle

    def reset(self) -> None:
        """Make the weights useless, so that an update that misses some is seen."""
        for _, tensor in self._weights.model.tensors():
            tensor.zero_()

    def release(self) -> None:
        """Give memory back, which here means to check that nothing runs."""
        if not self.flush():
            raise Fatal("release_memory_occupation should be called only when no request is running")
        self._released = {"kv_cache", "weights", "cuda_graph"}

    def reoccupy(self) -> None:
        """Take memory again."""
        if not self._released:
            raise Fatal("resume_memory_occupation without a release")
        self._released = set()

    def _receive(self, announced: Announcement) -> list[tuple[str, Tensor]]:
        receive = self._weights.receive_bucket if announced.bucket else self._weights.receive
        return receive(announced.group, announced.names, announced.dtypes, announced.shapes)

    def _loaded(self, message: str, *, version: str | None, flush: bool) -> Outcome:
        # The scheduler's version follows the weights at once, before it is known whether the flush works.
        if version is not None:
            self._scheduler.set_version(version)
        if flush and not self.flush():
            return Outcome(False, _NOT_FLUSHED)
        if version is not None:
            message += f" Weight version updated to {version}."
        return Outcome(True, message)


def rows_of(tensor: Tensor, count: int) -> object:
    """Return the first `count` rows of a weight as nested lists of floats."""
    return tensor[:count].to(torch.float32).tolist()
