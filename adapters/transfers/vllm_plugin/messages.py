"""What a trainer tells the workers, checked, and which tensors travel together. Pure: nothing is opened here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Announced", "InitInfo", "UpdateInfo", "plan"]

_BACKENDS = ("gloo", "nccl")
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class Announced(NamedTuple):
    """A tensor that will come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name!r} ({str(self.dtype).removeprefix('torch.')} {list(self.shape)})"


@dataclass(frozen=True, kw_only=True)
class InitInfo:
    """The trainer's group, as `/init_weight_transfer_engine` describes it.

    Args:
        master_address: Host of the store at which the ranks meet.
        master_port: Its TCP port.
        rank_offset: Rank of this server's first worker; the trainer is rank 0.
        world_size: Ranks in the group, the trainer's included.
        group_name: The same on every rank; part of the keys under which they meet.
        timeout_s: Seconds for joining, and again for each tensor or packed buffer.
        backend: `"gloo"` or `"nccl"`.
        packed: Whether tensors travel together, as bytes.
        packed_buffer_size_bytes: A packed buffer ends as soon as it holds more than this.

    Raises:
        ValueError: If a number or the backend makes no sense.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "vllm"
    timeout_s: float = 60.0
    backend: str = "gloo"
    packed: bool = False
    packed_buffer_size_bytes: int = 2**30

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend is one of {_BACKENDS}, not {self.backend!r}")
        if not 0 < self.master_port < 65536:
            raise ValueError(f"master_port is between 1 and 65535, not {self.master_port!r}")
        if not 0 < self.rank_offset < self.world_size:
            raise ValueError(
                f"rank_offset is between 1 and world_size - 1, not {self.rank_offset} of {self.world_size}"
            )
        if not self.timeout_s > 0 or self.packed_buffer_size_bytes < 1:
            raise ValueError("timeout_s is above 0, and packed_buffer_size_bytes at least 1")

    def rank(self, worker: int) -> int:
        """Return the rank of a worker, int ≥ 0 as vLLM counts them. Raises `ValueError` where it has no place."""
        if self.rank_offset + worker >= self.world_size:
            raise ValueError(
                f"worker {worker} would be rank {self.rank_offset + worker} in a group of {self.world_size}: its size "
                f"must count the trainer and every worker of every engine"
            )
        return self.rank_offset + worker


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """The tensors that follow, as `/update_weights` announces them; three lists of equal length.

    Args:
        names: As in the Hugging Face checkpoint.
        dtype_names: Such as `"bfloat16"`.
        shapes: Of whole tensors, not of shards.

    Raises:
        ValueError: If the lists differ in length, or one holds something else.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        lengths = len(self.names), len(self.dtype_names), len(self.shapes)
        if len(set(lengths)) != 1:
            raise ValueError("names, dtype_names and shapes have {}, {} and {} entries".format(*lengths))
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            if dtype not in _DTYPES:
                raise ValueError(f"{name!r} is announced as {dtype!r}, which is no dtype of torch")
            if any(type(size) is not int or size < 0 for size in shape):
                raise ValueError(f"{name!r} is announced with the shape {shape!r}")

    @property
    def tensors(self) -> list[Announced]:
        """What will come, in order."""
        columns = zip(self.names, self.dtype_names, self.shapes, strict=True)
        return [Announced(name, _DTYPES[dtype], tuple(shape)) for name, dtype, shape in columns]


def plan(tensors: Iterable[Announced], *, limit: int) -> Iterator[list[Announced]]:
    """Yield the tensors in packed buffers, each of which ends when it holds more than `limit` bytes.

    Nobody says where the sender cuts, so both sides must cut alike; vLLM's own trainers do it in this way.
    """
    buffer: list[Announced] = []
    size = 0
    for tensor in tensors:
        buffer.append(tensor)
        size += tensor.nbytes
        if size > limit:
            yield buffer
            buffer, size = [], 0
    if buffer:
        yield buffer
