"""What the plugin is told: parsed, refused where it makes no sense, and cut into buffers as the sender cuts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.transfers.vllm_plugin.messages import Announced, InitInfo, UpdateInfo, plan

GROUP: dict[str, Any] = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 3, "world_size": 5}


def test_workers_are_ranks_from_the_offset_on() -> None:
    """The trainer is rank 0, and other engines may come before this one."""
    info = InitInfo(**GROUP)
    assert [info.rank(worker) for worker in (0, 1)] == [3, 4]
    with pytest.raises(ValueError, match="worker 2 would be rank 5 in a group of 5"):
        info.rank(2)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("backend", "mpi", "backend is one of"),
        ("master_port", 0, "master_port is between 1 and 65535, not 0"),
        ("rank_offset", 0, "rank_offset is between 1 and world_size - 1, not 0 of 5"),
        ("rank_offset", 5, "not 5 of 5"),
        ("timeout_s", 0.0, "timeout_s is above 0"),
        ("packed_buffer_size_bytes", 0, "at least 1"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(field: str, value: Any, reason: str) -> None:
    """Before anything is opened."""
    with pytest.raises(ValueError, match=reason):
        InitInfo(**GROUP | {field: value})


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "reason"),
    [
        (["a"], ["float32"], [], "names, dtype_names and shapes have 1, 1 and 0 entries"),
        (["a"], ["Tensor"], [[1]], "'a' is announced as 'Tensor', which is no dtype of torch"),
        (["a"], ["float32"], [[2, -1]], r"'a' is announced with the shape \[2, -1\]"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]], reason: str
) -> None:
    """Before anything is received."""
    with pytest.raises(ValueError, match=reason):
        UpdateInfo(names=names, dtype_names=dtypes, shapes=shapes)


def test_an_update_announces_its_tensors_in_order() -> None:
    """Sizes follow from dtype and shape; a tensor is named in errors by all three."""
    first, second = UpdateInfo(names=["b", "a"], dtype_names=["bfloat16", "int64"], shapes=[[2, 3], []]).tensors
    assert (str(first), first.nbytes) == ("'b' (bfloat16 [2, 3])", 12)
    assert (str(second), second.nbytes) == ("'a' (int64 [])", 8)


@given(sizes=st.lists(st.integers(0, 40), max_size=30), limit=st.integers(1, 100))
def test_a_buffer_ends_when_it_holds_more_than_the_limit(sizes: list[int], limit: int) -> None:
    """No tensor is lost or moved; each buffer but the last passes the limit with its last tensor."""
    tensors = [Announced(str(number), torch.uint8, (size,)) for number, size in enumerate(sizes)]
    buffers = list(plan(tensors, limit=limit))
    assert [each for buffer in buffers for each in buffer] == tensors
    for buffer in buffers:
        assert sum(each.nbytes for each in buffer[:-1]) <= limit
    for buffer in buffers[:-1]:
        assert sum(each.nbytes for each in buffer) > limit
