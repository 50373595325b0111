"""Weight sources: the tensors of one version, named as in the Hugging Face checkpoint and in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lifecycle.errors import UnusableWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Module

    Rename = Callable[[str], str | None] | Mapping[str, str]

__all__ = ["ModuleSource", "StateDictSource"]


class ModuleSource:
    """The parameters of a module, and its persistent buffers where asked for.

    Order is that of `named_parameters()`. Tied weights come once, under the name that the module lists first, as in a
    Hugging Face checkpoint: `model.embed_tokens.weight`, and no `lm_head.weight`, which engines tie by themselves. A
    sharded parameter (DTensor, as FSDP2 makes) is gathered with `full_tensor()` when its turn comes: a collective, so
    every trainer rank iterates the source, also those that send nothing.

    Args:
        module: The module. Read at each `tensors()`, so one source serves all versions.
        rename: Function or mapping from the module's name to the checkpoint's. `None` from a function leaves the tensor
            out; a name that is not in a mapping stays as it is.
        dtype: dtype to convert floating-point tensors to, such as that of the engines' checkpoint; `None` to keep it.
        buffers: Whether to yield persistent buffers too, after the parameters. Engines refuse names they don't know.
        check_finite: Whether to refuse NaN and infinities, at the price of reading every element once.
    """

    def __init__(
        self,
        module: Module,
        *,
        rename: Rename | None = None,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        check_finite: bool = False,
    ) -> None:
        self._module = module
        self._rename = rename
        self._dtype = dtype
        self._buffers = buffers
        self._check_finite = check_finite

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in a fixed order: contiguous, detached, whole, on the module's device.

        A tensor that needed no conversion shares memory with the module: use it before the next optimiser step.

        Raises:
            UnusableWeights: If there is nothing to publish, two tensors get one name, a tensor is on the meta device,
                or holds NaN or infinity where that is checked.
        """
        named = self._parameters_and_buffers()
        return _usable(named, rename=self._rename, dtype=self._dtype, check_finite=self._check_finite)

    def names(self) -> Iterator[str]:
        """Yield the names that `tensors` will yield, in the same order, without gathering anything."""
        return _names(self._parameters_and_buffers(), self._rename)

    def _parameters_and_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._module.named_parameters(remove_duplicate=True)
        if self._buffers:
            # Only state_dict() knows which buffers are persistent; keep_vars leaves them as they are.
            persistent = self._module.state_dict(keep_vars=True)
            yield from ((name, buffer) for name, buffer in self._module.named_buffers() if name in persistent)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self._module).__name__}, dtype={self._dtype})"


class StateDictSource:
    """The tensors of a mapping, such as a state dict that was gathered already.

    Order is that of the mapping. Whole tensors that share their memory are tied weights and come once, under the first
    name (see `ModuleSource`); parts of one storage come each on their own. Sharded tensors are gathered.

    Args:
        mapping: Tensors by name; other values are refused.
        rename: As in `ModuleSource`.
        dtype: As in `ModuleSource`.
        check_finite: As in `ModuleSource`.
    """

    def __init__(
        self,
        mapping: Mapping[str, Tensor],
        *,
        rename: Rename | None = None,
        dtype: torch.dtype | None = None,
        check_finite: bool = False,
    ) -> None:
        self._mapping = mapping
        self._rename = rename
        self._dtype = dtype
        self._check_finite = check_finite

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the mapping's order; for the rest as `ModuleSource.tensors`."""
        named = self._mapping.items()
        return _usable(named, rename=self._rename, dtype=self._dtype, check_finite=self._check_finite)

    def names(self) -> Iterator[str]:
        """Yield the names that `tensors` will yield, in the same order, without gathering anything."""
        return _names(self._mapping.items(), self._rename)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._mapping)} tensors, dtype={self._dtype})"


def _usable(
    named: Iterable[tuple[str, Tensor]], *, rename: Rename | None, dtype: torch.dtype | None, check_finite: bool
) -> Iterator[tuple[str, Tensor]]:
    origins: dict[str, str] = {}
    for original, name, tensor in _renamed(named, rename):
        if name in origins:
            raise UnusableWeights(f"{origins[name]!r} and {original!r} both have the name {name!r}")
        origins[name] = original
        whole = _whole(original, tensor, dtype)
        if check_finite and whole.is_floating_point() and not bool(torch.isfinite(whole).all()):
            raise UnusableWeights(f"{original!r} holds NaN or infinity")
        yield name, whole
    if not origins:
        raise UnusableWeights("the source holds no tensors, so there is nothing to publish")


def _names(named: Iterable[tuple[str, Tensor]], rename: Rename | None) -> Iterator[str]:
    return (name for _, name, _ in _renamed(named, rename))


def _renamed(named: Iterable[tuple[str, Tensor]], rename: Rename | None) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (original name, name in the checkpoint, tensor), without tied copies and what is left out."""
    seen: set[tuple[Any, ...]] = set()
    for original, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise UnusableWeights(f"{original!r} is no tensor but of type {type(tensor).__name__}")
        name, memory = _new_name(original, rename), _memory(tensor)
        if name is None or memory in seen:
            continue
        if memory is not None:
            seen.add(memory)
        yield original, name, tensor


def _new_name(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    return rename(name) if callable(rename) else rename.get(name, name)


def _memory(tensor: Tensor) -> tuple[Any, ...] | None:
    """Identify what a tensor shows: two that agree in all of this always hold the same values."""
    if _is_sharded(tensor) or tensor.is_meta or tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _whole(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if tensor.is_meta:
        raise UnusableWeights(f"{name!r} is on the meta device: it has a shape and no values")
    whole = tensor.detach()
    if _is_sharded(whole):
        whole = whole.full_tensor()  # type: ignore[attr-defined]
    if dtype is not None and whole.is_floating_point():
        whole = whole.to(dtype)
    return whole.contiguous()


def _is_sharded(tensor: Tensor) -> bool:
    return callable(getattr(tensor, "full_tensor", None))
