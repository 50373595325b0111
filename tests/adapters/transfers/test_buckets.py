"""Bucketing: nothing lost, nothing twice, nothing split that belongs together."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adapters.transfers import StateDictSource
from adapters.transfers.buckets import fused, make_buckets
from lifecycle.errors import UnusableWeights
from lifecycle.ports import Bucket

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]


@st.composite
def weights(draw: st.DrawFn) -> dict[str, Tensor]:
    """Draw tensors of mixed sizes and dtypes; the part of a name before the colon is its group, `-` for none."""
    drawn = draw(
        st.lists(
            st.tuples(st.sampled_from("-abc"), st.integers(0, 9), st.sampled_from(DTYPES)), min_size=1, max_size=12
        )
    )
    return {f"{group}:{i}": torch.zeros(size, dtype=dtype) for i, (group, size, dtype) in enumerate(drawn)}


def group_of(name: str) -> str | None:
    """Return the group that is written in the name."""
    group = name.partition(":")[0]
    return None if group == "-" else group


class Mute:
    """A source that can't tell its names beforehand."""

    def __init__(self, mapping: dict[str, Tensor]) -> None:
        self._mapping = mapping

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them."""
        yield from self._mapping.items()


def cut(mapping: dict[str, Tensor], bucket_bytes: int, *, packed: bool = False) -> list[Bucket]:
    """Cut a mapping into buckets by the groups in its names."""
    return list(make_buckets(StateDictSource(mapping), bucket_bytes=bucket_bytes, atomic=group_of, packed=packed))


@given(weights(), st.integers(1, 60))
def test_every_tensor_travels_once_and_in_order(mapping: dict[str, Tensor], bucket_bytes: int) -> None:
    """The buckets joined are the source, with its shapes, dtypes and tensors."""
    buckets = cut(mapping, bucket_bytes)
    assert [name for bucket in buckets for name in bucket.names] == list(mapping)
    assert [shape for bucket in buckets for shape in bucket.shapes] == [tuple(t.shape) for t in mapping.values()]
    assert [getattr(torch, d) for bucket in buckets for d in bucket.dtypes] == [t.dtype for t in mapping.values()]
    assert [len(bucket.payload) for bucket in buckets] == [len(bucket.names) for bucket in buckets]


@given(weights(), st.integers(1, 60), st.booleans())
def test_sizes_are_exact_and_only_the_last_bucket_says_so(
    mapping: dict[str, Tensor], bucket_bytes: int, packed: bool
) -> None:
    """Bytes are the sum over a bucket's tensors, indices count up, `last` is set once and at the end."""
    buckets = cut(mapping, bucket_bytes, packed=packed)
    assert [b.nbytes for b in buckets] == [sum(mapping[name].nbytes for name in b.names) for b in buckets]
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert [b.last for b in buckets] == [False] * (len(buckets) - 1) + [True]
    assert {b.packed for b in buckets} == {packed}


@given(weights(), st.integers(1, 60), st.booleans())
def test_groups_are_never_split(mapping: dict[str, Tensor], bucket_bytes: int, packed: bool) -> None:
    """However small the target, a group is in one bucket."""
    buckets = cut(mapping, bucket_bytes, packed=packed)
    for group in "abc":
        assert sum(any(group_of(name) == group for name in bucket.names) for bucket in buckets) <= 1


@given(weights(), st.integers(1, 60))
def test_only_what_is_glued_together_exceeds_the_target(mapping: dict[str, Tensor], bucket_bytes: int) -> None:
    """A bucket above the target is one tensor, or is held together by a group."""
    for bucket in cut(mapping, bucket_bytes):
        if bucket.nbytes > bucket_bytes and len(bucket.names) > 1:
            groups = [group_of(name) for name in bucket.names]
            assert any(groups.count(group) > 1 for group in groups if group is not None)


@given(weights(), st.integers(1, 60))
def test_packed_tensors_begin_at_multiples_of_their_element_size(mapping: dict[str, Tensor], bucket_bytes: int) -> None:
    """Receivers view slices of a flat buffer in the tensor's dtype, which needs alignment."""
    seen: list[str] = []
    for bucket in cut(mapping, bucket_bytes, packed=True):
        offset = 0
        for tensor in bucket.payload:
            assert offset % tensor.element_size() == 0
            offset += tensor.nbytes
        seen += bucket.names
    assert sorted(seen) == sorted(mapping)


@given(weights(), st.integers(1, 60))
def test_a_source_that_keeps_its_names_to_itself_is_never_split_silently(
    mapping: dict[str, Tensor], bucket_bytes: int
) -> None:
    """Without names beforehand, groups are whole or the source is refused."""
    try:
        buckets = list(make_buckets(Mute(mapping), bucket_bytes=bucket_bytes, atomic=group_of))
    except UnusableWeights as error:
        assert "belongs with tensors that are already on their way" in str(error)  # noqa: PT017 either way is right
        return
    for group in "abc":
        assert sum(any(group_of(name) == group for name in bucket.names) for bucket in buckets) <= 1


def test_projections_that_engines_fuse_stay_together_by_default() -> None:
    """Query, key and value of a layer, and gate and up, share a bucket, also in alphabetical order."""
    names = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
    mapping = {f"model.layers.{i}.{n}.weight": torch.zeros(8) for i in (0, 1) for n in names}
    mapping |= {f"model.layers.2.mlp.{n}_proj.weight": torch.zeros(8) for n in ("gate", "up", "down")}
    buckets = list(make_buckets(StateDictSource(mapping), bucket_bytes=1))
    assert [len(bucket.names) for bucket in buckets] == [4, 1, 4, 1, 2, 1]


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.bias", True),
        ("layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight", False),
        ("layers.0.mlp.experts.3.gate_proj.weight", "layers.0.mlp.experts.3.up_proj.weight", True),
        ("layers.0.mlp.experts.3.w1.weight", "layers.0.mlp.experts.4.w3.weight", False),
        ("layers.0.self_attn.q_a_proj.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.gate_proj.weight", False),
    ],
)
def test_what_is_fused_goes_by_the_layer(one: str, other: str, together: bool) -> None:
    """Names are in one group where an engine makes one parameter out of them."""
    assert (fused(one) == fused(other)) is together


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"]
)
def test_what_stands_alone_has_no_group(name: str) -> None:
    """Other tensors may travel anywhere."""
    assert fused(name) is None


def test_a_bucket_is_made_before_the_rest_is_gathered() -> None:
    """No more than a bucket and one tensor are taken from the source ahead."""
    taken: list[int] = []

    class Counting:
        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            for i in range(9):
                taken.append(i)
                yield str(i), torch.zeros(4)

    next(iter(make_buckets(Counting(), bucket_bytes=16)))
    assert len(taken) <= 3


@pytest.mark.parametrize(
    ("pairs", "problem"), [([], "no tensors"), ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "'a' comes twice")]
)
def test_unusable_sources_are_refused(pairs: list[tuple[str, Tensor]], problem: str) -> None:
    """Nothing at all, or a name twice, is no publication."""

    class Pairs:
        def tensors(self) -> Iterator[tuple[str, Tensor]]:
            yield from pairs

    with pytest.raises(UnusableWeights, match=problem):
        list(make_buckets(Pairs()))
