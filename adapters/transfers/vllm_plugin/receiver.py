"""Receives updates and hands their tensors on, one after another. What a worker does, without vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .group import Group, TransferError, join
from .messages import Announced, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch import Tensor

    from .messages import InitInfo, UpdateInfo

    Load = Callable[[Iterator[tuple[str, Tensor]]], object]

__all__ = ["Receiver"]


class Receiver:
    """One worker's place in the trainer's group. Whatever fails, the group is left, and the next `open` joins another.

    Args:
        device: The worker's. Gloo receives into main memory, from where the model loads as from a checkpoint.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: Group | None = None
        self._info: InitInfo | None = None

    def open(self, info: InitInfo, *, worker: int) -> str:
        """Join the group as worker `worker`, int ≥ 0, leaving an older one first. Returns which rank in what.

        Raises:
            ValueError: If the group has no place for this worker.
            TransferError: If the others did not come within `info.timeout_s`.
        """
        self.close()
        rank = info.rank(worker)
        self._group = join(
            master_address=info.master_address,
            master_port=info.master_port,
            rank=rank,
            world_size=info.world_size,
            name=info.group_name,
            backend=info.backend,
            timeout=info.timeout_s,
            device=self._device,
        )
        self._info = info
        return f"rank {rank} of {info.world_size} in {info.backend} group {info.group_name}"

    def update(self, info: UpdateInfo, load: Load) -> None:
        """Receive the tensors of one update, and have each loaded as it comes.

        `load` is given an iterator of (name, tensor) and must use it up; it may keep the tensors, which are nobody
        else's. Raises `TransferError` if a tensor did not come or was refused; the text says which.
        """
        tensors = info.tensors
        if not tensors:
            return
        last: list[Announced] = []

        def received() -> Generator[tuple[str, Tensor], None, None]:
            for announced, tensor in self._receive(tensors):
                last[:] = [announced]
                yield announced.name, tensor

        stream = received()
        try:
            load(stream)
            if not last or last[0] is not tensors[-1]:
                raise TransferError(f"the model left {tensors[-1]} of this update unread")
        except TransferError:
            self.close()
            raise
        except Exception as error:
            self.close()
            culprit = last[0] if last else tensors[0]
            # Loaders assert shapes, often without a word.
            raise TransferError(f"the model refused {culprit}: {str(error) or type(error).__name__}") from error
        except BaseException:
            self.close()
            raise
        finally:
            stream.close()

    def close(self) -> None:
        """Leave the group, if there is one. Idempotent."""
        group, self._group, self._info = self._group, None, None
        if group is not None:
            group.close()

    def _receive(self, tensors: list[Announced]) -> Iterator[tuple[Announced, Tensor]]:
        if self._group is None or self._info is None:
            raise TransferError("there is no group to receive in: init comes first, and again after a failure")
        group, timeout = self._group, self._info.timeout_s
        device = self._device if self._info.backend == "nccl" else torch.device("cpu")
        if not self._info.packed:
            for announced in tensors:
                # Fresh memory each time: vLLM keeps what it was given until a layer is complete.
                tensor = torch.empty(announced.shape, dtype=announced.dtype, device=device)
                group.receive(tensor, timeout=timeout, what=str(announced))
                yield announced, tensor
            return
        for buffer in plan(tensors, limit=self._info.packed_buffer_size_bytes):
            packed = torch.empty(sum(each.nbytes for each in buffer), dtype=torch.uint8, device=device)
            group.receive(packed, timeout=timeout, what=f"{len(buffer)} tensors from {buffer[0]} on")
            yield from zip(buffer, _unpacked(packed, buffer), strict=True)


def _unpacked(packed: Tensor, buffer: list[Announced]) -> Iterator[Tensor]:
    start = 0
    for each in buffer:
        part = packed[start : start + each.nbytes]
        if start % each.dtype.itemsize:  # a view must begin at a multiple of its element size
            part = part.clone()
        yield part.view(each.dtype).view(each.shape)
        start += each.nbytes
