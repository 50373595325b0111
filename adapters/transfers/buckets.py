"""Cut a stream of named tensors into buckets that never separate what an engine fuses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lifecycle.errors import UnusableWeights
from lifecycle.ports import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from torch import Tensor

    from lifecycle.ports import WeightSource

    Atomic = Callable[[str], Hashable | None]
    Named = tuple[str, Tensor]

__all__ = ["BUCKET_BYTES", "fused", "make_buckets"]

BUCKET_BYTES = 256 * 2**20
"""Large enough that an engine's request per bucket costs nothing, small enough to gather beside a model."""

_FUSED = re.compile(
    r"(?P<module>^|.*\.)(?:(?P<qkv>[qkv]_proj)|(?P<latent>q_a_proj|kv_a_proj_with_mqa)"
    r"|(?P<gate_up>(?:gate|up)_proj)|(?P<experts>w[13]))\."
)


def fused(name: str) -> Hashable | None:
    """Return the layer that SGLang and vLLM make out of this tensor and others, or `None` if it stays alone.

    Query, key and value projections of one attention are one layer there, and so are gate and up projection of one MLP
    or expert. Where an engine gets them in different requests, some versions report success and change nothing.
    """
    match = _FUSED.match(name)
    return None if match is None else (match["module"], match.lastgroup)


def make_buckets(
    source: WeightSource,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    atomic: Atomic | None = fused,
    packed: bool = False,
) -> Iterator[Bucket]:
    """Yield the tensors of `source` in buckets, in order, gathering no more than one bucket and one group ahead.

    A bucket holds at most `bucket_bytes`, unless a single tensor or a group that must not be split is larger: then it
    is a bucket of its own. A source with a method `names()`, which gives all names beforehand without gathering
    anything, may interleave groups and other tensors; what lies between then travels in the same bucket.

    Args:
        source: The weights.
        bucket_bytes: Target size in bytes, ≥ 1.
        atomic: Which group a tensor belongs to, by its name; `None` from it for a tensor that stands alone, `None` for
            it to have no groups.
        packed: The buckets will be flattened, so every tensor must begin at a multiple of its element size: a bucket
            ends early where that isn't so, and a group of mixed dtypes is sorted by element size, largest first.

    Yields:
        Buckets whose payload is a tuple of contiguous tensors; exactly the last one has `last` set.

    Raises:
        UnusableWeights: If the source is empty, a name comes twice, or a group would be split.
    """
    index, size = 0, 0
    batch: list[Named] = []
    for unit in _units(source, atomic or (lambda _: None)):
        if packed:
            unit.sort(key=lambda named: -named[1].element_size())
        nbytes = sum(tensor.nbytes for _, tensor in unit)
        # Sizes of the elements are powers of two, so a unit is aligned where its first and largest one is.
        misaligned = packed and size % unit[0][1].element_size() != 0
        if batch and (size + nbytes > bucket_bytes or misaligned):
            yield _bucket(index, batch, size, packed=packed, last=False)
            index, batch, size = index + 1, [], 0
        batch += unit
        size += nbytes
    if not batch:
        raise UnusableWeights("the source holds no tensors, so there is nothing to publish")
    yield _bucket(index, batch, size, packed=packed, last=True)


def _units(source: WeightSource, atomic: Atomic) -> Iterator[list[Named]]:
    """Yield what must not be split: single tensors, and groups with whatever lies between their tensors."""
    ends = _ends(source, atomic)
    seen: set[str] = set()
    closed: set[Hashable] = set()
    unit: list[Named] = []
    until, before = -1, None
    for position, (name, tensor) in enumerate(source.tensors()):
        if name in seen:
            raise UnusableWeights(f"{name!r} comes twice")
        seen.add(name)
        key = atomic(name)
        if unit and position > until and (key is None or key != before):
            closed.update(atomic(each) for each, _ in unit)
            yield unit
            unit = []
        if key is not None:
            if key in closed:
                raise UnusableWeights(
                    f"{name!r} belongs with tensors that are already on their way: let the source yield them one after "
                    f"another, or tell all names beforehand by a method names()"
                )
            until = max(until, ends.get(key, position))
        unit.append((name, tensor.detach().contiguous()))
        before = key
    if unit:
        yield unit


def _ends(source: WeightSource, atomic: Atomic) -> dict[Hashable, int]:
    names: Iterable[str] = source.names() if hasattr(source, "names") else ()
    return {key: position for position, name in enumerate(names) if (key := atomic(name)) is not None}


def _bucket(index: int, batch: list[Named], nbytes: int, *, packed: bool, last: bool) -> Bucket:
    return Bucket(
        index=index,
        last=last,
        names=tuple(name for name, _ in batch),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in batch),
        shapes=tuple(tuple(tensor.shape) for _, tensor in batch),
        nbytes=nbytes,
        packed=packed,
        payload=tuple(tensor for _, tensor in batch),
    )
