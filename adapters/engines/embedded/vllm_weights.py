"""vLLM's weight transfer as it runs in the scheduler: init, start, update, finish, and reload from disk.

The transfer backend is "gloo", which a real vLLM has when a plugin registers it: the worker joins a group of its own
and receives the bytes of each tensor, or packed buffers of several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch

from adapters.engines.embedded.checkpoint import CheckpointError
from adapters.engines.embedded.weights import WeightsError, dtype_named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from adapters.engines.embedded.scheduler import Scheduler
    from adapters.engines.embedded.weights import Weights

    _Announced = tuple[str, str, list[int]]

__all__ = ["WeightTransfer", "WorkerError"]

T = TypeVar("T")
_GROUP = "vllm"
_ENGINE = "GlooWeightTransferEngine"


class WorkerError(RuntimeError):
    """The worker raised; the front end answers 500 with this text inside."""


@attrs.frozen(kw_only=True)
class GlooInitInfo:
    """The trainer's group, as /init_weight_transfer_engine describes it.

    Args:
        master_address: Host of the trainer's store.
        master_port: Its TCP port.
        rank_offset: Rank of this server's first worker; the trainer is rank 0.
        world_size: Number of ranks, the trainer's included.
        group_name: The same on every rank.
        timeout_s: Deadline of joining and of each collective, in seconds; `None` for the engine's own.
        backend: Only gloo, on CPU.
        packed: Whether tensors travel in packed buffers.
        packed_buffer_size_bytes: A buffer is sent as soon as it holds more than this.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = _GROUP
    timeout_s: float | None = None
    backend: str = "gloo"
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30


@attrs.frozen(kw_only=True)
class GlooUpdateInfo:
    """The tensors that follow, as /update_weights announces them; the three lists have equal lengths."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __attrs_post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes must have the same length")


class WeightTransfer:
    """The worker's half of the weight routes; every method runs in the scheduler's thread.

    Args:
        scheduler: Whose version and permission to run follow the weights.
        weights: What is updated.
        backend: What the server was started with, or `None`.
        timeout: Deadline in seconds where the trainer names none.
    """

    def __init__(self, scheduler: Scheduler, weights: Weights, *, backend: str | None, timeout: float) -> None:
        self._scheduler, self._weights = scheduler, weights
        self._backend, self._timeout = backend, timeout
        self._group: GlooInitInfo | None = None
        self._active = False
        self._received: set[str] = set()
        self._path = weights.path

    def init(self, info: dict[str, Any]) -> None:
        """Join the trainer's group; blocks the scheduler until the trainer is there or the deadline passes."""
        self._need_backend()
        chosen = _parse(GlooInitInfo, info, "init_info")
        try:
            self._weights.join(
                _GROUP,
                master_address=chosen.master_address,
                master_port=chosen.master_port,
                rank=chosen.rank_offset,
                world_size=chosen.world_size,
                group_name=chosen.group_name,
                backend=chosen.backend,
                timeout=self._timeout if chosen.timeout_s is None else chosen.timeout_s,
            )
        except WeightsError as error:
            raise WorkerError(str(error)) from error
        self._group = chosen

    def start(self) -> None:
        """Open a session. From here until a finish or a reload, a forward pass finds no weights."""
        self._need_backend()
        if self._active:
            raise WorkerError(
                "start_weight_update called while a weight update is already active. Call finish_weight_update first."
            )
        self._active = True
        self._received = set()
        self._scheduler.weights_lost = True

    def update(self, info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive tensors and load each at once; a failure closes the session and leaves the model without weights."""
        self._need_backend()
        if not self._active:
            raise WorkerError("start_weight_update must be called before update_weights.")
        try:
            chosen = _parse(GlooUpdateInfo, info[0] if isinstance(info, list) else info, "update_info")
            self._weights.load(self._first_time(self._receive(chosen)), strict=True)
        except (RuntimeError, ValueError, TypeError) as error:
            self._active = False
            raise WorkerError(str(error)) from error

    def finish(self, version: str | None) -> None:
        """Close the session; tensors that did not come keep their old values, silently."""
        self._need_backend()
        if not self._active:
            raise WorkerError("finish_weight_update called without a matching start_weight_update.")
        self._active = False
        self._scheduler.weights_lost = False
        if version is not None:
            self._scheduler.set_version(version)

    def shutdown(self) -> None:
        """Leave the trainer's group, if there is one."""
        if self._active:
            raise WorkerError("Cannot release a trainer connection during a weight update")
        self._weights.leave(_GROUP)
        self._group = None

    def reload(self, path: str | None) -> None:
        """Load a checkpoint; the path is remembered even if it is bad. The weight version does not follow.

        The tensors are put aside before anything is read, so that a path without weights costs the old ones, too.
        """
        self._path = self._path if path is None else path
        self._scheduler.weights_lost = True
        try:
            self._weights.from_disk(self._path, strict=True)
        except (CheckpointError, WeightsError) as error:
            raise WorkerError(str(error)) from error
        self._active = False
        self._scheduler.weights_lost = False

    def _need_backend(self) -> None:
        if self._backend is None:
            raise WorkerError("Weight transfer not configured. Please set weight_transfer_config to enable it.")

    def _receive(self, info: GlooUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if info.names and (self._group is None or _GROUP not in self._weights.groups):
            raise WorkerError("Gloo weight transfer not initialized. Call init_weight_transfer_engine() first.")
        announced = list(zip(info.names, info.dtype_names, info.shapes, strict=True))
        limit = self._group.packed_buffer_size_bytes if self._group is not None and self._group.packed else None
        for bucket in _buckets(announced, limit):
            sizes = [torch.Size(shape).numel() * dtype_named(dtype).itemsize for _, dtype, shape in bucket]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            self._weights.receive_into(_GROUP, [buffer])
            for (name, dtype, shape), part in zip(bucket, torch.split(buffer, sizes), strict=True):
                # Views need alignment, which a packed buffer of mixed dtypes does not give.
                yield name, part.clone().view(dtype_named(dtype)).view(shape)

    def _first_time(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Refuse a tensor that comes twice: the CPU worker has given up the parameter after the first time."""
        for name, tensor in tensors:
            if name in self._received:
                raise WorkerError(f"Attempted to load weight ({tensor.shape}) into parameter (torch.Size([0]))")
            self._received.add(name)
            yield name, tensor


def _buckets(announced: list[_Announced], limit: int | None) -> Iterator[list[_Announced]]:
    """Cut the list as the sender does: a bucket ends when it holds more than `limit` bytes, or one tensor if `None`."""
    bucket, size = [], 0
    for item in announced:
        bucket.append(item)
        size += torch.Size(item[2]).numel() * dtype_named(item[1]).itemsize
        if limit is None or size > limit:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _parse(kind: type[T], info: dict[str, Any], what: str) -> T:
    try:
        return kind(**info)
    except (TypeError, ValueError) as error:
        raise WorkerError(f"Invalid {what} for {_ENGINE}: {error}") from error
