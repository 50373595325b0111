"""The weights of an engine: where they came from, what they are called, and the ways new ones get in."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from adapters.engines.embedded import checkpoint
from adapters.transfers.process_group import Group, connect_group
from lifecycle.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from adapters.engines.embedded.model import CausalLM

__all__ = ["Weights", "WeightsError", "dtype_named"]


class WeightsError(RuntimeError):
    """New weights were refused or only partly taken; the message is the server's answer."""


class Weights:
    """The model's weights and the groups they can be received in; used in the scheduler's thread only.

    Args:
        model: The model that runs.
        path: The checkpoint it was loaded from.
    """

    def __init__(self, model: CausalLM, path: str) -> None:
        self.model = model
        self.path = path
        self.groups: dict[str, Group] = {}
        self._timeouts: dict[str, float] = {}
        self._tensors = dict(model.tensors())

    def from_disk(self, path: str, *, strict: bool) -> set[str]:
        """Overwrite the weights with those of the checkpoint in `path`.

        Args:
            path: Directory of the checkpoint.
            strict: Whether a tensor that this model does not have is an error.

        Returns:
            The names of the weights that the checkpoint lacks; they keep their old values.

        Raises:
            CheckpointError: If a file cannot be read or a shape is wrong; tensors before that one are in.
        """
        loaded = self.load(checkpoint.read_tensors(path), strict=strict)
        return set(self._tensors) - loaded

    def load(self, tensors: Iterable[tuple[str, Tensor]], *, strict: bool) -> set[str]:
        """Copy `tensors` in by name, converting dtypes, and return the names that were taken.

        Raises:
            WeightsError: At a wrong shape, and if `strict` at an unknown name; the tensors before it are in.
        """
        loaded = set()
        for name, tensor in tensors:
            weight = self._tensors.get(name)
            if weight is None:
                tied = name == "lm_head.weight" and self.model.config.tie_word_embeddings
                if strict and not tied:
                    raise WeightsError(f"There is no module or parameter named '{name}' in LlamaModel.")
                continue
            if weight.shape != tensor.shape:
                raise WeightsError(
                    f"The size of tensor {name}, {[*tensor.shape]}, must match the size of the parameter, "
                    f"{[*weight.shape]}."
                )
            weight.copy_(tensor)
            loaded.add(name)
        return loaded

    def get(self, name: str) -> Tensor | None:
        """Return the weight called `name`, or `None`."""
        if name == "lm_head.weight" and self.model.config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        return self._tensors.get(name)

    def checksums(self) -> tuple[dict[str, str], str]:
        """Return 16 hexadecimal digits per weight, a function of its bytes alone, and the same for all together."""
        each = {name: _digest(_bytes_of(tensor)) for name, tensor in self._tensors.items()}
        return each, _digest("".join(f"{name}{each[name]}" for name in sorted(each)).encode())

    def join(
        self,
        name: str,
        *,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        backend: str,
        timeout: float,
        group_name: str | None = None,
    ) -> None:
        """Join the group that the trainer hosts, and call it `name` here, in place of an older one of that name.

        Args:
            name: What it is called here.
            master_address: Host of the trainer's store.
            master_port: Its TCP port.
            rank: This engine's rank.
            world_size: Number of ranks.
            backend: "gloo".
            timeout: Deadline in seconds of joining, and later of each receive.
            group_name: What the trainer calls it; `None` for the same.

        Raises:
            WeightsError: If the ranks did not meet.
        """
        self.leave(name)
        try:
            group = connect_group(
                master_address=master_address,
                master_port=master_port,
                rank=rank,
                world_size=world_size,
                group_name=name if group_name is None else group_name,
                backend=backend,
                timeout=timeout,
            )
        except (TransferFailed, ValueError) as error:
            raise WeightsError(str(error)) from error
        self.groups[name] = group
        self._timeouts[name] = timeout

    def leave(self, name: str) -> bool:
        """Leave the group `name`; false if there is none."""
        group = self.groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    def receive_into(self, group: str, tensors: list[Tensor]) -> None:
        """Receive `tensors` from rank 0 of `group`, one broadcast each, in place; blocks.

        Raises:
            WeightsError: If the trainer is gone, or does not send in time.
        """
        try:
            self.groups[group].broadcast_all(tensors, 0, timeout=self._timeouts[group])
        except TransferFailed as error:
            raise WeightsError(str(error)) from error

    def receive(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> list[tuple[str, Tensor]]:
        """Receive one tensor per name from rank 0, each in its own dtype; nothing is loaded yet.

        Lists of unequal lengths are cut to the shortest, as SGLang does.
        """
        announced = zip(names, dtypes, shapes, strict=False)
        received = [(name, torch.empty(shape, dtype=dtype_named(dtype))) for name, dtype, shape in announced]
        self.receive_into(group, [tensor for _, tensor in received])
        return received

    def receive_bucket(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> list[tuple[str, Tensor]]:
        """Receive one uint8 tensor that holds the bytes of all tensors, one after the other."""
        parts, total = [], 0
        for name, dtype_name, shape in zip(names, dtypes, shapes, strict=False):
            dtype = dtype_named(dtype_name)
            if total % dtype.itemsize:
                raise WeightsError(f"Unaligned received tensor {name}: byte offset {total}, dtype {dtype}")
            size = torch.Size(shape).numel() * dtype.itemsize
            parts.append((name, dtype, shape, total, size))
            total += size
        bucket = torch.empty(total, dtype=torch.uint8)
        self.receive_into(group, [bucket])
        return [(name, bucket[at : at + size].view(dtype).view(shape)) for name, dtype, shape, at, size in parts]

    def close(self) -> None:
        """Leave every group."""
        for name in list(self.groups):
            self.leave(name)


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype called `name`, as in "bfloat16".

    Raises:
        WeightsError: If there is none; "torch.bfloat16" is none, as for the real servers.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"module 'torch' has no attribute '{name}'")
    return dtype


def is_checkpoint(path: str) -> bool:
    """Whether `path` is a directory that holds weights; says nothing of their content."""
    return any(Path(path).glob("*.safetensors"))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
